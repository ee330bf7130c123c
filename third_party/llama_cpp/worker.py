"""llama.cpp in `make bench-sampler`, through `llama-cpp-python`: float16 weights, one sequence at a time."""

from llama_cpp import Llama

from tests.bench.worker import Outputs, Place, sampling, serve
from tests.bench.workloads import Workload


class LlamaCpp:
    def __init__(self, place: Place) -> None:
        self._llama = Llama(
            model_path=str(place.gguf_path),
            n_ctx=2048,
            n_threads=place.num_threads,
            n_threads_batch=place.num_threads,
            use_mmap=False,  # into memory with large pages
            seed=0,
            verbose=False,
        )

    def prepare(self, workload: Workload) -> None:
        self.run(workload)

    def run(self, workload: Workload) -> Outputs:
        if workload.episodes:
            raise ValueError("episodes are not measured here")
        tokens = [
            self._generate(request.prompt, request.num_outputs, workload.temperature) for request in workload.requests
        ]
        return Outputs(tokens, {"weights": "float16", "cache": "float16"})

    def num_compilations(self) -> int | None:
        return None

    def _generate(self, prompt: tuple[int, ...], num_outputs: int, temperature: float) -> list[int]:
        self._llama.reset()  # or it would find the prompt in its cache
        found = self._llama.generate(
            list(prompt), top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, temp=temperature, repeat_penalty=1.0
        )
        return [token for _, token in zip(range(num_outputs), found, strict=False)]


if __name__ == "__main__":
    serve(lambda place: sampling(LlamaCpp(place)), ["llama-cpp-python"])
