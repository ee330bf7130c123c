import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_sampler import MOE_SIZES, SIZES, tiny_params

from jaxsp.sampler.weight_sync import to_sampler_layout

HERE = Path(__file__).parent

SHARDED = """
import dataclasses
import json
import jax
from jaxsp.config import UsageError
from jaxsp.mesh import make_mesh, shardings
from jaxsp.model.decoder import logical_axes
from jaxsp.trajectory import GenerateRequest
from tiny_sampler import SIZES, assert_same_samples, generate_all, interpreted, prompt, tiny_engine, tiny_params

assert jax.device_count() == 8
requests = [
    GenerateRequest(prompt(i % 3, 9), i, 7, temperature=i % 4 / 2, top_k=i % 2 * 30, top_p=0.9 if i == 3 else 1.0)
    for i in range(4)
]
params = tiny_params()
expected = generate_all(tiny_engine(params), requests)
mesh = make_mesh(data=1, fsdp=4, context=1, expert=1, tensor=2)
scattered = jax.device_put(params, shardings(mesh, logical_axes(SIZES)))
engine = tiny_engine(scattered, mesh=mesh)
samples = [expected, generate_all(engine, requests)]
assert tuple(engine._params["layers"][0]["k"]["kernel"].sharding.spec) == ("fsdp", "tensor", None)
warm = engine.num_compilations
engine.load(scattered, 4)
samples.append(generate_all(engine, requests))
assert engine.num_compilations == warm
wide = make_mesh(data=1, fsdp=1, context=1, expert=1, tensor=4, devices=jax.devices()[:4])
for attention in ("auto", interpreted("tpu"), interpreted("gpu")):  # each of the 2 kv heads on 2 of the 4 devices
    engine = tiny_engine(params, mesh=wide, attention=attention)
    samples.append(generate_all(engine, requests))
    assert engine._batch._cache[0][0].sharding.shard_shape(engine._batch._cache[0][0].shape)[1] == 1
for tensor, message in ((3, "kv_heads = 2 cannot be split or copied evenly over mesh.tensor = 3"),
                        (8, "heads = 4 does not divide over mesh.tensor = 8")):
    mesh = make_mesh(data=1, fsdp=1, context=1, expert=1, tensor=tensor, devices=jax.devices()[:tensor])
    try:
        tiny_engine(params, mesh=mesh)
    except UsageError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"4 heads that read 2 kv heads were accepted over {tensor} devices")
for found in samples:
    assert_same_samples(found, expected)
print(json.dumps([[completion.tokens for completion in found] for found in samples]))
"""


def test_layers_become_a_list_with_the_same_numbers():
    params = tiny_params()
    synced = to_sampler_layout(SIZES, params, jnp.float32)
    assert len(synced["layers"]) == SIZES.num_layers
    for index, layer in enumerate(synced["layers"]):
        expected = jax.tree.map(lambda all_layers, i=index: all_layers[i], params["layers"])
        jax.tree.map(np.testing.assert_array_equal, layer, expected)
    np.testing.assert_array_equal(synced["embed"], params["embed"])


def test_each_layer_gets_the_parts_that_it_has():
    params = tiny_params(sizes=MOE_SIZES)
    first, second, third = to_sampler_layout(MOE_SIZES, params, jnp.float32)["layers"]
    assert first.keys() == third.keys() == second.keys() - {"gate", "up", "down"} | {"router", "experts"}
    for layer, slot in ((first, 0), (third, 1)):
        expected = jax.tree.map(lambda stack, i=slot: stack[i], params["layers"]["experts"])
        jax.tree.map(np.testing.assert_array_equal, layer["experts"], expected)
    np.testing.assert_array_equal(second["up"]["kernel"], params["layers"]["up"]["kernel"][0])
    np.testing.assert_array_equal(third["q"]["kernel"], params["layers"]["q"]["kernel"][2])


def test_weights_are_cast_and_norm_scales_and_routers_are_not():
    synced = to_sampler_layout(MOE_SIZES, tiny_params(sizes=MOE_SIZES), jnp.bfloat16)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(synced)[0]}
    kept = {name for name in dtypes if "scale" in name or "router" in name}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.float32} == kept
    assert dtypes["['embed']"] == dtypes["['layers'][1]['down']['kernel']"] == jnp.bfloat16


def test_each_kv_head_comes_as_often_as_devices_need_it():
    params = tiny_params()
    plain = to_sampler_layout(SIZES, params, jnp.float32)
    copied = to_sampler_layout(dataclasses.replace(SIZES, num_kv_heads=6), params, jnp.float32)
    for name in ("k", "v"):
        kernel = copied["layers"][1][name]["kernel"]
        np.testing.assert_array_equal(kernel, np.repeat(plain["layers"][1][name]["kernel"], 3, axis=1))
        copied["layers"][1][name], copied["layers"][0][name] = plain["layers"][1][name], plain["layers"][0][name]
    jax.tree.map(np.testing.assert_array_equal, copied, plain)


def test_the_copy_outlives_the_donation_of_the_original():
    params = tiny_params()
    synced = to_sampler_layout(SIZES, params, jnp.float32)
    before = np.array(synced["embed"])
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params)
    assert params["embed"].is_deleted()
    np.testing.assert_array_equal(synced["embed"], before)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_that_are_given_away_are_deleted_and_give_the_same_copy(dtype):
    expected, params = to_sampler_layout(SIZES, tiny_params(), dtype), tiny_params()
    synced = to_sampler_layout(SIZES, params, dtype, consumes=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, synced, expected)


def test_several_devices_sample_the_ids_that_one_samples():
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, *several = json.loads(done.stdout)
    assert len(one) == 4 and several == [one] * 5
