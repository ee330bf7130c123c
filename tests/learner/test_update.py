from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import SIZES, full_logprobs, random_items, reinforce_loss, segment, tiny_params

from jaxsp.learner.batch import make_batch
from jaxsp.learner.objectives import OBJECTIVES
from jaxsp.learner.optimizers import make_optimizer
from jaxsp.learner.policy_loss import PolicyLoss
from jaxsp.learner.state import init_state
from jaxsp.learner.update import make_logprobs_fn, make_update, make_warm_start_update

NORMALISER = 16.0
DESCENT = optax.sgd(1.0)  # parameters show the gradient
ADAM = make_optimizer(optax.join_schedules([lambda _: 0.0, lambda _: 0.1], [2]), weight_decay=0.1)
LOSS = PolicyLoss(clip_low=0.2, clip_high=0.2, importance_cap=2.0, kl_coef=0.0)
update_maker = partial(make_update, SIZES, compute_dtype=jnp.float32, logits_chunk=16)


def assert_trees_close(found, expected, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=atol), found, expected)


@pytest.fixture(scope="module")
def logprobs_fn():
    return make_logprobs_fn(SIZES, compute_dtype=jnp.float32, logits_chunk=16)


@pytest.fixture(scope="module")
def descent_update():
    return update_maker(DESCENT, LOSS)


@pytest.fixture(scope="module")
def adam_update():
    return update_maker(ADAM, LOSS)


def gradients_of(update, items, *, row_tokens=64, rows_per_microbatch=1, old=None):
    batch, stats = make_batch(items, row_tokens=row_tokens, rows_per_microbatch=rows_per_microbatch)
    assert stats.num_trajectories == len(items)
    state, metrics = update(init_state(tiny_params(), DESCENT), batch, old, None, len(items), NORMALISER)
    return difference(tiny_params(), state["params"]), metrics


def difference(first, second):
    return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), first, second)


@pytest.fixture(scope="module")
def whole(descent_update):
    """Gradient and metrics of all items in one row."""
    _, stats = make_batch(random_items(), row_tokens=64, rows_per_microbatch=1)
    assert stats.num_rows == 1 and stats.num_tokens_stored < 0.7 * stats.num_tokens_separate
    return gradients_of(descent_update, random_items())


@pytest.fixture(scope="module")
def reinforce_gradient():
    items = random_items()
    loss = partial(reinforce_loss, SIZES, items=items, denominator=len(items) * NORMALISER, importance_cap=2.0)
    return jax.jit(jax.grad(loss))(tiny_params())


def test_the_first_update_follows_the_reinforce_gradient_with_every_ratio_one(
    descent_update, logprobs_fn, whole, reinforce_gradient
):
    items = random_items()
    batch, _ = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    old = logprobs_fn(tiny_params(), batch)
    # Old log-probabilities computed before, or (whole) the current ones from the same forward pass
    for gradients, metrics in (gradients_of(descent_update, items, old=old), whole):
        assert abs(metrics["policy/ratio_max"] - 1) < 1e-6
        assert abs(metrics["policy/ratio_mean"] - 1) < 1e-6
        assert metrics["policy/clipped_frac"] == 0
        assert_trees_close(gradients, reinforce_gradient, 1e-6)


def test_packed_tries_give_the_loss_and_gradient_of_one_sequence_at_a_time(descent_update, whole):
    items = random_items()
    packed_gradients, packed = whole
    total, gradients = 0.0, jax.tree.map(np.zeros_like, packed_gradients)
    for item in items:
        batch, _ = make_batch([item], row_tokens=64, rows_per_microbatch=1)
        state = init_state(tiny_params(), DESCENT)
        state, metrics = descent_update(state, batch, None, None, len(items), NORMALISER)
        total += float(metrics["policy/loss"])
        gradients = jax.tree.map(np.add, gradients, difference(tiny_params(), state["params"]))
    np.testing.assert_allclose(packed["policy/loss"], total, atol=1e-6)
    assert_trees_close(packed_gradients, gradients, 1e-6)


def test_learner_logprobs_are_those_of_a_plain_forward_pass(logprobs_fn):
    items, params = random_items(), tiny_params()
    batch, _ = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    logprobs = np.asarray(logprobs_fn(params, batch))
    expected = np.asarray(full_logprobs(SIZES, params, [made for made, _ in items]))
    for index, (made, _) in enumerate(items):
        of_index = (batch.target_sequence == index) & batch.target_mask
        np.testing.assert_allclose(logprobs[of_index], expected[index, np.flatnonzero(made.loss_mask)], atol=1e-5)
    assert (logprobs[~batch.target_mask] == 0).all()


def test_gradients_of_microbatches_add_up_to_those_of_the_whole(descent_update, whole):
    items = random_items()
    _, stats = make_batch(items, row_tokens=20, rows_per_microbatch=2)
    assert stats.num_rows == 5
    gradients, metrics = gradients_of(descent_update, items, row_tokens=20, rows_per_microbatch=2)
    assert_trees_close(gradients, whole[0], 1e-6)
    for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/num_tokens", "mismatch/k3"):
        np.testing.assert_allclose(metrics[name], whole[1][name], rtol=1e-5, err_msg=name)


def test_rows_computed_at_two_lengths_give_the_logprobs_and_gradient_of_plain_rows(descent_update, logprobs_fn):
    rng = np.random.default_rng(0)
    lengths = (250, 190, 170, 150)
    items = [(segment(rng.integers(0, 40, length).tolist(), length - 9), advantage)
             for length, advantage in zip(lengths, rng.normal(size=4), strict=True)]  # fmt: skip
    for made, _ in items:
        made.behaviour_logprobs[made.loss_mask] = -3.5
    batch, stats = make_batch(items, row_tokens=256, rows_per_microbatch=1)
    assert stats.padding_frac == 1 - (sum(lengths) - 4) / (256 + 3 * 192)
    expected = np.asarray(full_logprobs(SIZES, tiny_params(), [made for made, _ in items]))
    logprobs = np.asarray(logprobs_fn(tiny_params(), batch))
    for index, (made, _) in enumerate(items):
        of_index = (batch.target_sequence == index) & batch.target_mask
        np.testing.assert_allclose(logprobs[of_index], expected[index, np.flatnonzero(made.loss_mask)], atol=1e-5)
    loss = partial(reinforce_loss, SIZES, items=items, denominator=len(items) * NORMALISER, importance_cap=2.0)
    gradients, _ = gradients_of(descent_update, items, row_tokens=256)
    assert_trees_close(gradients, jax.jit(jax.grad(loss))(tiny_params()), 1e-6)


def test_what_padding_and_masked_slots_hold_changes_nothing(descent_update):
    items = random_items()
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    own_place = np.arange(1, batch.tokens.shape[-1] + 1)
    is_padding = (batch.visible_until == own_place) & (batch.positions == 0)
    assert is_padding.any() and (~batch.target_mask).any()
    hidden = ~batch.target_mask
    changed = jax.tree.map(np.copy, batch)
    changed.tokens[is_padding], changed.positions[is_padding] = 17, 9
    changed.target_tokens[hidden], changed.target_predictor[hidden], changed.temperatures[hidden] = 13, 5, 0
    changed.behaviour_logprobs[hidden], changed.advantages[hidden] = -np.inf, np.nan
    results = []
    for arrays in (batch, changed):
        state = init_state(tiny_params(), DESCENT)
        results.append(descent_update(state, arrays, None, None, stats.num_trajectories, NORMALISER))
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])


def test_spice_normalisation_of_a_hand_computed_example(descent_update):
    # Two trajectories of 1 and 3 targets, and one of advantage 0 that only counts: each target weighs 1 / (3 * 16),
    # not 1 / its answer's length and not 1 / (4 targets).
    params = tiny_params()
    made = [segment([1, 2, 3], 2), segment([1, 2, 4, 5, 6], 2), segment([1, 2, 7], 2)]
    for one, logprobs in zip(made, np.asarray(full_logprobs(SIZES, params, made)), strict=True):
        one.behaviour_logprobs[:] = logprobs[: len(one.tokens)]
    items = list(zip(made, [0.75, -0.25, 0.0], strict=True))
    _, metrics = gradients_of(descent_update, items)
    np.testing.assert_allclose(metrics["policy/loss"], -(0.75 * 1 - 0.25 * 3) / 48, atol=1e-7)
    assert metrics["policy/num_tokens"] == 4
    _, metrics = gradients_of(descent_update, [items[0], (made[1], 0.5), items[2]])
    np.testing.assert_allclose(metrics["policy/loss"], -(0.75 * 1 + 0.5 * 3) / 48, rtol=1e-5)


def test_later_updates_clip_against_the_old_logprobs(descent_update, logprobs_fn):
    items = random_items()
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    old = logprobs_fn(tiny_params(), batch)
    state = init_state(tiny_params(), DESCENT)
    fractions = []
    for _ in range(3):
        state, metrics = descent_update(state, batch, old, None, stats.num_trajectories, 1.0)
        fractions.append(float(metrics["policy/clipped_frac"]))
    assert fractions[0] == 0 < fractions[2]


def test_the_kl_term_adds_the_gradient_of_k3_over_the_same_denominator(logprobs_fn):
    items = [(made, 0.0) for made, _ in random_items()]
    segments = [made for made, _ in items]
    anchor = jax.tree.map(lambda x: x * 0.9, tiny_params())
    anchor_logprobs = full_logprobs(SIZES, anchor, segments)

    @jax.value_and_grad
    def k3_sum(params):
        d = anchor_logprobs - full_logprobs(SIZES, params, segments)
        return jnp.sum(jnp.exp(d) - 1 - d)  # 0 where not a target

    value, gradient = jax.jit(k3_sum)(tiny_params())
    update = update_maker(DESCENT, replace(LOSS, kl_coef=0.5))
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1, keep_zero=True)
    reference = logprobs_fn(anchor, batch)
    state, metrics = update(init_state(tiny_params(), DESCENT), batch, None, reference, len(items), NORMALISER)
    np.testing.assert_allclose(metrics["policy/kl"], value / stats.num_trained_tokens, rtol=1e-5)
    expected = jax.tree.map(lambda x: 0.5 * x / (len(items) * NORMALISER), gradient)
    assert_trees_close(difference(tiny_params(), state["params"]), expected, 1e-6)
    np.testing.assert_allclose(metrics["policy/loss"], 0.5 * value / (len(items) * NORMALISER), rtol=1e-5)


def test_an_update_with_gradients_that_are_not_finite_is_left_out_and_counted(adam_update, logprobs_fn):
    batch, stats = make_batch(random_items(), row_tokens=64, rows_per_microbatch=1)
    old = logprobs_fn(tiny_params(), batch)
    state, metrics = adam_update(init_state(tiny_params(), ADAM), batch, old, None, stats.num_trajectories, 16.0)
    assert metrics["learner/skipped_updates"] == 0
    before = jax.tree.map(np.array, state)
    batch.advantages[0, 0, 0] = np.inf
    state, metrics = adam_update(state, batch, old, None, stats.num_trajectories, 16.0)
    assert metrics["learner/skipped_updates"] == 1 and metrics["policy/update_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, state["params"], before["params"])
    jax.tree.map(np.testing.assert_array_equal, state["opt_state"], before["opt_state"])
    assert state["step"] == 2


def test_at_learning_rate_zero_nothing_moves_and_ratios_stay_one(adam_update, logprobs_fn):
    batch, stats = make_batch(random_items(), row_tokens=64, rows_per_microbatch=1)
    old = logprobs_fn(tiny_params(), batch)
    state = init_state(tiny_params(), ADAM)
    for _ in range(2):
        state, metrics = adam_update(state, batch, old, None, stats.num_trajectories, 16.0)
        assert abs(metrics["policy/ratio_max"] - 1) < 1e-6 and metrics["policy/clipped_frac"] == 0
    jax.tree.map(np.testing.assert_array_equal, state["params"], tiny_params())
    state, metrics = adam_update(state, batch, old, None, stats.num_trajectories, 16.0)
    assert metrics["policy/update_norm"] > 0 and metrics["learner/skipped_updates"] == 0


def test_varied_batches_of_a_bucket_share_one_program(adam_update, logprobs_fn):
    state = init_state(tiny_params(), ADAM)
    sizes = []
    for seed in range(6):
        batch, stats = make_batch(random_items(seed, num_groups=2 + seed), row_tokens=64, rows_per_microbatch=1)
        old = logprobs_fn(state["params"], batch)
        state, _ = adam_update(state, batch, old, None, stats.num_trajectories, 16.0 + seed)
        sizes.append((adam_update._cache_size(), logprobs_fn._cache_size()))
    assert sizes[0] == sizes[-1]


def test_a_batch_without_targets_moves_nothing(descent_update):
    gradients, metrics = gradients_of(descent_update, [(segment([1, 2], 1), 0.0)])
    assert all((x == 0).all() for x in jax.tree.leaves(gradients))
    assert metrics["policy/loss"] == 0 and metrics["learner/skipped_updates"] == 0


def test_warm_start_divides_by_the_global_number_of_targets_and_learns():
    items = [(made, 1.0) for made, _ in random_items()]
    num_targets = sum(int(made.loss_mask.sum()) for made, _ in items)
    params = tiny_params()
    expected = -float(full_logprobs(SIZES, params, [made for made, _ in items]).sum()) / num_targets
    optimizer = make_optimizer(1e-2)
    update = make_warm_start_update(SIZES, optimizer, compute_dtype=jnp.float32, logits_chunk=16)
    batch, stats = make_batch(items, row_tokens=40, rows_per_microbatch=1)
    assert stats.num_trained_tokens == num_targets and stats.num_rows > 1
    state, metrics = update(init_state(tiny_params(), optimizer), batch, num_targets)
    np.testing.assert_allclose(metrics["policy/loss"], expected, rtol=1e-5)
    for _ in range(5):
        state, metrics = update(state, batch, num_targets)
    assert metrics["policy/loss"] < 0.8 * expected


def test_bfloat16_compute_stays_near_float32(reinforce_gradient):
    update = update_maker(DESCENT, LOSS, compute_dtype=jnp.bfloat16)
    gradients, _ = gradients_of(update, random_items())
    own, other = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in (gradients, reinforce_gradient))
    assert own @ other / np.sqrt((own @ own) * (other @ other)) > 0.99


def later_gradient(loss, batch, params):
    """What one SGD step of `loss` takes away from `params`, old log-probabilities being those of `tiny_params`."""
    old = make_logprobs_fn(SIZES, compute_dtype=jnp.float32, logits_chunk=16)(tiny_params(), batch)
    state, metrics = update_maker(DESCENT, loss)(init_state(params, DESCENT), batch, old, None, 5, NORMALISER)
    return state["params"], metrics


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_after_a_move_every_objective_packed_is_the_plain_formula_over_separate_rows(objective):
    # Trajectories of two segments, packed so that these stand in different micro-batches, and one row for each.
    items = random_items()
    ids = [number % 5 for number in range(len(items))]
    items = [(made, items[number][1]) for (made, _), number in zip(items, ids, strict=True)]
    loss = replace(LOSS, objective=objective, clip_low=0.02, clip_high=0.03)
    moved = jax.tree.map(lambda x: 1.03 * x, tiny_params())
    segments = [made for made, _ in items]
    old = full_logprobs(SIZES, tiny_params(), segments)
    mask = np.stack([np.pad(made.loss_mask, (0, old.shape[1] - len(made.tokens))) for made in segments])
    behaviour = np.stack([np.pad(x.behaviour_logprobs, (0, old.shape[1] - len(x.tokens))) for x in segments])
    advantages = jnp.asarray([[advantage] for _, advantage in items])
    weights = jnp.minimum(jnp.exp(old - behaviour), 2.0) * mask

    def plain(params):
        logprobs = full_logprobs(SIZES, params, segments)
        ratio = jnp.exp(logprobs - old)
        if objective == "gspo":
            own = jnp.asarray(ids)[:, None] == jnp.asarray(ids)
            means = own @ jnp.sum(logprobs - old, axis=1) / (own @ mask.sum(1))
            ratio = jnp.exp(means)[:, None] * jnp.ones(old.shape)
            # Each target's share of the gradient of its trajectory's mean
            ratio = jax.lax.stop_gradient(ratio) * jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
        clipped = jnp.clip(ratio, 0.98, 1.03)
        terms = jnp.minimum(ratio * advantages, clipped * advantages)
        if objective == "cispo":
            terms = jax.lax.stop_gradient(clipped) * advantages * logprobs
        return -jnp.sum(weights * terms) / (5 * NORMALISER)

    value, gradient = jax.jit(jax.value_and_grad(plain))(moved)
    expected = jax.tree.map(lambda x, g: np.asarray(x) - np.asarray(g), moved, gradient)
    for row_tokens, rows in ((64, 1), (20, 1), (20, 2)):
        batch, stats = make_batch(items, row_tokens=row_tokens, rows_per_microbatch=rows, trajectory_ids=ids)
        assert stats.num_trajectories == 5
        params, metrics = later_gradient(loss, batch, jax.tree.map(jnp.copy, moved))
        assert_trees_close(params, expected, 1e-6)
        np.testing.assert_allclose(metrics["policy/loss"], value, atol=1e-6)
        assert 0 < metrics["policy/clipped_frac"] < 1


def test_importance_weights_of_sequences_see_whole_trajectories_however_they_are_packed(logprobs_fn):
    items = random_items()
    ids = [number % 5 for number in range(len(items))]
    segments = [made for made, _ in items]
    logprobs = np.asarray(full_logprobs(SIZES, tiny_params(), segments))
    for made, own in zip(segments, logprobs, strict=True):  # ratios that are not all cut
        made.behaviour_logprobs[made.loss_mask] = own[: len(made.tokens)][made.loss_mask] + 0.1
    segments[1].behaviour_logprobs[segments[1].loss_mask] -= 5.0
    sums = np.array([sum((own[: len(made.tokens)] - made.behaviour_logprobs)[made.loss_mask].sum()
                         for made, own, number in zip(segments, logprobs, ids, strict=True) if number == wanted)
                     for wanted in range(5)])  # fmt: skip
    weights = np.minimum(np.exp(sums), 2.0)
    assert 0 < (weights == 2.0).sum() < 5
    advantages = jnp.asarray([[advantage * weights[number]] for (_, advantage), number in zip(items, ids, strict=True)])

    def plain(params):
        return -jnp.sum(advantages * full_logprobs(SIZES, params, segments)) / (5 * NORMALISER)

    expected = jax.jit(jax.grad(plain))(tiny_params())
    update = update_maker(DESCENT, replace(LOSS, importance="sequence"))
    for row_tokens, rows in ((64, 1), (20, 1)):
        batch, _ = make_batch(items, row_tokens=row_tokens, rows_per_microbatch=rows, trajectory_ids=ids)
        for old in (None, logprobs_fn(tiny_params(), batch)):
            state, metrics = update(init_state(tiny_params(), DESCENT), batch, old, None, 5, NORMALISER)
            assert_trees_close(difference(tiny_params(), state["params"]), expected, 1e-6)
            assert 0 < metrics["policy/importance_capped_frac"] < 1


def test_gradient_norms_of_the_parts_are_those_of_their_parameters(whole):
    gradients, metrics = whole
    layers = gradients["layers"]
    parts = {
        "embed": gradients["embed"],
        "attention": [layers[name] for name in "qkvo"],
        "mlp": [layers[name] for name in ("gate", "up", "down")],
        "norms": [gradients["final_norm"], *(layers[name] for name in layers if name.endswith("norm"))],
    }
    names = {name for name in metrics if name.startswith("policy/grad_norm_")}
    assert names == {f"policy/grad_norm_{part}" for part in parts}
    for part, tree in parts.items():
        np.testing.assert_allclose(metrics[f"policy/grad_norm_{part}"], optax.tree.norm(tree), rtol=1e-3, err_msg=part)
    total = sum(float(metrics[name]) ** 2 for name in names)
    np.testing.assert_allclose(total, float(metrics["policy/grad_norm"]) ** 2, rtol=1e-5)


def test_effective_tokens_are_those_that_the_objective_pulls_at(descent_update, whole, logprobs_fn):
    items = random_items()
    assert whole[1]["policy/effective_tokens"] == whole[1]["policy/num_tokens"]
    batch, _ = make_batch([(made, 0.0 if number == 3 else advantage) for number, (made, advantage) in enumerate(items)],
                          row_tokens=64, rows_per_microbatch=1, keep_zero=True)  # fmt: skip
    old = logprobs_fn(tiny_params(), batch)
    moved = jax.tree.map(lambda x: 1.1 * x, tiny_params())
    ratio = np.exp(np.asarray(logprobs_fn(moved, batch)) - np.asarray(old))
    is_clipped = ((ratio > 1.2) & (batch.advantages > 0)) | ((ratio < 0.8) & (batch.advantages < 0))
    expected = (batch.target_mask & (batch.advantages != 0) & ~is_clipped).sum()
    _, metrics = descent_update(init_state(moved, DESCENT), batch, old, None, len(items), NORMALISER)
    assert metrics["policy/effective_tokens"] == expected < metrics["policy/num_tokens"] - items[3][0].loss_mask.sum()
