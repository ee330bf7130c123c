import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxsp.sampler.sampling import process_logits, sample_tokens

compiled_sample = jax.jit(sample_tokens)
compiled_process = jax.jit(lambda *rows: jax.nn.log_softmax(process_logits(*rows)))
VOCAB_SIZE = 300  # two blocks and a part of one


def padded(arrays):
    """Arrays of one row per sample, brought to one of two shapes so that little is compiled."""
    logits, *rest = (jnp.asarray(array) for array in arrays)
    missing = (8 if len(logits) <= 8 else 8192) - len(logits)
    logits = jnp.pad(logits, ((0, missing), (0, VOCAB_SIZE - logits.shape[1])), constant_values=-jnp.inf)
    rest = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in rest]
    return logits.at[len(logits) - missing :].set(0), *rest


def process(logits, *options):
    return compiled_process(*padded((logits, *options)))[: len(logits), : logits.shape[1]]


def sample(logits, *options):
    tokens, logprobs = compiled_sample(*padded((logits, *options)))
    return tokens[: len(logits)], logprobs[: len(logits)]


def setting(
    batch: int, temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[jax.Array, ...]:
    return (
        jnp.full(batch, temperature, jnp.float32), jnp.full(batch, top_k, jnp.int32),
        jnp.full(batch, top_p, jnp.float32), jnp.full(batch, min_p, jnp.float32),
    )  # fmt: skip


def probabilities(given_probabilities, **kwargs) -> np.ndarray:
    """What becomes of one row of probabilities."""
    return np.exp(np.asarray(process(jnp.log(jnp.asarray([given_probabilities])), *setting(1, **kwargs))))[0]


def seeds(*values: int):
    return jnp.asarray([(value >> 32, value & 0xFFFFFFFF) for value in values], jnp.uint32)


def test_without_truncation_it_is_the_tempered_log_softmax():
    logits = jax.random.normal(jax.random.key(0), (3, 300)) * 4
    temperature = jnp.array([0.5, 1.0, 3.0])
    found = process(logits, temperature, *setting(3)[1:])
    np.testing.assert_allclose(found, jax.nn.log_softmax(logits / temperature[:, None]), atol=1e-5)


def test_top_k_keeps_the_k_most_probable_and_the_lower_id_among_equals():
    np.testing.assert_allclose(probabilities([0.1, 0.4, 0.2, 0.3], top_k=2), [0, 4 / 7, 0, 3 / 7], atol=1e-6)
    np.testing.assert_allclose(probabilities([0.25] * 4, top_k=3), [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities([0.1, 0.9], top_k=50), [0.1, 0.9], atol=1e-6)


def test_top_p_keeps_the_token_that_crosses_and_nothing_after_it():
    given_probabilities = [0.1, 0.5, 0.15, 0.25]
    np.testing.assert_allclose(probabilities(given_probabilities, top_p=0.4), [0, 1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities(given_probabilities, top_p=0.6), [0, 2 / 3, 0, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(probabilities(given_probabilities, top_p=0.8), [0, 5 / 9, 1.5 / 9, 2.5 / 9], atol=1e-6)
    np.testing.assert_allclose(probabilities(given_probabilities, top_p=1.0), given_probabilities, atol=1e-6)
    # A mass reached exactly is enough: two of four equal tokens make one half.
    np.testing.assert_allclose(probabilities([0.25] * 4, top_p=0.5), [0.5, 0.5, 0, 0], atol=1e-6)


def test_top_p_counts_the_mass_of_what_top_k_kept():
    # 0.4 of 0.7 is 0.571: alone it reaches 0.55, although it is only 0.4 of the whole.
    np.testing.assert_allclose(probabilities([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55), [1, 0, 0, 0], atol=1e-6)


def test_min_p_is_relative_to_the_most_probable():
    found = probabilities([0.5, 0.3, 0.15, 0.05], min_p=0.25)
    np.testing.assert_allclose(found, np.array([50, 30, 15, 0]) / 95, atol=1e-6)


def test_temperature_comes_before_the_truncations():
    squared = np.array([0.36, 0.09, 0.01])  # temperature 1/2 squares the probabilities: 78%, 20%, 2%
    np.testing.assert_allclose(
        probabilities([0.6, 0.3, 0.1], temperature=0.5, top_p=0.9), [0.36 / 0.45, 0.09 / 0.45, 0], atol=1e-5
    )
    np.testing.assert_allclose(probabilities([0.6, 0.3, 0.1], temperature=0.5), squared / squared.sum(), atol=1e-5)


def kept_by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The kept set, one token at a time."""
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))[: top_k or None]
    total, kept, mass = sum(weights[i] for i in order), set(), 0.0
    for i in order:
        if top_p < 1 and mass >= top_p:
            break
        kept.add(i)
        mass += weights[i] / total
    return {i for i in kept if weights[i] >= min_p}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-60, 60), min_size=12, max_size=12, unique=True),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 13),
    st.sampled_from([0.01, 0.123, 0.5, 0.777, 0.93, 1.0]),
    st.sampled_from([0.0, 0.0137, 0.231, 0.87]),
)
def test_the_kept_set_is_the_defined_one(tenths, temperature, top_k, top_p, min_p):
    logits = np.array(tenths, np.float32) / 10
    logprobs = np.asarray(process(jnp.asarray([logits]), *setting(1, temperature, top_k, top_p, min_p)))[0]
    assert {int(i) for i in np.flatnonzero(np.isfinite(logprobs))} == kept_by_definition(
        logits, temperature, top_k, top_p, min_p
    )
    assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)


def test_temperature_0_is_greedy_whatever_the_truncations_say():
    logits = jax.random.normal(jax.random.key(1), (5, 300)) * 3
    plain = np.asarray(jax.nn.log_softmax(logits))
    for kwargs in ({}, {"top_p": 0.1}, {"top_k": 1}, {"top_k": 7, "top_p": 0.9, "min_p": 0.5}):
        options = setting(5, temperature=0.0, **kwargs)
        np.testing.assert_allclose(process(logits, *options), plain, atol=1e-5)
        tokens, logprobs = sample(logits, seeds(1, 2, 3, 4, 5), jnp.arange(5), *options)
        np.testing.assert_array_equal(tokens, plain.argmax(-1))
        np.testing.assert_allclose(logprobs, plain.max(-1), atol=1e-5)


def test_greedy_takes_the_lower_id_of_equals_and_the_best_token_rather_than_the_heaviest_block():
    logits = np.full((2, 300), -20.0, np.float32)
    logits[0, [290, 130]] = 1.0
    logits[1, :128] = 0.0  # 128 tokens together outweigh the best one
    logits[1, 200] = 0.5
    tokens, _ = sample(jnp.asarray(logits), seeds(1, 2), jnp.arange(2), *setting(2, temperature=0.0))
    assert tokens.tolist() == [130, 200]


def test_temperature_1_with_top_p_1_is_not_greedy():
    logits = jnp.zeros((64, 300)).at[:, 5].set(0.1)
    tokens, _ = sample(logits, seeds(*range(64)), jnp.zeros(64, jnp.int32), *setting(64))
    assert len(set(tokens.tolist())) > 30


def test_a_tiny_temperature_is_finite_and_nearly_greedy():
    logits = jax.random.normal(jax.random.key(2), (4, 300)) * 10
    tokens, logprobs = sample(logits, seeds(1, 2, 3, 4), jnp.arange(4), *setting(4, temperature=1e-30))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.7}, {"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8}]
)
def test_tokens_are_drawn_with_the_frequencies_of_the_distribution(options):
    num_draws, vocab_size = 8192, VOCAB_SIZE
    logits = jax.random.normal(jax.random.key(3), (vocab_size,)) * 1.5
    rows = jnp.broadcast_to(logits, (num_draws, vocab_size))
    draw_settings = setting(num_draws, **options)
    tokens, logprobs = sample(rows, seeds(*range(num_draws)), jnp.full(num_draws, 7), *draw_settings)
    expected_logprobs = np.asarray(process(rows[:1], *setting(1, **options)))[0]
    np.testing.assert_allclose(logprobs, expected_logprobs[np.asarray(tokens)], atol=1e-5)
    counts, expected = (
        np.bincount(tokens, minlength=vocab_size),
        np.exp(expected_logprobs.astype(np.float64)) * num_draws,
    )
    assert not counts[expected == 0].any()
    is_rare = expected < 5  # chi-square wants at least five expected draws a cell: the rare ones share one
    cells = [*zip(counts[~is_rare], expected[~is_rare], strict=True), (counts[is_rare].sum(), expected[is_rare].sum())]
    observed, wanted = zip(*(cell for cell in cells if cell[1] > 0), strict=True)
    wanted = np.array(wanted) * (num_draws / np.sum(wanted))
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_draws_at_successive_positions_are_independent():
    logits = jnp.zeros((4096, 2))
    first, _ = sample(logits, seeds(*range(4096)), jnp.full(4096, 0), *setting(4096))
    second, _ = sample(logits, seeds(*range(4096)), jnp.full(4096, 1), *setting(4096))
    table = np.histogram2d(np.asarray(first), np.asarray(second), bins=2)[0]
    assert np.asarray(stats.chi2_contingency(table)[1]) > 1e-3
    assert stats.chisquare(table.ravel()).pvalue > 1e-3


def test_a_row_depends_on_its_own_seed_and_position_only():
    logits = jax.random.normal(jax.random.key(4), (6, 300))
    index = jnp.array([0, 5, 2, 9, 0, 1])
    own = seeds(3, 2**40 + 1, 7, 7, 2**63, 0)
    temperature = jnp.array([1.0, 0.7, 0.0, 1.3, 1.0, 2.0])
    top_k, top_p = jnp.array([0, 5, 0, 0, 0, 0]), jnp.array([1.0, 1.0, 1.0, 0.7, 1.0, 1.0])
    together, logprobs = sample(logits, own, index, temperature, top_k, top_p, jnp.zeros(6))
    for row in range(6):
        one = slice(row, row + 1)
        alone, logprob = sample(
            logits[one], own[one], index[one], temperature[one], top_k[one], top_p[one], jnp.zeros(1)
        )
        assert alone[0] == together[row]
        np.testing.assert_allclose(logprob[0], logprobs[row], atol=1e-6)


def test_seeds_that_differ_in_any_word_give_different_streams():
    logits = jnp.zeros((4, 300))
    streams = {
        tuple(sample(logits, seeds(*[seed] * 4), jnp.arange(4), *setting(4))[0].tolist())
        for seed in (0, 1, 2**32, 2**32 + 1, 2**63)
    }
    assert len(streams) == 5
