"""What is sampled in `make bench-sampler`: requests and episodes of token ids, made once and read by every engine.

Nothing but the standard library is imported here, since engines in environments of their own read it too. The ids are
random: what they say changes no shape, and every output has its length given, so all engines do the same work.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FIRST_TOKEN = 100
"""Ids below it are control tokens in the vocabularies of small models."""


@dataclass(frozen=True)
class Request:
    """A prompt that is followed by `num_outputs` sampled tokens, never fewer."""

    prompt: tuple[int, ...]
    num_outputs: int


@dataclass(frozen=True)
class Episode:
    """Turns of an agent. The prompt of a turn is all that came before: opening, observations and replies."""

    opening: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]
    """One for each turn, in front of its reply."""
    turn_outputs: int


@dataclass(frozen=True)
class Workload:
    """Requests, or episodes, that arrive together."""

    name: str
    title: str
    requests: tuple[Request, ...] = ()
    episodes: tuple[Episode, ...] = ()
    temperature: float = 1.0
    is_uniform: bool = False
    """All requests have the same lengths, so that one number describes a step: what the machine's limits are for."""

    @property
    def num_outputs(self) -> int:
        """Tokens that are sampled in all."""
        return sum(request.num_outputs for request in self.requests) + sum(
            len(episode.observations) * episode.turn_outputs for episode in self.episodes
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request or episode at its end, prompt and outputs together."""

        def length(episode: Episode) -> int:
            replies = len(episode.observations) * episode.turn_outputs
            return len(episode.opening) + sum(map(len, episode.observations)) + replies

        return [len(request.prompt) + request.num_outputs for request in self.requests] + [
            length(episode) for episode in self.episodes
        ]

    @property
    def output_lengths(self) -> list[int]:
        """Of each list of tokens that an engine returns: one for a request, one for each turn of each episode."""
        return [request.num_outputs for request in self.requests] + [
            episode.turn_outputs for episode in self.episodes for _ in episode.observations
        ]


def make_workloads(seed: int, vocab_size: int, shrink: int = 1) -> dict[str, Workload]:
    """The workloads in the order they run. The same arguments give the same tokens.

    `shrink` divides the sampled tokens, and the turns of an episode by half of it: to try the benchmark out.
    """
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(count))

    def outputs(count: int) -> int:
        return max(2, count // shrink)

    def batch(size: int) -> Workload:
        title = f"prompt 128 + {outputs(128)}, batch {size}"
        requests = tuple(Request(tokens(128), outputs(128)) for _ in range(size))
        return Workload(f"batch_{size}", title, requests, is_uniform=True)

    greedy = Workload("greedy", "the same tokens, greedily", (Request(tokens(24), 16),), temperature=0.0)
    prompts = [tokens(128) for _ in range(4)]
    groups = tuple(Request(prompt, outputs(128)) for prompt in prompts for _ in range(8))
    ragged = tuple(Request(tokens(draw.randint(32, 512)), outputs(draw.randint(16, 256))) for _ in range(96))
    num_turns = max(2, 10 // max(1, shrink // 2))
    episodes = tuple(Episode(tokens(128), tuple(tokens(60) for _ in range(num_turns)), outputs(40)) for _ in range(16))
    made = [
        greedy,
        *map(batch, (1, 8, 32, 64)),
        Workload("groups", f"4 prompts x 8, 128 + {outputs(128)}", groups),
        Workload("ragged", f"96 requests, 32-512 + {outputs(16)}-{outputs(256)}", ragged),
        Workload("episodes", f"16 episodes x {num_turns} turns, 60 + {outputs(40)}", episodes=episodes),
    ]
    return {workload.name: workload for workload in made}


def check_outputs(workload: Workload, outputs: Sequence[Sequence[int]]) -> None:
    """ValueError unless an engine sampled exactly as many tokens as it was asked to."""
    lengths = list(map(len, outputs))
    if lengths != workload.output_lengths:
        wrong = [pair for pair in zip(lengths, workload.output_lengths, strict=False) if pair[0] != pair[1]]
        raise ValueError(
            f"{workload.name}: {len(lengths)} outputs instead of {len(workload.output_lengths)}, of wrong length "
            f"(sampled, asked for): {wrong[:4]}"
        )


def by_prompt_length(requests: Sequence[Request], max_rows: int) -> list[list[int]]:
    """The indices of the requests in batches of at most `max_rows`, shortest prompts first: for engines that pad.

    They pad prompts to the longest of a batch. How long the outputs will be is not known beforehand in earnest, so
    nothing is sorted by it.
    """
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
    return [order[begin : begin + max_rows] for begin in range(0, len(order), max_rows)]


def write_workloads(workloads: Mapping[str, Workload], path: Path) -> None:
    """As one JSON file."""
    path.write_text(json.dumps([asdict(workload) for workload in workloads.values()]))


def read_workloads(path: Path) -> dict[str, Workload]:
    """What `write_workloads` wrote."""
    workloads = (_workload(row) for row in json.loads(path.read_text()))
    return {workload.name: workload for workload in workloads}


def _workload(row: dict) -> Workload:
    return replace(
        Workload(**row),
        requests=tuple(Request(tuple(each["prompt"]), each["num_outputs"]) for each in row["requests"]),
        episodes=tuple(
            Episode(tuple(each["opening"]), tuple(map(tuple, each["observations"])), each["turn_outputs"])
            for each in row["episodes"]
        ),
    )
