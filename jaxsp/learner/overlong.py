"""What becomes of trajectories that a token limit cut off: their place in the loss, and what it costs to be near it.

A trajectory's length here is that of its longest sampled turn, which is what the limit is on.
"""

from collections.abc import Callable

from jaxsp.trajectory import Trajectory

Overlong = Callable[[Trajectory, int, int], tuple[float, bool]]
"""`(trajectory, max_tokens, buffer) -> (what is added to its reward, whether it leaves the loss)`."""


def is_cut_off(trajectory: Trajectory) -> bool:
    """Whether a turn of it ended at a token limit."""
    turns = [turn for segment in trajectory.segments for turn in segment.turns]
    return trajectory.status == "truncated" or any(turn.finish_reason == "length" for turn in turns)


def keep(trajectory: Trajectory, max_tokens: int, buffer: int) -> tuple[float, bool]:
    """As any other."""
    return 0.0, False


def mask(trajectory: Trajectory, max_tokens: int, buffer: int) -> tuple[float, bool]:
    """Those cut off leave the loss, as DAPO's overlong filtering does (arXiv 2503.14476, section 3.4).

    They are in its numerator and its denominators no more, but their rewards stay in the baseline: left out there too,
    the others would be compared with the short ones only.
    """
    return 0.0, is_cut_off(trajectory)


def penalise(trajectory: Trajectory, max_tokens: int, buffer: int) -> tuple[float, bool]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, section 3.4, equation 13).

    0 up to `max_tokens - buffer` tokens, then falling linearly to -1 at `max_tokens`.
    """
    turns = [turn for segment in trajectory.segments for turn in segment.turns if turn.kind == "sampled"]
    longest = max((turn.end - turn.start for turn in turns), default=0)
    return -min(max(longest - (max_tokens - buffer), 0) / buffer, 1.0), False


OVERLONG: dict[str, Overlong] = {"keep": keep, "mask": mask, "penalise": penalise}
"""By the name in `learner.overlong`."""
