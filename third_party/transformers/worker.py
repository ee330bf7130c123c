"""Hugging Face `transformers` in `make bench-sampler`: `generate` in float32 on a CPU, set as fast as it goes.

Prompts of a batch are padded on the left. `generate` has no continuous batching and keeps nothing from call to call:
a batch runs until its longest output is done, and an episode's turn computes its whole history.
"""

import time

import torch
from transformers import AutoModelForCausalLM

from tests.bench.worker import Outputs, Place, sampling, serve
from tests.bench.workloads import Episode, Workload, by_prompt_length

MAX_ROWS = 32
"""Requests of a batch. Ragged ones: larger batches compute more padding and keep more finished rows."""
CACHES = ("dynamic", "static")
TRIAL_ROWS, TRIAL_OUTPUTS = 8, 8


class Transformers:
    def __init__(self, place: Place) -> None:
        torch.set_num_threads(place.num_threads)
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_pretrained(place.model_dir, dtype=torch.float32).eval()
        for parameter in self._model.parameters():  # out of the mapped file, into memory with large pages
            parameter.data = parameter.data.clone()
        self._pad_id = 0
        self._cache = {}

    def prepare(self, workload: Workload) -> None:
        """Nothing is compiled. Chooses the faster kind of cache for prompts of about the middle length."""
        prompts = _middle_prompts(workload)
        self._generate(prompts[:1], 2, workload.temperature, CACHES[0])
        seconds = {}
        for cache in CACHES:
            started = time.perf_counter()
            self._generate(prompts, TRIAL_OUTPUTS, workload.temperature, cache)
            seconds[cache] = time.perf_counter() - started
        self._cache[workload.name] = min(CACHES, key=seconds.__getitem__)

    def run(self, workload: Workload) -> Outputs:
        cache = self._cache[workload.name]
        outputs: dict[int, list[int]] = {}
        for batch in by_prompt_length(workload.requests, MAX_ROWS):
            requests = [workload.requests[index] for index in batch]
            longest = max(request.num_outputs for request in requests)
            rows = self._generate([request.prompt for request in requests], longest, workload.temperature, cache)
            for index, request, row in zip(batch, requests, rows, strict=True):
                outputs[index] = row[: request.num_outputs]
        tokens = [outputs[index] for index in range(len(workload.requests))]
        tokens += self._play(workload.episodes, workload.temperature, cache)
        attention = self._model.config._attn_implementation
        return Outputs(tokens, {"max_rows": MAX_ROWS, "attention": attention, "cache": cache})

    def num_compilations(self) -> int | None:
        return None

    def _play(self, episodes: tuple[Episode, ...], temperature: float, cache: str) -> list[list[int]]:
        """All episodes at once, turn by turn; replies episode by episode."""
        histories = [list(episode.opening) for episode in episodes]
        replies: list[list[list[int]]] = [[] for _ in episodes]
        for turn in range(len(episodes[0].observations) if episodes else 0):
            for history, episode in zip(histories, episodes, strict=True):
                history += episode.observations[turn]
            rows = self._generate(histories, episodes[0].turn_outputs, temperature, cache)
            for history, own, row in zip(histories, replies, rows, strict=True):
                history += row
                own.append(row)
        return [reply for own in replies for reply in own]

    @torch.inference_mode()
    def _generate(self, prompts: list, num_outputs: int, temperature: float, cache: str) -> list[list[int]]:
        """Exactly `num_outputs` tokens for each prompt: no id ends a sequence."""
        longest = max(map(len, prompts))
        tokens = torch.tensor([[self._pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        found = self._model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=num_outputs,
            min_new_tokens=num_outputs,
            eos_token_id=None,
            pad_token_id=self._pad_id,
            cache_implementation=cache,
            **(drawing if temperature else {"do_sample": False}),
        )
        return found[:, longest:].tolist()


def _middle_prompts(workload: Workload) -> list:
    """Prompts like those in the middle of the work; the observations stand in for an episode's replies."""
    if workload.requests:
        batches = by_prompt_length(workload.requests, MAX_ROWS)
        middle = batches[len(batches) // 2]
        return [workload.requests[index].prompt for index in middle[:TRIAL_ROWS]]
    prompts = []
    for episode in workload.episodes[:TRIAL_ROWS]:
        past = episode.observations[: len(episode.observations) // 2 + 1]
        prompts.append([*episode.opening, *(token for each in past for token in each + each[: episode.turn_outputs])])
    return prompts


if __name__ == "__main__":
    serve(lambda place: sampling(Transformers(place)), ["torch", "transformers"])
