"""What a method is made of: phases, each of which plays and learns for a number of steps."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxsp.rollout.collect import Played
from jaxsp.rollout.roles import OnProgress
from jaxsp.trajectory import Group


@dataclass(frozen=True)
class StepPlace:
    """Where in a run a step stands.

    Attributes:
        step: steps done before it, over all phases: the version of the policy that plays it.
        step_in_phase: the same, of its phase.
    """

    step: int
    step_in_phase: int
    seed: int
    on_progress: OnProgress


@dataclass(frozen=True)
class Phase:
    """`num_steps` times: `play` gives groups, and the learner follows `objective` on them.

    Attributes:
        objective: `imitate` is cross-entropy on the targets of every trajectory, `reinforce` the clipped policy
            gradient on group advantages.
        learning_rate: a number, or a function of the number of the phase's updates so far.
        normaliser: the constant length by which a trajectory of a group is divided (DrGRPO, arXiv 2503.20783).
        max_tokens: the most tokens that one turn of a group's trajectories may sample.
    """

    name: str
    num_steps: int
    objective: Literal["imitate", "reinforce"]
    learning_rate: float | Callable[[Any], Any]
    play: Callable[[StepPlace], Awaitable[Played]]
    normaliser: Callable[[Group], int] = lambda group: 1
    max_tokens: Callable[[Group], int] = lambda group: 1


@dataclass(frozen=True)
class Method:
    """A schedule, and the state outside the model that a checkpoint must hold for it to go on.

    `state` gives it as JSON values, `restore` takes it back: the place in the corpus, for one.
    """

    phases: tuple[Phase, ...]
    state: Callable[[], dict[str, Any]]
    restore: Callable[[dict[str, Any]], None]
