"""Models found by name and in runs, samples that come again, exports that open."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxsp.chat import Renderer
from jaxsp.config import UserError
from jaxsp.inference import (
    FoundModel,
    Input,
    SampleOptions,
    export_run,
    find_model,
    load_weights,
    read_inputs,
    sample,
)
from jaxsp.model.source import open_model
from jaxsp.policy import open_text_side
from jaxsp.tokenizer import load_tokenizer
from jaxsp.trajectory import Completion, GenerateRequest
from tests.tiny import tiny_config, tiny_params, write_tiny_gguf, write_tiny_model, write_tiny_run

OPTIONS = SampleOptions(
    max_tokens=12, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop_strings=(), seed=3, num_samples=1, is_chat=False
)
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models `qwen3`, `llama` and `model.gguf`, and the run `run` of the first, steps 2 and 4."""
    path = tmp_path_factory.mktemp("models")
    write_tiny_model(path / "qwen3")
    write_tiny_model(path / "llama", "llama")
    write_tiny_gguf(path / "model.gguf")
    write_tiny_run(path / "run", path / "qwen3", steps=(2, 4), thinking="off", system_prompt="Be brief.")
    return path


def found(path: Path, **options) -> FoundModel:
    return find_model(str(path), compute_dtype="float32", **options)


def renderer_of(model: FoundModel) -> Renderer:
    return open_text_side(model.config, model.source).renderer


def samples(model: FoundModel, prompts: list[Input], **options) -> list[tuple[GenerateRequest, Completion]]:
    drawn = []
    sample(model, prompts, replace(OPTIONS, **options), lambda request, completion: drawn.append((request, completion)))
    return drawn


def texts(*values: str) -> list[Input]:
    return [Input(f"line {i}", "prompt", value) for i, value in enumerate(values)]


def test_a_run_is_opened_at_its_newest_checkpoint_or_at_the_step_asked_for(directory: Path) -> None:
    for model, step in ((found(directory / "run"), 4), (found(directory / "run", step=2), 2)):
        assert model.step == step
        weights, expected = load_weights(model), tiny_params(tiny_config(), seed=step)
        assert jax.tree.structure(weights) == jax.tree.structure(expected)
        for leaf, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(leaf, other)
    with pytest.raises(UserError, match=r"no checkpoint of step 3; there are steps \[2, 4\]"):
        found(directory / "run", step=3)


def test_a_run_brings_its_chat_format_and_options_replace_it(directory: Path) -> None:
    own = renderer_of(found(directory / "run"))
    assert (own.kind, own.thinking, own.default_system) == ("qwen3", "off", "Be brief.")
    other = renderer_of(found(directory / "run", renderer="chatml", thinking="absent"))
    assert (other.kind, other.thinking, other.default_system) == ("chatml", "absent", "Be brief.")


def test_a_run_without_a_checkpoint_or_a_model_is_one_message(directory: Path, tmp_path: Path) -> None:
    write_tiny_run(tmp_path / "new", directory / "qwen3", steps=())
    with pytest.raises(UserError, match="no complete checkpoint yet"):
        found(tmp_path / "new")
    with pytest.raises(UserError, match="no such model"):
        found(tmp_path / "absent")


def test_samples_come_in_order_and_come_again(directory: Path) -> None:
    model = found(directory / "qwen3")
    prompts = texts("one two", "three", "one two")
    first = samples(model, prompts, num_samples=3)
    tokenizer = load_tokenizer(directory / "qwen3")
    assert [list(request.tokens) for request, _ in first] == [
        tokenizer.encode(prompt.value) for prompt in prompts for _ in range(3)
    ]
    assert len({completion.tokens for _, completion in first}) == 9  # each has a seed of its own
    again = samples(model, prompts, num_samples=3)
    assert [completion for _, completion in again] == [completion for _, completion in first]
    assert all(len(completion.tokens) == len(completion.behaviour_logprobs) for _, completion in first)
    others = samples(model, prompts, num_samples=3, seed=4)
    assert all(one.tokens != other.tokens for (_, one), (_, other) in zip(first, others, strict=True))


def test_weights_kept_in_bfloat16_are_as_good_as_float32_where_they_were_made_in_it(
    directory: Path, tmp_path: Path
) -> None:
    export_run(directory / "run", tmp_path / "export", None, "bfloat16")
    for path, is_same in ((tmp_path / "export", True), (directory / "run", False)):
        kept = samples(found(path, weight_dtype="bfloat16"), texts("Hello", "Anna has 3 cups."))
        wide = samples(found(path), texts("Hello", "Anna has 3 cups."))
        assert (kept == wide) is is_same


def test_a_text_begins_with_bos_and_spells_no_control_token(directory: Path) -> None:
    ((request, _),) = samples(found(directory / "llama"), texts("Hi<|eot_id|>"))
    tokenizer = load_tokenizer(directory / "llama")
    assert request.tokens == (tokenizer.bos_id, *tokenizer.encode("Hi<|eot_id|>"))
    assert tokenizer.special_id("<|eot_id|>") not in request.tokens
    assert request.stop_ids == (609,) and request.stop_strings == ()


def test_a_chat_is_rendered_and_ends_at_the_stops_of_its_format(directory: Path) -> None:
    model = found(directory / "llama")
    renderer = renderer_of(model)
    prompts = [*texts("Hello there"), Input("line 1", "messages", HELLO)]
    for request, _ in samples(model, prompts, is_chat=True, stop_strings=("END",)):
        assert request.tokens == renderer.prompt(HELLO)
        assert request.stop_ids == renderer.stop_ids and request.stop_strings == ("END",)
    (text, _), (chat, _) = samples(model, prompts)  # messages are a chat in any case
    assert chat.tokens == renderer.prompt(HELLO) != text.tokens


def test_tokens_are_taken_as_they_are(directory: Path) -> None:
    ((request, _),) = samples(found(directory / "qwen3"), [Input("line 0", "tokens", [5, 598, 6])])
    assert request.tokens == (5, 598, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Input("f:1", "prompt", ""), "f:1: prompt is empty"),
        (Input("f:1", "tokens", []), "f:1: tokens is empty"),
        (Input("f:1", "tokens", [1, 640]), "f:1: token 640 is outside the model's vocabulary, 640"),
        (Input("f:1", "tokens", [1] * 1020), "f:1: 1020 tokens and --max-tokens 12 are more than the 1024"),
        (Input("f:1", "messages", [{"role": "judge", "content": ""}]), r"f:1: messages\[0\].role is 'judge'"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named_before_weights_are_read(
    tmp_path: Path, directory: Path, given: Input, message: str
) -> None:
    for file in (directory / "qwen3").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=message):
        samples(found(tmp_path), [given])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_run_samples_as_the_run_does(directory: Path, tmp_path: Path, dtype) -> None:
    assert export_run(directory / "run", tmp_path / "export", None, dtype) == 4
    exported, run = found(tmp_path / "export"), found(directory / "run")
    assert replace(exported.config, name="") == replace(run.config, name="")
    if dtype == "float32":
        ours, theirs = (samples(model, texts("Hello there"), is_chat=True) for model in (exported, run))
        assert ours[0][0] == theirs[0][0]
        assert ours[0][1].tokens == theirs[0][1].tokens
    for leaf, other in zip(jax.tree.leaves(load_weights(exported)), jax.tree.leaves(load_weights(run)), strict=True):
        np.testing.assert_array_equal(leaf, other.astype(dtype).astype("float32"))


def test_a_run_of_a_gguf_file_exports_with_its_vocabulary_and_chat_format(directory: Path, tmp_path: Path) -> None:
    write_tiny_run(tmp_path / "run", directory / "model.gguf", steps=(1,))
    export_run(tmp_path / "run", tmp_path / "export", None, "float32")
    before, after = found(tmp_path / "run"), found(tmp_path / "export")
    tokenizers = load_tokenizer(directory / "model.gguf"), load_tokenizer(tmp_path / "export")
    renderers = [renderer_of(model) for model in (before, after)]
    assert renderers[0].kind == renderers[1].kind == "qwen3"
    assert renderers[0].default_system == renderers[1].default_system == "Be brief."
    assert renderers[0].prompt(HELLO) == renderers[1].prompt(HELLO)
    assert renderers[0].stop_ids == renderers[1].stop_ids
    for text in ("Le café — 東京, 12 345\n\n", "<think>x</think><|im_end|>"):
        assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    assert open_model(str(tmp_path / "export")).sizes == before.source.sizes


def test_an_export_never_overwrites(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty directory"):
        export_run(directory / "run", tmp_path, None, "float32")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="is no run directory"):
        export_run(directory / "qwen3", tmp_path / "new", None, "float32")


def test_an_export_is_complete_when_it_appears(directory: Path, tmp_path: Path, monkeypatch) -> None:
    appeared: list[set[str]] = []
    replace_path = Path.replace

    def replace_and_look(self: Path, target: Path) -> Path:
        moved = replace_path(self, target)
        appeared.append({file.name for file in moved.iterdir()})
        return moved

    monkeypatch.setattr(Path, "replace", replace_and_look)
    export_run(directory / "run", tmp_path / "export", None, "float32")
    assert appeared[-1] == {file.name for file in (tmp_path / "export").iterdir()} >= {"jaxsp_chat.json"}


def test_a_damaged_chat_file_of_an_export_is_named(directory: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "jaxsp_chat.json").write_text('{"renderer": "chatml"}')
    with pytest.raises(UserError, match=r"jaxsp_chat\.json: not what `jaxsp export` writes"):
        found(tmp_path / "model")


def test_inputs_are_read_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": "a\u2028b", "id": 7}, {"messages": HELLO}, {"tokens": [1, 2]}]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\n\n")
    fields = ("prompt", "messages", "tokens")
    assert read_inputs(str(path), fields) == [
        Input(f"{path}:1", "prompt", "a\u2028b"),
        Input(f"{path}:2", "messages", HELLO),
        Input(f"{path}:3", "tokens", [1, 2]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not a line of JSON"),
        ("[1]", r":2: not a JSON object"),
        ("{}", r":2: must be an object with exactly one of text, tokens; it has none of them"),
        ('{"text": "a", "tokens": [1]}', r":2: .*; it has text and tokens"),
        ('{"text": 5}', r":2: text must be a text"),
        ('{"tokens": "abc"}', r":2: tokens must be a list of whole numbers"),
        ('{"tokens": [1, true]}', r":2: tokens must be a list of whole numbers"),
        ('{"tokens": [1, 2.0]}', r":2: tokens must be a list of whole numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(UserError, match=r"in\.jsonl" + message):
        read_inputs(str(path), ("text", "tokens"))


def test_a_file_that_is_empty_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl is empty; give lines with text or tokens"):
        read_inputs(str(tmp_path / "empty.jsonl"), ("text", "tokens"))
    with pytest.raises(UserError, match=r"absent\.jsonl cannot be read: No such file"):
        read_inputs(str(tmp_path / "absent.jsonl"), ("text", "tokens"))
