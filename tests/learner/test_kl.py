"""Estimates of the divergence from a reference, by exact enumeration over all tokens of a tiny vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.learner.kl import KL_ESTIMATORS, kl_sum
from jaxsp.learner.objectives import surrogate

V = 6
SCORES, REFERENCE = jax.random.normal(jax.random.key(0), (2, V))
LOG_REFERENCE = jax.nn.log_softmax(REFERENCE)


def kl(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def forward(scores):
    """KL(policy || reference)."""
    return kl(jax.nn.log_softmax(scores), LOG_REFERENCE)


def backward(scores):
    """KL(reference || policy)."""
    return kl(LOG_REFERENCE, jax.nn.log_softmax(scores))


def means(kind):
    """The exact means over the policy's tokens of the estimate and of its gradient in the loss, and all estimates."""

    def of_token(scores, token):
        mask = jnp.ones(1, bool)
        return kl_sum(kind, jax.nn.log_softmax(scores)[token][None], LOG_REFERENCE[token][None], mask)

    p = jax.nn.softmax(SCORES)
    values, gradients = jax.vmap(jax.value_and_grad(of_token), (None, 0))(SCORES, jnp.arange(V))
    return p @ values, p @ gradients, values


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_on_average_the_divergence(kind):
    mean, _, values = means(kind)
    np.testing.assert_allclose(mean, forward(SCORES), rtol=1e-5)
    assert (values >= 0).all() == (kind == "k3")


def test_k2_is_half_the_mean_squared_log_ratio():
    mean, _, _ = means("k2")
    log_ratio = jax.nn.log_softmax(SCORES) - LOG_REFERENCE
    np.testing.assert_allclose(mean, jax.nn.softmax(SCORES) @ (log_ratio**2) / 2, rtol=1e-5)


def test_gradients_in_the_loss_are_on_average_nothing_the_forward_and_the_backward_divergence_s():
    np.testing.assert_allclose(means("k1")[1], np.zeros(V), atol=1e-6)
    np.testing.assert_allclose(means("k2")[1], jax.grad(forward)(SCORES), atol=1e-6)
    np.testing.assert_allclose(means("k3")[1], jax.grad(backward)(SCORES), atol=1e-6)
    assert np.abs(jax.grad(forward)(SCORES)).max() > 0.1


def test_k1_in_the_reward_has_the_divergence_s_gradient_over_sequences_of_two_tokens():
    # A second token whose distribution depends on the first; all 36 sequences with their probabilities.
    own, other = jax.random.normal(jax.random.key(1), (2, V + 1, V))
    log_q = jax.nn.log_softmax(other)
    first, second = (x.ravel() for x in np.indices((V, V)))

    def logprobs_of(table):
        return jnp.stack([table[0][first], table[1 + first, second]], axis=1)

    def exact(scores):
        log_p = jax.nn.log_softmax(scores)
        each = jnp.sum(logprobs_of(log_p) - logprobs_of(log_q), axis=1)
        return jnp.sum(jnp.exp(jnp.sum(logprobs_of(log_p), axis=1)) * each)

    old = logprobs_of(jax.nn.log_softmax(own))
    reward = -jnp.sum(KL_ESTIMATORS["k1"](logprobs_of(log_q) - old), axis=1)
    advantages = jnp.repeat(reward[:, None], 2, axis=1)
    probabilities = jnp.repeat(jnp.exp(jnp.sum(old, axis=1))[:, None], 2, axis=1)

    def loss(scores):
        logprobs, mask = logprobs_of(jax.nn.log_softmax(scores)), jnp.ones((V * V, 2), bool)
        return surrogate("clip", logprobs, old, advantages, probabilities, mask, clip_low=0.2, clip_high=0.2)

    np.testing.assert_allclose(jax.grad(loss)(own), jax.grad(exact)(own), atol=1e-6)
