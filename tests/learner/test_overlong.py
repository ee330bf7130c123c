import numpy as np
import pytest

from jaxsp.learner.overlong import OVERLONG
from jaxsp.trajectory import FinishReason, Segment, Status, Trajectory, Turn


def sampled(*lengths: int, finish: FinishReason = "stop", status: Status = "ok") -> Trajectory:
    """A trajectory of a segment with a prompt of 3 and one sampled turn for each length; the last ends by `finish`."""
    segments = []
    for number, length in enumerate(lengths):
        end = finish if number == len(lengths) - 1 else "stop"
        turns = (Turn("observation", 0, 3), Turn("sampled", 3, 3 + length, end, 0))
        tokens = np.zeros(3 + length, np.int32)
        segments.append(Segment(tokens, np.arange(3 + length) >= 3, tokens.astype(np.float32), turns))
    return Trajectory("reasoner", tuple(segments), 1.0, status)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (12, 0), (13, -0.125), (16, -0.5), (20, -1)])
def test_the_soft_punishment_falls_linearly_over_the_last_tokens_before_the_limit(length: int, penalty: float) -> None:
    assert OVERLONG["penalise"](sampled(length), 20, 8) == (penalty, False)
    assert OVERLONG["penalise"](sampled(5, length, 5), 20, 8) == (penalty, False), "the longest turn counts"


def test_masking_leaves_out_what_was_cut_off_and_nothing_else() -> None:
    assert OVERLONG["mask"](sampled(20), 20, 8) == (0, False)
    assert OVERLONG["mask"](sampled(4, 20, finish="length"), 20, 8) == (0, True)
    assert OVERLONG["mask"](sampled(4, status="truncated"), 20, 8) == (0, True)


def test_keeping_changes_nothing() -> None:
    assert OVERLONG["keep"](sampled(20, finish="length", status="truncated"), 20, 8) == (0, False)
