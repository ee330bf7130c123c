import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.rollout.collect import keep_ratio
from jaxsp.rollout.prompts import Proposal, Rejection
from jaxsp.rollout.roles import Attempt

COUNTS = {"group_size": st.integers(2, 16), "flags": st.lists(st.booleans(), min_size=1, max_size=60)}


def attempts_of(flags) -> list[Attempt]:
    """An attempt without calls for each flag, valid where it is true."""
    return [
        Attempt((), Proposal(f"Q{index}?", "1", "integer") if is_valid else Rejection("no_json"))
        for index, is_valid in enumerate(flags)
    ]


def num_valid(attempts) -> int:
    return sum(isinstance(attempt.outcome, Proposal) for attempt in attempts)


@settings(deadline=None)
@given(**COUNTS, seed=st.integers())
def test_as_many_attempts_are_kept_as_there_are_up_to_the_group_size(group_size, flags, seed):
    kept = keep_ratio(attempts_of(flags), group_size, random.Random(seed))
    assert len(kept) == min(group_size, len(flags))


@settings(deadline=None)
@given(**COUNTS, seed=st.integers())
def test_the_kept_ratio_is_the_nearest_one_but_one_valid_attempt_always_stays(group_size, flags, seed):
    kept = keep_ratio(attempts_of(flags), group_size, random.Random(seed))
    exact = len(kept) * sum(flags) / len(flags)
    assert abs(num_valid(kept) - exact) <= 0.5 or (num_valid(kept) == 1 and 0 < exact < 0.5)
    assert (num_valid(kept) > 0) == any(flags)


@settings(deadline=None)
@given(**COUNTS, seed=st.integers())
def test_kept_attempts_are_some_of_those_made_each_once_and_in_order(group_size, flags, seed):
    attempts = attempts_of(flags)
    kept = keep_ratio(attempts, group_size, random.Random(seed))
    places = [attempts.index(attempt) for attempt in kept]
    assert places == sorted(set(places))


def test_a_quarter_of_valid_attempts_fills_a_quarter_of_the_group():
    for seed in range(10):
        assert num_valid(keep_ratio(attempts_of([True] * 4 + [False] * 12), 8, random.Random(seed))) == 2


def test_the_one_valid_attempt_of_a_thousand_is_kept():
    kept = keep_ratio(attempts_of([index == 700 for index in range(1024)]), 8, random.Random(0))
    assert num_valid(kept) == 1 and len(kept) == 8


def test_every_attempt_is_as_likely_to_be_kept_as_the_others_of_its_sort():
    attempts = attempts_of([True] * 6 + [False] * 6)
    times = Counter(
        attempts.index(kept) for seed in range(1000) for kept in keep_ratio(attempts, 4, random.Random(seed))
    )
    assert len(times) == 12
    assert all(abs(count - 1000 / 3) < 75 for count in times.values())  # 5 standard deviations of a binomial


def test_the_same_seed_keeps_the_same():
    attempts = attempts_of([True, False] * 20)
    first, again, other = (keep_ratio(attempts, 8, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
