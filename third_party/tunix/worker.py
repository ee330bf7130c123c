"""google-tunix's own sampler in `make bench-sampler`, with SmolLM2 as its Llama 3, in float32 on a CPU.

It pads prompts on the left and compiles for every shape; a batch runs until its longest output is done, and nothing is
kept from call to call. Its Llama 3 rotates with a base of its own whatever its config says, so the base is set here;
without that it would do the same work and sample other tokens.
"""

import dataclasses
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama3
from tunix.models.llama3.params import create_model_from_safe_tensors

from tests.bench.worker import Outputs, Place, sampling, serve
from tests.bench.workloads import Workload, by_prompt_length

MAX_ROWS = 32
PROMPT_STEP = 256
"""The prompts of an episode's turns are padded to a multiple of it, or each turn would compile programs of its own."""


class _TokensAsText:
    """Prompts are given as ids written out, since the sampler takes texts."""

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


class Tunix:
    def __init__(self, place: Place) -> None:
        config = json.loads((place.model_dir / "config.json").read_text())
        self._config = llama3.ModelConfig(
            num_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            num_kv_heads=config["num_key_value_heads"],
            rope_theta=int(config["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            weight_tying=True,
        )
        llama3.apply_rope.__defaults__ = (self._config.rope_theta,)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        self._model = create_model_from_safe_tensors(str(place.model_dir), self._config, mesh, dtype=jnp.float32)
        self._samplers: dict[int, Sampler] = {}
        self._compiled: set[tuple[int, int, int, float]] = set()

    def prepare(self, workload: Workload) -> None:
        """Compiles for each shape by sampling two tokens of it."""
        for batch in by_prompt_length(workload.requests, MAX_ROWS):
            requests = [workload.requests[index] for index in batch]
            longest = max(request.num_outputs for request in requests)
            self._compile(len(batch), max(len(each.prompt) for each in requests), longest, workload.temperature)
        for episode in workload.episodes[:1]:
            length = len(episode.opening)
            for observation in episode.observations:
                length += len(observation)
                self._compile(len(workload.episodes), _padded(length), episode.turn_outputs, workload.temperature)
                length += episode.turn_outputs

    def run(self, workload: Workload) -> Outputs:
        outputs: dict[int, list[int]] = {}
        for batch in by_prompt_length(workload.requests, MAX_ROWS):
            requests = [workload.requests[index] for index in batch]
            longest = max(request.num_outputs for request in requests)
            prompts = [request.prompt for request in requests]
            rows = self._generate(prompts, max(map(len, prompts)), longest, workload.temperature)
            for index, request, row in zip(batch, requests, rows, strict=True):
                outputs[index] = row[: request.num_outputs]
        tokens = [outputs[index] for index in range(len(workload.requests))]
        return Outputs([*tokens, *self._play(workload)], {"max_rows": MAX_ROWS})

    def num_compilations(self) -> int | None:
        return sum(
            sampler._compiled_prefill_fn._cache_size() + sampler._compiled_decode_fn._cache_size()
            for sampler in self._samplers.values()
        )

    def _play(self, workload: Workload) -> list[list[int]]:
        """All episodes at once, turn by turn; replies episode by episode."""
        episodes = workload.episodes
        histories = [list(episode.opening) for episode in episodes]
        replies: list[list[list[int]]] = [[] for _ in episodes]
        for turn in range(len(episodes[0].observations) if episodes else 0):
            for history, episode in zip(histories, episodes, strict=True):
                history += episode.observations[turn]
            length = _padded(len(histories[0]))
            rows = self._generate(histories, length, episodes[0].turn_outputs, workload.temperature)
            for history, own, row in zip(histories, replies, rows, strict=True):
                history += row
                own.append(row)
        return [reply for own in replies for reply in own]

    def _sampler(self, cache_size: int) -> Sampler:
        if cache_size not in self._samplers:
            config = self._config
            sizes = CacheConfig(cache_size, config.num_layers, config.num_kv_heads, config.head_dim)
            self._samplers[cache_size] = Sampler(self._model, _TokensAsText(), sizes)
        return self._samplers[cache_size]

    def _generate(
        self, prompts: Sequence[Sequence[int]], prompt_length: int, num_outputs: int, temperature: float
    ) -> list[list[int]]:
        """Exactly `num_outputs` tokens for each prompt: no id ends a sequence."""
        found = self._sampler(prompt_length + num_outputs)(
            [" ".join(map(str, prompt)) for prompt in prompts],
            max_generation_steps=num_outputs,
            max_prompt_length=prompt_length,
            eos_tokens=[-1],
            seed=0,
            **({"temperature": temperature, "top_p": 1.0} if temperature else {}),
        )
        return [np.asarray(row).tolist() for row in found.tokens]

    def _compile(self, num_rows: int, prompt_length: int, num_outputs: int, temperature: float) -> None:
        """What `Sampler.__call__` does for such a batch, but for two tokens only."""
        shape = (num_rows, prompt_length, num_outputs, temperature)
        if shape in self._compiled:
            return
        self._compiled.add(shape)
        sampler = self._sampler(prompt_length + num_outputs)
        sampler.eos_ids = jnp.array([-1])
        state = sampler.init_sample_state(
            jnp.ones((num_rows, prompt_length), jnp.int32),
            total_sampling_steps=prompt_length + num_outputs,
            include_logits=False,
            forbidden_token_ids=None,
            temperature=temperature,
            top_p=1.0 if temperature else None,
            top_k=None,
            seed=jax.random.PRNGKey(0),
            beam_size=None,
        )
        state = dataclasses.replace(state, total_sampling_steps=prompt_length + 2)
        weights = sampler._flattened_transformer_state
        state = sampler._compiled_prefill_fn(weights, state, None, echo=False)
        jax.block_until_ready(sampler._compiled_decode_fn(weights, state).token_buffer)


def _padded(length: int) -> int:
    return -(-length // PROMPT_STEP) * PROMPT_STEP


if __name__ == "__main__":
    serve(lambda place: sampling(Tunix(place)), ["google-tunix", "jax", "flax"])
