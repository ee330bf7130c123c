"""Sampling from a decoder some of whose layers have experts."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_sampler import (
    MOE_SIZES,
    assert_same_samples,
    generate_all,
    prompt,
    reference_sample,
    tiny_engine,
    tiny_params,
)

from jaxsp.model.sizes import Moe
from jaxsp.trajectory import GenerateRequest

HERE = Path(__file__).parent
REQUESTS = [
    GenerateRequest(prompt(i, 3 + 7 * i), seed=i, max_tokens=6, temperature=temperature)
    for i, temperature in enumerate((0.0, 1.0, 0.7))
]


@pytest.mark.parametrize("products", ["xla", "auto"])
@pytest.mark.parametrize("layers", [(0, 2), (0, 1, 2)])
def test_greedy_and_sampled_tokens_are_those_of_a_full_forward_pass(layers, products):
    sizes = dataclasses.replace(MOE_SIZES, moe=Moe(8, 2, 24, True, layers))
    params = tiny_params(sizes=sizes)
    found = generate_all(tiny_engine(params, sizes=sizes, products=products), REQUESTS)
    assert_same_samples(found, [reference_sample(params, request, sizes) for request in REQUESTS])


SHARDED = """
import jax
from jaxsp.mesh import make_mesh
from test_sampling_from_experts import REQUESTS
from tiny_sampler import MOE_SIZES, assert_same_samples, generate_all, tiny_engine, tiny_params

params = tiny_params(sizes=MOE_SIZES)
expected = generate_all(tiny_engine(params, sizes=MOE_SIZES), REQUESTS)
for axes in ({"tensor": 2}, {"expert": 2, "tensor": 2}):
    devices = jax.devices()[: axes.get("expert", 1) * 2]
    mesh = make_mesh(1, 1, 1, axes.get("expert", 1), axes["tensor"], devices)
    assert_same_samples(generate_all(tiny_engine(params, sizes=MOE_SIZES, mesh=mesh), REQUESTS), expected)
print("equal")
"""


def test_experts_on_several_devices_sample_what_one_samples():
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
