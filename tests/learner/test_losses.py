import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import SIZES, tiny_params

from jaxsp.learner.losses import (
    clipped_surrogate,
    cross_entropy,
    importance_weights,
    k3_kl,
    mismatch_metrics,
    policy_metrics,
    token_logprobs,
)
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


numbers = st.floats(-3, 0, width=32)
junk = st.sampled_from([-np.inf, np.inf, np.nan, -1e30, 0.0])


@st.composite
def slots(draw: st.DrawFn):
    """Columns logprobs, old, behaviour, reference, advantages `[5, T]` with junk where masked; and the mask `[T]`."""
    mask = draw(st.lists(st.booleans(), min_size=6, max_size=6))
    columns = [[draw(numbers) if is_target else draw(junk) for is_target in mask] for _ in range(5)]
    return np.array(columns, np.float32), np.array(mask)


def whole_loss(logprobs, old, behaviour, reference, advantages, mask):
    surrogate = clipped_surrogate(
        logprobs, old, behaviour, advantages, mask, clip_low=0.2, clip_high=0.3, importance_cap=2.0
    )
    return surrogate + 0.1 * k3_kl(logprobs, reference, mask) + cross_entropy(logprobs, mask)


@jax.jit
def masked_results(columns, mask):
    logprobs, old, behaviour, reference, advantages = columns
    metrics = {
        **policy_metrics(logprobs, reference, old, advantages, mask, clip_low=0.2, clip_high=0.2),
        **mismatch_metrics(old, behaviour, mask, importance_cap=2.0),
    }
    return jax.value_and_grad(whole_loss)(*columns, mask), metrics


@jax.jit
def separate_results(columns):
    """Loss and gradient of each target alone."""
    return jax.vmap(lambda x: jax.value_and_grad(whole_loss)(*x[:, None], jnp.ones(1, bool)))(columns.T)


@settings(deadline=None, max_examples=60)
@given(slots())
def test_losses_are_those_of_the_filtered_data_and_finite_whatever_the_mask_hides(drawn):
    columns, mask = drawn
    (value, gradient), metrics = masked_results(columns, mask)
    values, gradients = separate_results(np.where(mask, columns, 0))
    assert np.isfinite(gradient).all() and np.isfinite(value)
    np.testing.assert_allclose(value, np.sum(values, where=mask), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, np.where(mask, gradients[:, 0], 0), rtol=1e-6)
    assert all(np.isfinite(x) for name, x in metrics.items() if name != "mismatch/pearson")


@jax.jit
@jax.value_and_grad
def one_token_loss(logprob, old, advantage):
    logprobs, olds, advantages = logprob[None], old[None], advantage[None]
    return clipped_surrogate(
        logprobs, olds, olds, advantages, jnp.ones(1, bool), clip_low=0.2, clip_high=0.3, importance_cap=2.0
    )


def one_token(logprob: float, old: float, advantage: float) -> tuple[float, float]:
    value, gradient = one_token_loss(jnp.float32(logprob), jnp.float32(old), jnp.float32(advantage))
    return float(value), float(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # above 1 + clip_high: cut
        (1.5, -2.0, 3.0, 3.0),  # and not cut where the advantage pulls it back
        (1.25, 2.0, -2.5, -2.5),  # the upper bound is not the lower one
        (0.7, -2.0, 1.6, 0.0),
        (0.7, 2.0, -1.4, -1.4),
    ],
)
def test_clipping_of_hand_computed_ratios(ratio, advantage, value, gradient):
    found = one_token(-1.0 + math.log(ratio), -1.0, advantage)
    np.testing.assert_allclose(found, (value, gradient), atol=1e-5)


def test_an_absurd_ratio_stays_finite():
    assert all(math.isfinite(x) for x in one_token(0.0, -500.0, -1.0))


def test_truncated_importance_weights_of_a_hand_computed_example():
    old = jnp.log(jnp.array([[0.5, 0.9, 0.2, 0.3]]))
    behaviour = jnp.log(jnp.array([[0.4, 0.3, 0.4, 0.0]]))
    mask = jnp.array([[True, True, True, False]])
    weights = importance_weights(old, behaviour, mask, 2.0)
    np.testing.assert_allclose(weights, [[1.25, 2.0, 0.5, 1.0]], rtol=1e-6)  # 0.9 / 0.3 = 3 is cut

    def loss(logprobs):
        return clipped_surrogate(
            logprobs, old, behaviour, jnp.ones((1, 4)), mask, clip_low=0.2, clip_high=0.2, importance_cap=2.0
        )

    value, gradient = jax.value_and_grad(loss)(old)
    np.testing.assert_allclose(value, -(1.25 + 2.0 + 0.5), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-1.25, -2.0, -0.5, 0.0]], rtol=1e-6)  # none through the weight itself


def test_k3_value_and_gradient_against_exact_divergences():
    policy_scores, reference_scores = jax.random.normal(jax.random.key(0), (2, 6))
    reference = jax.nn.log_softmax(reference_scores)

    def k3_of_token(scores, token):
        return k3_kl(jax.nn.log_softmax(scores)[token][None], reference[token][None], jnp.ones(1, bool))

    p = jax.nn.softmax(policy_scores)
    values, gradients = jax.vmap(jax.value_and_grad(k3_of_token), (None, 0))(policy_scores, jnp.arange(6))

    def kl(first, second):
        return jnp.sum(jnp.exp(first) * (first - second))

    np.testing.assert_allclose(p @ values, kl(jax.nn.log_softmax(policy_scores), reference), rtol=1e-5)
    reverse = jax.grad(lambda scores: kl(reference, jax.nn.log_softmax(scores)))(policy_scores)
    np.testing.assert_allclose(p @ gradients, reverse, atol=1e-6)
    assert (values >= 0).all()


def test_metrics_of_a_hand_computed_example():
    mask = jnp.array([[True, True, True, True, False]])
    old = jnp.log(jnp.array([[0.5, 0.5, 0.5, 0.5, 0.5]]))
    logprobs = old + jnp.log(jnp.array([[1.0, 1.5, 1.5, 0.6, 9.0]]))
    advantages = jnp.array([[1.0, 1.0, -1.0, -1.0, 1.0]])
    entropy = jnp.array([[1.0, 2.0, 3.0, 4.0, 99.0]])
    found = policy_metrics(logprobs, entropy, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    expected = {
        "policy/entropy": 2.5,
        "policy/ratio_mean": 1.15,
        "policy/ratio_max": 1.5,
        "policy/clipped_frac": 0.5,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_mismatch_of_a_hand_computed_example():
    learner, sampler = np.array([0.5, 0.9, 0.2]), np.array([0.4, 0.3, 0.25])
    mask = jnp.array([[True, True, True, False]])
    pad = np.array([0.0])
    found = mismatch_metrics(
        jnp.log(jnp.asarray(np.concatenate([learner, pad]), jnp.float32))[None],
        jnp.log(jnp.asarray(np.concatenate([sampler, pad]), jnp.float32))[None],
        mask,
        importance_cap=2.0,
    )
    d = np.log(learner / sampler)
    expected = {
        "mismatch/abs_mean": np.abs(d).mean(),
        "mismatch/abs_max": np.abs(d).max(),
        "mismatch/k1": -d.mean(),
        "mismatch/k3": (learner / sampler - 1 - d).mean(),
        "mismatch/pearson": np.corrcoef(learner, sampler)[0, 1],
        "policy/importance_capped_frac": 1 / 3,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


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
