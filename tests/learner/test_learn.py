"""What a step's groups become: which trajectories an update holds, what they are divided by, and what is left out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import SIZES, full_logprobs, segment, tiny_params

from jaxsp.learner.batch import Batch
from jaxsp.learner.learn import Packing, PolicyGradient, deal_out, imitate, over_updates, reinforce
from jaxsp.learner.policy_loss import PolicyLoss
from jaxsp.learner.state import init_state
from jaxsp.learner.update import make_logprobs_fn, make_update, make_warm_start_update
from jaxsp.trajectory import Group, Segment, Trajectory, Turn

DESCENT = optax.sgd(1.0)  # parameters show the gradient
PACKING = Packing(row_tokens=32, rows_per_microbatch=1)
KL_COEF = 0.5
LOSS = PolicyLoss(clip_low=0.2, clip_high=0.2, importance_cap=2.0, kl_coef=KL_COEF)
COMPUTE = {"compute_dtype": jnp.float32, "logits_chunk": 64}
LENGTHS = {"challenger": 8, "reasoner": 2}


def length_of(group: Group) -> int:
    return LENGTHS[group.role]


@pytest.fixture(scope="module")
def update():
    return make_update(SIZES, DESCENT, LOSS, **COMPUTE)


@pytest.fixture(scope="module")
def parts(update) -> PolicyGradient:
    return PolicyGradient(update, make_logprobs_fn(SIZES, **COMPUTE), PACKING, "group_mean", 0, seed=0)


def with_reference(parts: PolicyGradient, reference) -> PolicyGradient:
    return PolicyGradient(parts.update, parts.logprobs, PACKING, "group_mean", 0, 0, reference)


def sampled_by(params, segments: Sequence[Segment]) -> None:
    """Writes the log-probabilities under `params` as the behaviour's."""
    for made, logprobs in zip(segments, np.asarray(full_logprobs(SIZES, params, segments)), strict=True):
        made.behaviour_logprobs[:] = logprobs[: len(made.tokens)]


def segments_of(groups: Sequence[Group]) -> list[Segment]:
    return [made for group in groups for trajectory in group.trajectories for made in trajectory.segments]


def two_roles(rewards: Sequence[float] = (1, 0, 1, 0)) -> list[Group]:
    """A challenger's group with 3 and 1 targets, the first in two segments, and a reasoner's with 2 and 4."""
    first, second, third, fourth = rewards
    groups = [
        Group("document", "challenger", (
            Trajectory("challenger", (segment([1, 2, 3], 2), segment([1, 4, 5, 6], 2)), first),
            Trajectory("challenger", (segment([1, 2, 7], 2),), second),
        )),
        Group("task", "reasoner", (
            Trajectory("reasoner", (segment([1, 8, 9, 10], 2),), third),
            Trajectory("reasoner", (segment([1, 8, 9, 11, 12, 13], 2),), fourth),
        )),
    ]  # fmt: skip
    sampled_by(tiny_params(), segments_of(groups))
    return groups


def many_groups(num_groups: int = 3, group_size: int = 4) -> list[Group]:
    """Groups of trajectories of one to three segments with different rewards."""
    rng = np.random.default_rng(5)
    groups = []
    for number in range(num_groups):
        trajectories = []
        for member in range(group_size):
            lengths = rng.integers(4, 9, 1 + (number + member) % 3)
            made = tuple(segment(rng.integers(0, SIZES.vocab_size, length).tolist(), 2) for length in lengths)
            trajectories.append(Trajectory("reasoner", made, float(member % 2)))
        groups.append(Group(f"task{number}", "reasoner", tuple(trajectories)))
    sampled_by(tiny_params(), segments_of(groups))
    return groups


def moved(state) -> dict:
    """What the first update took away from `tiny_params`."""
    return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), tiny_params(), state["params"])


def assert_trees_close(found, expected, atol: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5), found, expected)


def test_the_loss_of_two_roles_by_hand(parts) -> None:
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), two_roles(), length_of)
    # Advantages are half a point each way, all weights and ratios are 1, and there are 4 trajectories.
    by_hand = -((0.5 * 3 - 0.5 * 1) / 8 + (0.5 * 2 - 0.5 * 4) / 2) / 4
    np.testing.assert_allclose(metrics["policy/loss"], by_hand, atol=1e-6)
    assert by_hand == 0.09375
    assert metrics["policy/updates"] == 1 and metrics["policy/num_tokens"] == 10
    assert metrics["learner/trained_tokens"] == 10 and metrics["learner/zero_advantage_frac"] == 0
    np.testing.assert_allclose(metrics["policy/ratio_mean"], 1, atol=1e-6)


def test_policy_gradient_and_kl_of_each_role_are_divided_by_its_own_length(parts) -> None:
    groups = two_roles((1, 0, 0.25, 1))
    for number, made in enumerate(segments_of(groups)):  # the sampler's numbers differ from the learner's
        made.behaviour_logprobs[made.loss_mask] += 0.1 * (number - 2)
    reference = jax.tree.map(lambda x: 0.9 * x, tiny_params())
    advantages = {"challenger": [0.5, -0.5], "reasoner": [-0.375, 0.375]}
    anchor = full_logprobs(SIZES, reference, segments_of(groups))

    def direct(params):
        """The mean over trajectories of the sum over their tokens divided by their role's length."""
        logprobs, total, number = full_logprobs(SIZES, params, segments_of(groups)), 0.0, 0
        for group in groups:
            for trajectory, advantage in zip(group.trajectories, advantages[group.role], strict=True):
                for made in trajectory.segments:
                    own = logprobs[number, : len(made.tokens)]
                    weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(own) - made.behaviour_logprobs), 2.0)
                    d = anchor[number, : len(made.tokens)] - own
                    each = -weight * advantage * own + KL_COEF * (jnp.exp(d) - 1 - d)
                    total += jnp.sum(each, where=made.loss_mask) / LENGTHS[group.role]
                    number += 1
        return total / 4

    state, metrics = reinforce(with_reference(parts, reference), init_state(tiny_params(), DESCENT), groups, length_of)
    assert metrics["policy/kl"] > 0
    assert_trees_close(moved(state), jax.jit(jax.grad(direct))(tiny_params()), 1e-6)


def test_the_kl_of_the_policy_with_itself_is_0_and_has_no_gradient(parts) -> None:
    groups = two_roles((1, 1, 0, 0))  # no advantage at all: the KL term is all there is
    state, metrics = reinforce(
        with_reference(parts, tiny_params()), init_state(tiny_params(), DESCENT), groups, length_of
    )
    assert metrics["policy/updates"] == 1 and metrics["policy/num_tokens"] == 10
    np.testing.assert_allclose(metrics["policy/kl"], 0, atol=1e-9)
    assert_trees_close(state["params"], tiny_params(), 1e-6)


def test_updates_of_a_step_share_the_log_probabilities_before_the_first(parts) -> None:
    batches: list[Batch] = []
    counts = []

    def recorded(state, batch, old, reference, num_trajectories, length):
        batches.append(batch)
        counts.append((num_trajectories, length))
        return parts.update(state, batch, old, reference, num_trajectories, length)

    recording = PolicyGradient(recorded, parts.logprobs, PACKING, "group_mean", trajectories_per_update=6, seed=0)
    state, metrics = reinforce(recording, init_state(tiny_params(), DESCENT), many_groups(), lambda group: 1)
    assert metrics["policy/updates"] == len(batches) == 2 and counts == [(6, 1), (6, 1)]

    expected = init_state(tiny_params(), DESCENT)
    ratios = []
    for batch in batches:
        old = parts.logprobs(tiny_params(), batch)
        expected, own = parts.update(expected, batch, old, None, 6, 1)
        ratios.append(float(own["policy/ratio_max"]))
    jax.tree.map(np.testing.assert_array_equal, state["params"], expected["params"])
    # Recomputed before the second update, they would make its ratios 1 and its mismatch with the sampler large.
    assert abs(ratios[0] - 1) < 1e-5 and ratios[1] > 1.05
    np.testing.assert_allclose(metrics["policy/ratio_max"], max(ratios), rtol=1e-6)
    assert metrics["policy/first_ratio_deviation_max"] < 1e-5 < metrics["policy/ratio_deviation_max"]
    assert metrics["mismatch/abs_max"] < 1e-5


@pytest.mark.parametrize(("per_update", "sizes"), [(0, [12]), (12, [12]), (6, [6, 6]), (5, [4, 4, 4]), (1, [1] * 12)])
def test_each_trajectory_is_in_one_update_with_all_its_segments(per_update: int, sizes: list[int]) -> None:
    groups = many_groups()
    held: list[dict[int, list[tuple[int, float]]]] = []

    def record(state, batch, old, reference, num_trajectories, length):
        targets = defaultdict(list)
        mask = batch.target_mask
        rows = zip(batch.target_sequence[mask], batch.target_tokens[mask], batch.behaviour_logprobs[mask], strict=True)
        for sequence, token, logprob in rows:
            targets[int(sequence)].append((int(token), float(logprob)))
        held.append(targets)
        assert len(targets) == num_trajectories
        return state, {}

    parts = PolicyGradient(record, lambda params, batch: None, PACKING, "group_mean", per_update, seed=0)
    _, metrics = reinforce(parts, {"params": None, "step": 0}, groups, lambda group: 8)
    assert [len(targets) for targets in held] == sizes
    every = [trajectory for group in groups for trajectory in group.trajectories]
    numbers = [number for targets in held for number in targets]
    assert sorted(numbers) == list(range(len(every)))
    for targets in held:
        for number, found in targets.items():
            own = [
                (int(made.tokens[place]), float(made.behaviour_logprobs[place]))
                for made in every[number].segments
                for place in np.flatnonzero(made.loss_mask)
            ]
            assert sorted(found) == sorted(own)
    assert metrics["policy/updates"] == len(sizes)


@pytest.mark.parametrize(("group_sizes", "per_update"), [([4, 4, 4], 6), ([4, 4, 4], 2), ([8, 3, 5, 1], 4), ([2], 1)])
def test_updates_differ_by_one_trajectory_in_all_and_of_each_group(group_sizes: list[int], per_update: int) -> None:
    groups = [Group(str(size), "a", (Trajectory("a", (), 0.0),) * size) for size in group_sizes]
    update_of = np.array(deal_out(groups, per_update, "0/0"))
    num_updates = -(-sum(group_sizes) // per_update)
    assert np.ptp(np.bincount(update_of, minlength=num_updates)) <= 1 and len(update_of) == sum(group_sizes)
    for own in np.split(update_of, np.cumsum(group_sizes)[:-1]):
        assert np.ptp(np.bincount(own, minlength=num_updates)) <= 1


def test_the_update_of_an_answer_does_not_depend_on_its_place_in_the_group() -> None:
    groups = [Group(name, "a", (Trajectory("a", (), 0.0),) * 4) for name in ("x", "y")]
    dealt = np.array([deal_out(groups, 2, f"0/{step}") for step in range(2000)])  # 4 updates
    for update in range(4):
        # A quarter of 2000 draws, whose standard deviation is 1 %: every place is within 5 of them.
        assert (abs((dealt == update).mean(0) - 0.25) < 0.05).all()
    assert deal_out(groups, 2, "0/7") == dealt[7].tolist(), "the same seed deals alike"


def test_metrics_of_several_updates_keep_maxima_and_weigh_means_over_targets() -> None:
    nan = float("nan")
    names = ("policy/num_tokens", "policy/ratio_max", "policy/entropy", "policy/grad_norm", "mismatch/pearson")
    rows: list[dict[str, float]] = [
        dict(zip(names, row, strict=True)) for row in ((1, 3.0, 1.0, 1.0, 0.5), (3, 2.0, 2.0, 2.0, nan))
    ]
    found = over_updates(rows)
    assert found == dict(zip(names, (2.0, 3.0, 1.75, 1.5, 0.5), strict=True))
    assert np.isnan(over_updates(rows[1:])["mismatch/pearson"])
    # Anything else that is not a number shows.
    assert np.isnan(over_updates([rows[0], rows[1] | {"policy/entropy": nan}])["policy/entropy"])
    assert over_updates([]) == {}
    assert over_updates([{**rows[0], "learner/skipped_updates": 1.0}] * 3)["learner/skipped_updates"] == 3


def test_a_trajectory_without_a_reward_is_dropped_and_counted(parts) -> None:
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), two_roles((1, float("nan"), 1, 0)), length_of)
    # The challenger's other trajectory is alone with its baseline: advantage 0, but it counts.
    np.testing.assert_allclose(metrics["policy/loss"], -((0.5 * 2 - 0.5 * 4) / 2) / 3, atol=1e-6)
    assert metrics["learner/dropped"] == 1
    np.testing.assert_allclose(metrics["learner/zero_advantage_frac"], 1 / 3)
    assert metrics["policy/num_tokens"] == 6


@pytest.mark.parametrize("per_update", [0, 1])
def test_without_any_advantage_the_state_stays_as_it_is(parts, per_update: int) -> None:
    parts = PolicyGradient(parts.update, parts.logprobs, PACKING, "group_mean", per_update, seed=0)
    state = init_state(tiny_params(), DESCENT)
    found, metrics = reinforce(parts, state, two_roles((1, 1, float("nan"), 0)), length_of)
    assert found is state
    assert metrics["policy/updates"] == 0 and metrics["learner/trained_tokens"] == 0
    assert metrics["learner/zero_advantage_frac"] == 1 and metrics["learner/dropped"] == 1
    found, metrics = reinforce(parts, state, [], length_of)
    assert found is state and metrics["policy/updates"] == 0


def test_imitation_weighs_every_target_the_same() -> None:
    groups = two_roles()
    made = segments_of(groups)
    update = make_warm_start_update(SIZES, DESCENT, **COMPUTE)

    def direct(params):
        return -jnp.sum(full_logprobs(SIZES, params, made)) / 10

    loss, gradient = jax.jit(jax.value_and_grad(direct))(tiny_params())
    state, metrics = imitate(update, PACKING, init_state(tiny_params(), DESCENT), groups)
    np.testing.assert_allclose(metrics["policy/loss"], loss, rtol=1e-5)
    assert_trees_close(moved(state), gradient, 1e-6)
    assert metrics["learner/trained_tokens"] == metrics["policy/num_tokens"] == 10
    assert metrics["learner/dropped"] == 0


def test_a_trajectory_too_long_for_a_row_is_one_message(parts) -> None:
    from jaxsp.config import UserError

    groups = [Group("task", "reasoner", tuple(Trajectory("reasoner", (segment([1] * 40, 2),), r) for r in (0.0, 1.0)))]
    with pytest.raises(UserError, match=r"40 tokens .* learner\.row_tokens is 32; raise it to at least 40"):
        reinforce(parts, init_state(tiny_params(), DESCENT), groups, length_of)


def test_moving_baselines_are_read_then_moved_by_each_step(parts) -> None:
    baselines = {"reasoner": 0.5}
    parts = replace(parts, advantage="role_ema", ema_decay=0.75, baselines=baselines)
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), two_roles((1, 1, 1, 0)), length_of)
    # The challenger's baseline was 0: its advantages are 1 and 1.
    np.testing.assert_allclose(metrics["policy/loss"], -((3 + 1) / 8 + (0.5 * 2 - 0.5 * 4) / 2) / 4, atol=1e-6)
    assert baselines == {"challenger": 0.25, "reasoner": 0.5}
    assert metrics["learner/baseline_challenger"] == 0.25


@pytest.mark.parametrize(
    ("aggregation", "by_hand"),
    [
        # Advantages are half a point each way; 3, 1, 2 and 4 targets.
        ("sequence_mean", 0.0),
        ("token_mean", -(0.5 * 3 - 0.5 * 1 + 0.5 * 2 - 0.5 * 4) / 10),
    ],
)
def test_the_loss_of_other_aggregations_by_hand(parts, aggregation: str, by_hand: float) -> None:
    parts = replace(parts, aggregation=aggregation)
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), two_roles(), length_of)
    np.testing.assert_allclose(metrics["policy/loss"], by_hand, atol=1e-6)
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), two_roles((1, 1, 1, 0)), length_of)
    without_challenger = {"sequence_mean": 0.0, "token_mean": -(0.5 * 2 - 0.5 * 4) / 10}  # its targets count
    np.testing.assert_allclose(metrics["policy/loss"], without_challenger[aggregation], atol=1e-6)


@pytest.mark.parametrize("per_update", [0, 2])
def test_a_divergence_in_the_reward_is_taken_from_it_before_the_baseline(parts, per_update: int) -> None:
    groups, reference = two_roles(), jax.tree.map(lambda x: 0.9 * x, tiny_params())
    update = make_update(SIZES, DESCENT, replace(LOSS, kl_coef=0.0), **COMPUTE)
    parts = replace(
        with_reference(parts, reference),
        update=update,
        kl_reward_coef=0.25,
        kl_estimator="k1",
        trajectories_per_update=per_update,
    )
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), groups, length_of)
    own, other = (full_logprobs(SIZES, params, segments_of(groups)) for params in (tiny_params(), reference))
    k1 = np.asarray(jnp.sum(own - other, axis=1), np.float64)
    first, second, third, fourth = np.array([1, 0, 1, 0]) - 0.25 * np.array([k1[0] + k1[1], k1[2], k1[3], k1[4]])
    by_hand = -((first - second) / 2 * (3 - 1) / 8 + (third - fourth) / 2 * (2 - 4) / 2) / 4
    if not per_update:  # later updates have moved
        np.testing.assert_allclose(metrics["policy/loss"], by_hand, atol=1e-6)
    np.testing.assert_allclose(metrics["learner/kl_penalty_mean"], 0.25 * k1.sum() / 4, rtol=1e-5)
    assert metrics["policy/updates"] == (2 if per_update else 1) and metrics["policy/kl"] > 0
    assert abs(by_hand - 0.09375) > 1e-3, "the divergence decides something"


def with_turns(groups: Sequence[Group], cut_off: int) -> list[Group]:
    """The groups with what was sampled as turns; trajectory number `cut_off` ends at its token limit."""
    number, changed = 0, []
    for group in groups:
        trajectories = []
        for one in group.trajectories:
            end = "length" if number == cut_off else "stop"
            made = [replace(x, turns=(Turn("sampled", 2, len(x.tokens), end, 0),)) for x in one.segments]
            trajectories.append(replace(one, segments=tuple(made)))
            number += 1
        changed.append(replace(group, trajectories=tuple(trajectories)))
    return changed


def test_a_masked_trajectory_leaves_the_loss_and_stays_in_the_baseline(parts) -> None:
    groups = with_turns(two_roles(), cut_off=3)
    _, metrics = reinforce(replace(parts, overlong="mask"), init_state(tiny_params(), DESCENT), groups, length_of)
    # Its group's other trajectory has half a point still; three trajectories are left.
    np.testing.assert_allclose(metrics["policy/loss"], -((0.5 * 3 - 0.5 * 1) / 8 + 0.5 * 2 / 2) / 3, atol=1e-6)
    assert metrics["learner/overlong_left_out_frac"] == 0.25 and metrics["learner/dropped"] == 0
    assert metrics["policy/num_tokens"] == 6


def test_an_overlong_penalty_is_taken_from_the_reward_before_the_baseline(parts) -> None:
    groups = with_turns(two_roles(), cut_off=0)
    parts = replace(parts, overlong="penalise", overlong_buffer=2)
    _, metrics = reinforce(parts, init_state(tiny_params(), DESCENT), groups, length_of, lambda group: 4)
    # The longest turns have 2, 1, 2 and 4 tokens: the last one loses a point, and has -1 against 1.
    np.testing.assert_allclose(metrics["policy/loss"], -((0.5 * 3 - 0.5 * 1) / 8 + (2 - 4) / 2) / 4, atol=1e-6)
    assert metrics["learner/overlong_penalty_mean"] == 0.25
