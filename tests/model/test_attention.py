import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_forward import GOLDEN, full_hidden

from jaxsp.model import attention as module
from jaxsp.model.decoder import hidden_states
from jaxsp.model.source import load_params, open_model

attention = jax.jit(module.attention)
forest_attention = jax.jit(module.forest_attention, static_argnums=4)


def random_qkv(seed, length, num_heads=4, num_kv_heads=2, head_dim=8):
    rng = np.random.default_rng(seed)
    shapes = [(2, length, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def test_attention_equals_a_loop_over_heads_and_queries():
    q, k, v = random_qkv(0, 5)
    mask = np.random.default_rng(1).random((2, 5, 5)) < 0.5
    mask |= np.eye(5, dtype=bool)
    found = attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), jnp.asarray(mask))
    for b, i, n in np.ndindex(2, 5, 4):
        scores = np.asarray(k[b, :, n // 2] @ q[b, i, n]) / np.sqrt(8)
        weights = np.where(mask[b, i], np.exp(scores), 0)
        expected = (weights / weights.sum()) @ np.asarray(v[b, :, n // 2])
        np.testing.assert_allclose(found[b, i, n], expected, atol=1e-5)


# A forest: roots 0 and 7 side by side, padding at 10. Under root 0 (tokens 0, 1) hang the branches 2-3 and 4; under 4
# hang the leaves 5 and 6.
VISIBLE_UNTIL = [7, 7, 4, 4, 7, 6, 7, 10, 10, 10, 11]
PATHS = [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 4, 6], [7, 8, 9]]


def test_every_path_of_a_forest_attends_as_if_it_stood_alone():
    q, k, v = random_qkv(2, len(VISIBLE_UNTIL))
    packed = forest_attention(q, k, v, jnp.array([VISIBLE_UNTIL, VISIBLE_UNTIL]))
    for path in PATHS:
        index = jnp.array(path)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((len(path),) * 2, bool)), (2, len(path), len(path)))
        alone = attention(q[:, index], jnp.swapaxes(k[:, index], 1, 2), jnp.swapaxes(v[:, index], 1, 2), causal)
        np.testing.assert_allclose(packed[:, index], alone, atol=1e-6)
    np.testing.assert_allclose(packed[:, 10], jnp.repeat(v[:, 10], 2, axis=1), atol=1e-6)  # padding sees itself


def test_hidden_states_of_a_packed_forest_equal_those_of_separate_sequences():
    source = open_model(str(GOLDEN / "qwen3_untied"))
    params = load_params(source)
    tokens = np.random.default_rng(3).integers(4, 64, len(VISIBLE_UNTIL))
    positions = np.zeros(len(VISIBLE_UNTIL), np.int32)
    for path in PATHS:
        positions[path] = np.arange(len(path))
    until = jnp.array([VISIBLE_UNTIL])

    def attend(q, k, v, cache):
        return forest_attention(q, k, v, until), cache

    packed = hidden_states(source.sizes, params, jnp.asarray(tokens)[None], jnp.asarray(positions)[None], attend)[0]
    for path in PATHS:
        alone = full_hidden(source.sizes, params, tokens[path][None])
        np.testing.assert_allclose(packed[0, np.array(path)], alone[0], atol=1e-5)


def test_chunks_and_spans_of_queries_change_neither_result_nor_gradient(monkeypatch):
    q, k, v = random_qkv(4, 16)
    until = jnp.array([[16] * 16, [9] * 9 + [16] * 7])

    def run(query_chunk, max_spans):
        monkeypatch.setattr(module, "MAX_SPANS", max_spans)

        def total(q, k, v):
            out = module.forest_attention(q, k, v, until, query_chunk)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    (gradients, out) = run(16, 1)
    for query_chunk, max_spans in ((4, 16), (5, 16), (2, 2), (3, 2)):
        found_gradients, found = run(query_chunk, max_spans)
        np.testing.assert_allclose(found, out, atol=1e-6)
        for chunked, whole in zip(found_gradients, gradients, strict=True):
            np.testing.assert_allclose(chunked, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [[5, 1, 3], [2, 7]])
def test_packed_sequences_do_not_see_each_other(lengths):
    q, k, v = random_qkv(5, sum(lengths))
    ends = np.cumsum(lengths)
    packed = forest_attention(q, k, v, jnp.array([np.repeat(ends, lengths)] * 2))
    for length, end in zip(lengths, ends, strict=True):
        own = slice(end - length, end)
        alone = forest_attention(q[:, own], k[:, own], v[:, own], jnp.full((2, length), length))
        np.testing.assert_allclose(packed[:, own], alone, atol=1e-6)
