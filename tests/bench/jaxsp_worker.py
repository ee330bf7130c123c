"""jaxsp's own sampler in the benchmark, opened for a workload as `jaxsp sample` opens it for its prompts."""

import asyncio
from typing import Literal

from jaxsp.inference import find_model, open_engine
from jaxsp.model.source import tokenizer_path
from jaxsp.sampler.engine import Engine
from jaxsp.tokenizer import load_tokenizer
from jaxsp.trajectory import GenerateRequest
from tests.bench.worker import Outputs, Place, sampling, serve
from tests.bench.workloads import Episode, Workload

PACKAGES = ["jaxsp", "jax", "jaxlib", "numpy"]
"""Whose versions belong in the results."""


class Jaxsp:
    """One engine at a time: the next workload's replaces it, and finds the programs that are compiled."""

    def __init__(self, place: Place, weight_dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        self._model = find_model(str(place.model_dir), compute_dtype="float32", weight_dtype=weight_dtype)
        self._tokenizer = load_tokenizer(tokenizer_path(self._model.source))
        self._engine: Engine | None = None

    def prepare(self, workload: Workload) -> None:
        self._engine = None  # its cache goes before the next one's comes
        self._engine = open_engine(self._model, self._tokenizer, workload.lengths)
        self.run(workload)

    def run(self, workload: Workload) -> Outputs:
        assert self._engine is not None
        self._engine.forget_prefixes()
        self._engine.reset_stats()
        tokens = asyncio.run(_sample(self._engine, workload))
        return Outputs(tokens, self._engine.stats())

    def num_compilations(self) -> int | None:
        return None if self._engine is None else self._engine.num_compilations


async def _sample(engine: Engine, workload: Workload) -> list[tuple[int, ...]]:
    async def one(tokens: tuple[int, ...], seed: int, num_outputs: int) -> tuple[int, ...]:
        request = GenerateRequest(tokens, seed=seed, max_tokens=num_outputs, temperature=workload.temperature)
        return (await engine.generate(request)).tokens

    async def play(episode: Episode, index: int) -> list[tuple[int, ...]]:
        history, replies = episode.opening, []
        for turn, observation in enumerate(episode.observations):
            history += observation
            reply = await one(history, index * len(episode.observations) + turn, episode.turn_outputs)
            history += reply
            replies.append(reply)
        return replies

    requests = (one(each.prompt, index, each.num_outputs) for index, each in enumerate(workload.requests))
    episodes = (play(episode, index) for index, episode in enumerate(workload.episodes))
    outputs, replies = await asyncio.gather(asyncio.gather(*requests), asyncio.gather(*episodes))
    return [*outputs, *(reply for turns in replies for reply in turns)]


if __name__ == "__main__":
    serve(lambda place: sampling(Jaxsp(place)), PACKAGES)
