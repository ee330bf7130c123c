import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import SIZES, tiny_params

from jaxsp.learner.losses import token_logprobs
from jaxsp.model.decoder import logits

R, L, T = 2, 7, 11


def target_arrays(seed: int = 0):
    """Random hidden states and targets, as keyword arguments of `token_logprobs`."""
    rng = np.random.default_rng(seed)
    num_used = np.array([[9], [4]])
    return {
        "hidden": jnp.asarray(rng.normal(size=(R, L, SIZES.embed_dim)), jnp.float32),
        "predictor": jnp.asarray(rng.integers(0, L, (R, T)), jnp.int32),
        "target_tokens": jnp.asarray(rng.integers(0, SIZES.vocab_size, (R, T)), jnp.int32),
        "temperatures": jnp.asarray(rng.uniform(0.5, 1.5, (R, T)), jnp.float32),
        "target_mask": jnp.asarray(np.arange(T)[None] < num_used),
    }


def plain_logprobs(params, hidden, predictor, target_tokens, temperatures, target_mask):
    """Full logits, then log-softmax: the definition."""
    scores = logits(params, hidden)
    picked = jnp.take_along_axis(scores, predictor[..., None], axis=1) / temperatures[..., None]
    log_p = jax.nn.log_softmax(picked, axis=-1)
    logprobs = jnp.take_along_axis(log_p, target_tokens[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.where(target_mask, logprobs, 0), jnp.where(target_mask, entropy, 0)


def untied_params():
    params = tiny_params()
    kernel = jax.random.normal(jax.random.key(5), (SIZES.embed_dim, SIZES.vocab_size))
    return {**params, "lm_head": {"kernel": kernel}}


@pytest.mark.parametrize(("params_of", "chunk"), [(tiny_params, 1), (tiny_params, 8), (untied_params, 1024)])
def test_token_logprobs_and_their_gradients_are_those_of_full_logits(params_of, chunk):
    params, arrays = params_of(), target_arrays()
    hidden = arrays.pop("hidden")
    weights = jax.random.normal(jax.random.key(1), (2, R, T))

    def scalar(function, params, hidden):
        logprobs, entropy = function(params, hidden, **arrays)
        return jnp.sum(logprobs * weights[0] + entropy * weights[1]), (logprobs, entropy)

    grad = jax.jit(jax.value_and_grad(scalar, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, expected), expected_gradients = grad(plain_logprobs, params, hidden)
    (_, found), found_gradients = grad(partial(token_logprobs, chunk=chunk), params, hidden)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found_gradients, expected_gradients)


@pytest.mark.parametrize("chunk", [2, 100])
def test_targets_drawn_from_few_tokens_are_renormalised_and_others_are_not(chunk):
    params, arrays = tiny_params(), target_arrays()
    hidden = arrays.pop("hidden")
    rng = np.random.default_rng(1)
    allowed = np.full((R, T, 4), -1, np.int32)
    allowed[:, ::2, :3] = rng.permuted(np.tile(np.arange(1, SIZES.vocab_size), (R, (T + 1) // 2, 1)), axis=-1)[..., :3]
    allowed[:, ::2, 3] = arrays["target_tokens"][:, ::2]  # perhaps there already: it counts once
    weights = jax.random.normal(jax.random.key(1), (2, R, T))

    def plain(params, hidden):
        scores = jnp.take_along_axis(logits(params, hidden), arrays["predictor"][..., None], axis=1)
        possible = (allowed[..., None] == np.arange(SIZES.vocab_size)).any(2) | (allowed < 0).all(-1, keepdims=True)
        scores = jnp.where(possible, scores / arrays["temperatures"][..., None], -1e9)
        log_p = jax.nn.log_softmax(scores)
        found = jnp.take_along_axis(log_p, arrays["target_tokens"][..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return jnp.where(arrays["target_mask"], found, 0), jnp.where(arrays["target_mask"], entropy, 0)

    def ours(params, hidden):
        return token_logprobs(params, hidden, **arrays, allowed=jnp.asarray(allowed), chunk=chunk)

    def scalar(function, params, hidden):
        logprobs, entropy = function(params, hidden)
        return jnp.sum(logprobs * weights[0] + entropy * weights[1]), (logprobs, entropy)

    grad = jax.jit(jax.value_and_grad(scalar, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, expected), expected_gradients = grad(plain, params, hidden)
    (_, found), found_gradients = grad(ours, params, hidden)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found_gradients, expected_gradients)


jitted_logprobs = jax.jit(token_logprobs, static_argnames="chunk")


def test_chunk_size_does_not_matter():
    params, arrays = tiny_params(), target_arrays()
    one_by_one = jitted_logprobs(params, **arrays, chunk=2)
    for chunk in (8, 100):
        for own, other in zip(jitted_logprobs(params, **arrays, chunk=chunk), one_by_one, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-6)


def test_the_temperature_divides_the_logits():
    params, arrays = tiny_params(), target_arrays()
    hot = jitted_logprobs(params, **{**arrays, "temperatures": jnp.full((R, T), 2.0)}, chunk=8)[0]
    halved = {**params, "embed": params["embed"] / 2}
    plain = jitted_logprobs(halved, **{**arrays, "temperatures": jnp.ones((R, T))}, chunk=8)[0]
    np.testing.assert_allclose(hot, plain, atol=1e-6)


@jax.jit
def logprobs_and_gradients(params, arrays):
    def total(params):
        results = token_logprobs(params, **arrays, chunk=6)
        return sum(jnp.sum(x) for x in results), results

    return jax.grad(total, has_aux=True)(params)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.0, math.nan, -1.0]))
def test_masked_targets_change_neither_logprobs_nor_gradients(seed, temperature):
    params, arrays = tiny_params(), target_arrays()
    rng = np.random.default_rng(seed)
    mask = np.asarray(arrays["target_mask"])
    changed = {
        **arrays,
        "predictor": jnp.where(mask, arrays["predictor"], rng.integers(0, L, (R, T))),
        "target_tokens": jnp.where(mask, arrays["target_tokens"], rng.integers(0, SIZES.vocab_size, (R, T))),
        "temperatures": jnp.where(mask, arrays["temperatures"], temperature),
    }

    found, expected = (logprobs_and_gradients(params, x) for x in (changed, arrays))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_memory_of_the_gradient_is_bounded_by_the_chunk():
    vocabulary, embed, positions, chunk = 151_936, 8, 4096, 64
    params = {"embed": jax.ShapeDtypeStruct((vocabulary, embed), jnp.float32)}
    slot = jax.ShapeDtypeStruct((1, positions), jnp.int32)

    def loss(params, hidden, predictor, target_tokens, temperatures, target_mask):
        logprobs, entropy = token_logprobs(
            params, hidden, predictor, target_tokens, temperatures, target_mask, chunk=chunk
        )
        return jnp.sum(logprobs), entropy

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        .lower(
            params,
            jax.ShapeDtypeStruct((1, positions, embed), jnp.float32),
            slot,
            slot,
            jax.ShapeDtypeStruct((1, positions), jnp.float32),
            jax.ShapeDtypeStruct((1, positions), bool),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    chunk_bytes, full_bytes = 4 * chunk * vocabulary, 4 * positions * vocabulary
    assert memory.temp_size_in_bytes < 5 * chunk_bytes < full_bytes / 10
