"""Objectives, importance weights and divergences of given log-probabilities, and what is logged of them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.learner.diagnostics import mismatch_metrics, policy_metrics
from jaxsp.learner.importance import IMPORTANCE, importance_log_ratios, importance_weights
from jaxsp.learner.kl import KL_ESTIMATORS, kl_sum
from jaxsp.learner.losses import cross_entropy
from jaxsp.learner.objectives import OBJECTIVES, surrogate
from jaxsp.learner.ratios import trajectory_means, trajectory_sums

numbers = st.floats(-3, 0, width=32)
junk = st.sampled_from([-np.inf, np.inf, np.nan, -1e30, 0.0])


@st.composite
def slots(draw: st.DrawFn):
    """Columns logprobs, old, behaviour, reference, advantages `[5, T]` with junk where masked; and the mask `[T]`."""
    mask = draw(st.lists(st.booleans(), min_size=6, max_size=6))
    columns = [[draw(numbers) if is_target else draw(junk) for is_target in mask] for _ in range(5)]
    return np.array(columns, np.float32), np.array(mask)


def whole_loss(logprobs, old, behaviour, reference, advantages, mask):
    """Every objective, a KL term and cross-entropy; `reference` serves as the log-ratio of sequences too."""
    log_ratios = importance_log_ratios("token", old, behaviour, jnp.zeros(mask.shape, jnp.int32), mask)
    weights, _ = importance_weights("masked", log_ratios, mask, cap=2.0, low=0.5, high=2.0)
    total = cross_entropy(logprobs, mask)
    for kind in KL_ESTIMATORS:
        total += 0.1 * kl_sum(kind, logprobs, reference, mask)
    for kind in OBJECTIVES:
        total += surrogate(kind, logprobs, old, advantages, weights, mask, reference, clip_low=0.2, clip_high=0.3)
    return total


@jax.jit
def masked_results(columns, mask):
    logprobs, old, behaviour, reference, advantages = columns
    metrics = {
        **policy_metrics("clip", logprobs, reference, old, advantages, mask, clip_low=0.2, clip_high=0.2),
        **mismatch_metrics(old, behaviour, mask),
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


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=1)
def one_token_loss(kind, logprob, old, advantage):
    ones = jnp.ones(1)
    return surrogate(
        kind, logprob[None], old[None], advantage[None], ones, jnp.ones(1, bool), clip_low=0.2, clip_high=0.3
    )


def one_token(logprob: float, old: float, advantage: float, kind: str = "clip") -> tuple[float, float]:
    value, gradient = one_token_loss(kind, jnp.float32(logprob), jnp.float32(old), jnp.float32(advantage))
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


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_absurd_ratio_stays_finite(kind):
    assert all(math.isfinite(x) for x in one_token(0.0, -500.0, -1.0, kind))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (1.25, 2.0, 1.25), (1.5, 2.0, 1.3), (1.5, -2.0, 1.3), (0.7, 2.0, 0.8), (0.7, -2.0, 0.8)],
)
def test_cispo_bounds_the_weight_and_keeps_every_gradient(ratio, advantage, weight):
    logprob = -1.0 + math.log(ratio)
    found = one_token(logprob, -1.0, advantage, "cispo")
    np.testing.assert_allclose(found, (-weight * advantage * logprob, -weight * advantage), rtol=1e-5)


def gspo_of(logprobs, old, advantages, sequences, mask):
    """GSPO's equations as they stand: means over each trajectory, one ratio, one clipping, a mean over trajectories."""
    total, numbers = 0.0, np.unique(sequences[mask])
    for number in numbers:
        own = mask & (sequences == number)
        log_s = jnp.sum(jnp.where(own, logprobs - old, 0.0)) / own.sum()
        s, advantage = jnp.exp(log_s), advantages[own][0]
        total += jnp.minimum(s * advantage, jnp.clip(s, 1 - 0.02, 1 + 0.03) * advantage)
    return -total / len(numbers)


def test_gspo_is_its_paper_s_mean_over_sequences_in_value_and_gradient():
    rng = np.random.default_rng(3)
    sequences = np.array([[7, 7, 2, 2, 2, 0], [5, 5, 5, 5, 7, 0]])  # 7 stands in two rows
    mask = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], bool)
    old = jnp.asarray(rng.uniform(-2, -1, mask.shape), jnp.float32)
    logprobs = old + jnp.asarray(rng.normal(0, 0.02, mask.shape) + 0.05 * (sequences == 2), jnp.float32)
    advantages = np.select([sequences == 7, sequences == 2], [1.5, 1.0], -0.5).astype(np.float32)
    own = np.array([[(sequences[mask] == number).sum() for number in row] for row in sequences])
    weights = jnp.asarray(advantages / np.maximum(own, 1) / 3)  # mean over targets, mean over trajectories

    def ours(logprobs):
        log_s = trajectory_means(logprobs - old, jnp.asarray(sequences), jnp.asarray(mask))
        ones = jnp.ones(mask.shape)
        return surrogate("gspo", logprobs, old, weights, ones, jnp.asarray(mask), log_s, clip_low=0.02, clip_high=0.03)

    expected = jax.value_and_grad(lambda x: gspo_of(x, old, advantages, sequences, mask))(logprobs)
    found = jax.value_and_grad(ours)(logprobs)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-7)
    assert (found[1][sequences == 2] == 0).all() and (found[1][(sequences == 7) & mask] != 0).all()  # 2 is clipped


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_before_any_update_every_objective_has_the_gradient_of_reinforce(kind):
    advantages = jnp.array([2.0, -1.0])
    logprobs, mask = jnp.array([-1.0, -0.5]), jnp.ones(2, bool)
    gradient = jax.grad(
        lambda x: surrogate(kind, x, logprobs, advantages, jnp.ones(2), mask, clip_low=0.2, clip_high=0.2)
    )(logprobs)
    np.testing.assert_allclose(gradient, -advantages)


@jax.jit
def sums_and_means(*arrays):
    return trajectory_sums(*arrays), trajectory_means(*arrays)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([0, 3, 10**6]), st.booleans(), numbers), min_size=4, max_size=4))
def test_sums_over_a_trajectory_find_its_targets_wherever_they_stand(drawn):
    sequences, mask, x = (np.array(column).reshape(2, 2) for column in zip(*drawn, strict=True))
    arrays = jnp.where(mask, x, np.nan).astype(jnp.float32), jnp.asarray(sequences, jnp.int32), jnp.asarray(mask)
    sums, means = sums_and_means(*arrays)
    for place in np.ndindex(2, 2):
        own = mask & (sequences == sequences[place])
        expected = x[own].sum() if mask[place] else 0.0
        np.testing.assert_allclose(sums[place], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(means[place], expected / max(own.sum(), 1), rtol=1e-5, atol=1e-6)


OLD = jnp.log(jnp.array([[0.5, 0.9, 0.2, 0.3], [0.5, 0.1, 0.3, 0.3]]))
BEHAVIOUR = jnp.log(jnp.array([[0.4, 0.3, 0.4, 0.0], [0.4, 0.9, 0.5, 0.5]]))
SEQUENCES = jnp.array([[4, 4, 1, 4], [1, 2, 2, 2]])
MASK = jnp.array([[True, True, True, False], [True, True, True, True]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Ratios 1.25, 3, 0.5; 1.25, 1/9, 0.6, 0.6. Trajectory 4 has 3.75, trajectory 1 0.625, trajectory 2 0.04.
        ("token", [[1.25, 2.0, 0.5, 1.0], [1.25, 1 / 9, 0.6, 0.6]]),
        ("sequence", [[2.0, 2.0, 0.625, 1.0], [0.625, 0.04, 0.04, 0.04]]),
        ("masked", [[1.25, 0.0, 0.5, 1.0], [1.25, 0.0, 0.6, 0.6]]),
    ],
)
def test_importance_weights_of_a_hand_computed_example(kind, expected):
    log_ratios = importance_log_ratios(kind, OLD, BEHAVIOUR, SEQUENCES, MASK)
    weights, is_cut = importance_weights(kind, log_ratios, MASK, cap=2.0, low=0.45, high=2.5)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    cut = {"token": [1], "sequence": [0, 1], "masked": [1, 5]}
    np.testing.assert_array_equal(np.flatnonzero(is_cut), cut[kind])


@pytest.mark.parametrize("kind", IMPORTANCE)
def test_importance_weights_have_no_gradient_of_their_own(kind):
    def loss(logprobs):
        log_ratios = importance_log_ratios(kind, logprobs, BEHAVIOUR, SEQUENCES, MASK)
        weights, _ = importance_weights(kind, log_ratios, MASK, cap=2.0, low=0.45, high=2.5)
        ones = jnp.ones(MASK.shape)
        return surrogate("clip", logprobs, OLD, ones, weights, MASK, clip_low=0.2, clip_high=0.2), weights

    (value, weights), gradient = jax.value_and_grad(loss, has_aux=True)(OLD)
    np.testing.assert_allclose(value, -jnp.sum(weights, where=MASK), rtol=1e-6)
    np.testing.assert_allclose(gradient, jnp.where(MASK, -weights, 0), rtol=1e-6)


def test_metrics_of_a_hand_computed_example():
    mask = jnp.array([[True, True, True, True, False]])
    old = jnp.log(jnp.array([[0.5, 0.5, 0.5, 0.5, 0.5]]))
    logprobs = old + jnp.log(jnp.array([[1.0, 1.5, 1.5, 0.6, 9.0]]))
    advantages = jnp.array([[1.0, 1.0, -1.0, -1.0, 1.0]])
    entropy = jnp.array([[1.0, 2.0, 3.0, 4.0, 99.0]])
    found = policy_metrics("clip", logprobs, entropy, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    expected = {
        "policy/entropy": 2.5,
        "policy/ratio_mean": 1.15,
        "policy/ratio_max": 1.5,
        "policy/ratio_deviation_max": 0.5,
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
    )
    d = np.log(learner / sampler)
    expected = {
        "mismatch/abs_mean": np.abs(d).mean(),
        "mismatch/abs_max": np.abs(d).max(),
        "mismatch/k1": -d.mean(),
        "mismatch/k3": (learner / sampler - 1 - d).mean(),
        "mismatch/pearson": np.corrcoef(learner, sampler)[0, 1],
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
