from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import random_items, segment

from jaxsp.config import UserError
from jaxsp.learner.batch import Batch, Item, make_batch, microbatch_lengths, row_lengths, training_items
from jaxsp.learner.packing import pack_rows, sort_sequences
from jaxsp.trajectory import Group, Trajectory


def read_back(batch: Batch) -> dict[int, tuple[list[int], list[int]]]:
    """For each trajectory, the tokens before its last target as the row shows them, and the indices of its targets."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    num_microbatches, num_rows, _ = batch.tokens.shape
    for place in np.ndindex(num_microbatches, num_rows):
        tokens, visible, positions = batch.tokens[place], batch.visible_until[place], batch.positions[place]
        for sequence in np.unique(batch.target_sequence[place][batch.target_mask[place]]):
            slots = np.flatnonzero((batch.target_sequence[place] == sequence) & batch.target_mask[place])
            predictors = batch.target_predictor[place][slots]
            last = predictors[-1]
            path = [j for j in range(last + 1) if last < visible[j]]
            assert positions[path].tolist() == list(range(len(path)))
            assert set(predictors) <= set(path)
            targets = [path.index(predictor) + 1 for predictor in predictors]
            stream = [*tokens[path].tolist(), int(batch.target_tokens[place][slots[-1]])]
            assert [stream[target] for target in targets] == batch.target_tokens[place][slots].tolist()
            assert int(sequence) not in found, "a trajectory lies in one row only"
            found[int(sequence)] = (stream, targets)
    return found


few_tokens = st.lists(st.integers(0, 3), min_size=2, max_size=14)


@st.composite
def segments(draw: st.DrawFn):
    tokens = draw(few_tokens)
    mask = [False, *draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
    return segment(tokens, mask, temperature=draw(st.sampled_from([0.0, 0.5, 1.0])))


@settings(deadline=None, max_examples=150)
@given(st.lists(segments(), max_size=25), st.sampled_from([14, 16, 64, 128]), st.integers(1, 3))
def test_every_segment_can_be_read_back_from_its_row(drawn, row_tokens, rows_per_microbatch):
    items: list[Item] = [(made, index + 1.0) for index, made in enumerate(drawn)]
    batch, stats = make_batch(items, row_tokens=row_tokens, rows_per_microbatch=rows_per_microbatch)
    found = read_back(batch)
    trained = {index for index, made in enumerate(drawn) if made.loss_mask.any()}
    assert set(found) == trained
    for index in trained:
        stream, targets = found[index]
        expected = np.flatnonzero(drawn[index].loss_mask)
        assert targets == expected.tolist()
        assert stream == drawn[index].tokens[: expected[-1] + 1].tolist()
        of_index = (batch.target_sequence == index) & batch.target_mask
        assert (batch.advantages[of_index] == index + 1).all()
        assert (batch.temperatures[of_index] == (drawn[index].temperature or 1.0)).all()
    assert stats.num_trained_tokens == sum(int(made.loss_mask.sum()) for made in drawn)
    assert stats.num_tokens_stored <= stats.num_tokens_separate
    assert stats.num_trajectories == len(drawn)


@settings(deadline=None, max_examples=100)
@given(st.lists(few_tokens, min_size=1, max_size=30), st.sampled_from([14, 20, 40, 1000]))
def test_a_row_stores_no_prefix_twice_and_never_overflows(drawn, capacity):
    sequences = [np.asarray(tokens, np.int32) for tokens in drawn]
    rows, num_stored = pack_rows(sort_sequences(sequences), capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(sequences)))
    for row, stored in zip(rows, num_stored, strict=True):
        nodes = {tuple(drawn[index][:end]) for index in row for end in range(1, len(drawn[index]) + 1)}
        assert len(nodes) == stored <= capacity
    if capacity == 1000:
        assert len(rows) == 1


def test_the_worked_example_of_the_module_docstring():
    items = [(segment([5, 6, 7, 2], 2), 1.0), (segment([5, 6, 7, 9], 2), -1.0)]
    batch, stats = make_batch(items, row_tokens=6, rows_per_microbatch=1)
    assert batch.tokens[0, 0].tolist() == [5, 6, 7, 0, 0, 0]
    assert batch.positions[0, 0].tolist() == [0, 1, 2, 0, 0, 0]
    assert batch.visible_until[0, 0].tolist() == [3, 3, 3, 4, 5, 6]
    assert batch.target_tokens[0, 0, :4].tolist() == [7, 2, 7, 9]
    assert batch.target_predictor[0, 0, :4].tolist() == [1, 2, 1, 2]
    assert batch.target_sequence[0, 0, :4].tolist() == [0, 0, 1, 1]
    assert batch.target_mask[0, 0].tolist() == [True] * 4 + [False] * 8
    assert (stats.num_tokens_stored, stats.num_tokens_separate) == (3, 6)


def test_a_header_a_prompt_and_equal_answers_are_stored_once():
    header, prompts = list(range(10)), [[11, 12], [13, 14, 15]]
    items = [
        (segment([*header, *prompt, *answer], 10 + len(prompt)), 1.0)
        for prompt in prompts
        for answer in ([20, 21, 22], [20, 21, 22], [30, 31], [20, 41, 42])
    ]
    _, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    # the last token of an answer predicts nothing: [20, 21], [30] and [20, 41] form a trie of 4 tokens
    assert stats.num_tokens_stored == 10 + (2 + 4) + (3 + 4)
    assert stats.num_tokens_separate == 4 * (10 + 2) + 4 * (10 + 3) + 2 * (2 + 2 + 1 + 2)
    assert stats.num_rows == 1
    assert stats.padding_frac == 1 - 23 / 64


def test_a_group_too_large_for_a_row_is_split_and_its_prompt_repeated():
    prompt = list(range(30))
    items = [(segment([*prompt, *[100 + 20 * k + i for i in range(11)]], 30), 1.0) for k in range(5)]
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    assert stats.num_rows == 2
    assert stats.num_tokens_stored == 2 * 30 + 5 * 10
    assert set(read_back(batch)) == set(range(5))


def test_a_split_group_stays_with_its_own_prompt():
    # three answers of each of two prompts fit a row; prompts scattered over the rows would need a third
    items = [
        (segment([prompt, *range(20), *[100 * prompt + 20 * k + i for i in range(12)]], 21), 1.0)
        for prompt in (1, 2)
        for k in range(3)
    ]
    rows, _ = pack_rows(sort_sequences([made.tokens[:-1] for made, _ in items]), 55)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 1, 2], [3, 4, 5]]


def test_zero_and_missing_advantages_are_left_out_and_counted():
    made = [segment([1, 2, 3 + k], 2) for k in range(5)]
    items = list(zip(made, [0.0, 0.5, float("nan"), -0.5, 0.0], strict=True))
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    assert set(read_back(batch)) == {1, 3}
    assert (stats.num_trajectories, stats.num_zero_advantage, stats.num_dropped) == (4, 2, 1)
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1, keep_zero=True)
    assert set(read_back(batch)) == {0, 1, 3, 4}
    assert (stats.num_trajectories, stats.num_zero_advantage, stats.num_dropped) == (4, 0, 1)


def test_nothing_to_train_on_is_a_batch_without_targets():
    batch, stats = make_batch([(segment([1, 2], 1), 0.0)], row_tokens=64, rows_per_microbatch=2)
    assert not batch.target_mask.any()
    assert (stats.num_rows, stats.num_trajectories, stats.padding_frac) == (0, 1, 0.0)


def test_segments_of_one_trajectory_count_once():
    first, second = segment([1, 2, 3], 1), segment([1, 5, 6], 1)
    groups = [
        Group("a", "solver", (Trajectory("solver", (first, second), 1.0), Trajectory("solver", (second,), 0.0))),
        Group("b", "solver", (Trajectory("solver", (first,), 1.0),)),
    ]
    items, trajectory_ids = training_items(groups, [np.array([0.5, -0.5]), np.array([1.0])])
    assert trajectory_ids == [0, 0, 1, 2]
    assert [advantage for _, advantage in items] == [0.5, 0.5, -0.5, 1.0]
    batch, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1, trajectory_ids=trajectory_ids)
    assert stats.num_trajectories == 3
    assert Counter(batch.target_sequence[batch.target_mask].tolist()) == {0: 4, 1: 2, 2: 2}


def test_a_sequence_longer_than_a_row_is_refused_by_name():
    with pytest.raises(UserError, match=r"70 tokens.*learner\.row_tokens is 64"):
        make_batch([(segment(list(range(70)), 60), 0.0)], row_tokens=64, rows_per_microbatch=1)


def test_rows_of_a_microbatch_divide_over_devices():
    batch, _ = make_batch(random_items(), row_tokens=64, rows_per_microbatch=3, row_multiple=4)
    assert batch.tokens.shape[1] == 4


@pytest.mark.parametrize(
    ("row_tokens", "lengths"),
    [
        (4096, [4096, 2048, 1024, 512, 256, 128, 64]),
        (64, [64]),
        (40, [40]),
        (600, [600, 300, 150, 75]),
    ],
)
def test_row_lengths_are_halves_of_the_longest(row_tokens, lengths):
    assert row_lengths(row_tokens) == lengths


def test_small_problems_get_short_rows_and_batches_of_like_size_one_shape():
    shapes = set()
    for seed in range(5):
        batch, _ = make_batch(random_items(seed, num_groups=4), row_tokens=1024, rows_per_microbatch=1)
        shapes.add((batch.tokens.shape, batch.target_tokens.shape))
    assert shapes == {((16, 1, 128), (16, 1, 256))}


def test_rows_that_end_early_come_last_and_are_computed_at_three_quarters_of_the_length():
    rng = np.random.default_rng(0)
    # Nothing is shared. Rows of 250 hold 240; 190; 2 x 90, with the most targets; the first is the longest.
    made = [segment(rng.integers(0, 9999, length + 1).tolist(), mask) for length, mask in
            [(90, 60), (90, 60), (240, 240), (190, 190)]]  # fmt: skip
    batch, stats = make_batch([(one, 1.0) for one in made], row_tokens=256, rows_per_microbatch=1)
    ends = [int(np.max(batch.target_predictor[place][batch.target_mask[place]])) for place in ((0, 0), (1, 0), (2, 0))]
    assert ends == [239, 179, 189]
    assert stats.padding_frac == 1 - (240 + 190 + 180) / (256 + 192 + 192)
    # A micro-batch of two rows is computed as far as its longer row asks for.
    _, stats = make_batch([(one, 1.0) for one in made], row_tokens=256, rows_per_microbatch=2)
    assert stats.padding_frac == 1 - (240 + 190 + 180) / (2 * 256 + 2 * 192)


@pytest.mark.parametrize(("num_microbatches", "length", "shortest"), [(16, 256, 192), (17, 256, 256), (1, 128, 128)])
def test_two_lengths_of_row_are_compiled_only_where_that_pays(num_microbatches, length, shortest):
    assert microbatch_lengths(num_microbatches, length) == (length, shortest)


def test_packing_ignores_the_order_of_trajectories():
    items = random_items(4, num_groups=6)
    _, stats = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    _, reverse = make_batch(items[::-1], row_tokens=64, rows_per_microbatch=1)
    assert stats == reverse
