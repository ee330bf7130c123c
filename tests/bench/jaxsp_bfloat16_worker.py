"""The same sampler with its weights in bfloat16 and all else in float32: half the bytes, as llama.cpp's F16."""

from tests.bench.jaxsp_worker import PACKAGES, Jaxsp
from tests.bench.worker import sampling, serve

if __name__ == "__main__":
    serve(lambda place: sampling(Jaxsp(place, "bfloat16")), PACKAGES)
