"""The kernels that attend in the cache's pages against XLA, those for accelerators in Pallas's interpreter; and which
of them is chosen."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_sampler import KERNELS, assert_same_samples, generate_all, interpreted, prompt, tiny_engine

from jaxsp.config import UsageError
from jaxsp.model.attention import attention
from jaxsp.sampler.cpu_kernels import ATTENTION, kernel_call
from jaxsp.sampler.paged_attention import IMPLEMENTATIONS, choose, prefill_attend
from jaxsp.trajectory import GenerateRequest

PAGE, WIDTH, GROUP = 16, 5, 3
LENGTHS = [0, 15, 16, 37, WIDTH * PAGE - 1, 5, 40]
"""Of what is cached: nothing, all but one place of a page, a full page, part of the third, all but one place of a row;
the last two have ended."""
IS_ACTIVE = [True, True, True, True, True, False, False]


def by_kernel(name: str) -> Callable[..., Any]:
    decode = (IMPLEMENTATIONS["cpu"] if name == "cpu" else interpreted(name)).decode
    assert decode is not None
    return decode


def expected_decode(q, k, v, keys, values, table, length, is_active):
    """The same by gathering and whole products."""
    page = np.where(is_active, table[np.arange(len(table)), length // PAGE], len(keys))
    keys, values = (x.at[page, :, length % PAGE].set(new, mode="drop") for x, new in ((keys, k), (values, v)))
    all_keys, all_values = (
        jnp.swapaxes(x[table], 1, 2).reshape(len(table), x.shape[1], -1, x.shape[-1]) for x in (keys, values)
    )
    mask = (np.arange(WIDTH * PAGE)[None] <= length[:, None])[:, None]
    return attention(q[:, None], all_keys, all_values, jnp.asarray(mask))[:, 0], keys, values


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("cpu", jnp.float32, 2e-6), *((name, jnp.float32, 2e-6) for name in KERNELS),
     *((name, jnp.bfloat16, 2e-2) for name in KERNELS)],
)  # fmt: skip
def test_a_kernel_gives_what_xla_gives_and_writes_only_the_new_tokens(name, dtype, tolerance, head_dim):
    """In bfloat16 the sums' order and the weights' rounding leave 1/128 of values near 1, hence 2e-2."""
    num_rows, num_kv_heads, num_pages = len(LENGTHS), 2, len(LENGTHS) * WIDTH + 3
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q = normal(num_rows, num_kv_heads * GROUP, head_dim)
    k, v = normal(num_rows, num_kv_heads, head_dim), normal(num_rows, num_kv_heads, head_dim)
    keys, values = (normal(num_pages, num_kv_heads, PAGE, head_dim) for _ in range(2))
    table = rng.permutation(num_pages)[: num_rows * WIDTH].reshape(num_rows, WIDTH).astype(np.int32)
    table[1, 1:] = table[0, 1:] = 0  # what is past a row's tokens names somebody else's page
    length, is_active = np.array(LENGTHS, np.int32), np.array(IS_ACTIVE)
    arguments = (q, k, v, keys, values, table, length, is_active)
    out, *cache = jax.jit(by_kernel(name))(*arguments)
    expected, *expected_cache = expected_decode(*arguments)
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[is_active], np.asarray(expected, np.float32)[is_active], atol=tolerance
    )
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for found, wanted in zip(cache, expected_cache, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_a_row_of_many_blocks_attends_on_a_cpu_as_exact_arithmetic_does():
    """700 tokens are three of its blocks; groups of 1, 5 and 8 query heads are parted differently."""
    rng, num_pages, length = np.random.default_rng(0), 60, 699
    table = rng.permutation(num_pages)[:44].reshape(1, 44).astype(np.int32)
    for group in (1, 5, 8):
        q = rng.normal(size=(1, 2 * group, 32)).astype(np.float32) * 3
        k, v = (rng.normal(size=(1, 2, 32)).astype(np.float32) for _ in range(2))
        keys, values = (rng.normal(size=(num_pages, 2, PAGE, 32)).astype(np.float32) for _ in range(2))
        found = jax.jit(by_kernel("cpu"))(q, k, v, keys, values, table, np.array([length], np.int32), np.array([True]))[
            0
        ]
        whole = []
        for pages, new in ((keys, k), (values, v)):
            rows = pages[table[0]].swapaxes(0, 1).reshape(2, -1, 32)[:, : length + 1].astype(np.float64)
            rows[:, length] = new[0]
            whole.append(rows)
        scores = np.einsum("kgh,ksh->kgs", q[0].reshape(2, group, 32).astype(np.float64), whole[0]) / np.sqrt(32)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("kgs,ksh->kgh", weights / weights.sum(-1, keepdims=True), whole[1])
        # A block adds up 256 rounded products: some 16 roundings of 6e-8 of values of about 1
        np.testing.assert_allclose(np.asarray(found[0]).reshape(wanted.shape), wanted, atol=2e-6, rtol=2e-6)


def test_a_score_that_is_not_a_number_makes_a_row_of_such_on_a_cpu():
    """Else weights that went to infinity would be sampled from without a word."""
    q = np.ones((2, 2, 16), np.float32)
    q[1, 1, 3] = np.nan
    new, pages = np.ones((2, 2, 16), np.float32), np.ones((4, 2, PAGE, 16), np.float32)
    table, length = np.arange(4, dtype=np.int32).reshape(2, 2), np.array([20, 20], np.int32)
    found = np.asarray(jax.jit(by_kernel("cpu"))(q, new, new, pages, pages, table, length, np.array([True, True]))[0])
    assert np.isnan(found[1, 1]).all()
    np.testing.assert_array_equal(found[0], np.ones((2, 16)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": [[0, 4]]}, "a token stands in no page"),
        ({"table": [[-1, 0]]}, "a token stands in no page"),
        ({"start": [2 * PAGE - 3]}, "a token stands in no page"),
        ({"start": [-1]}, "a token stands in no page"),
        ({"start": [0], "count": [5]}, "a token stands in no page"),
        ({"v": np.ones((1, 4, 1, 32), np.float32)}, "shapes do not go together"),
        ({"v": np.ones((1, 4, 2, 16), np.float32)}, "shapes do not go together"),
        ({"start": [0, 0]}, "shapes do not go together"),
    ],
)
def test_what_would_reach_outside_the_cache_is_an_error_on_a_cpu_and_not_a_crash(changes, message):
    ones = np.ones((1, 4, 1, 16), np.float32)
    arguments = {"table": [[3, 0]], "start": [PAGE], "count": [4], "v": ones, **changes}
    pages = np.ones((4, 1, PAGE, 16), np.float32)
    numbers = [np.array(arguments[name], np.int32) for name in ("table", "start", "count")]
    inputs = (np.ones((1, 4, 2, 16), np.float32), ones, arguments["v"], pages, pages, *numbers)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (inputs[0], pages, pages)]
    attend = jax.jit(kernel_call(ATTENTION, shapes, input_output_aliases={3: 1, 4: 2}))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(attend(*inputs))


@pytest.mark.parametrize("start", [0, 5, 16, 20])
@pytest.mark.parametrize("name", ["tpu", "cpu"])
def test_prompts_written_by_pages_or_by_the_kernel_are_those_that_xla_writes_and_attends_to(name, start):
    rng = np.random.default_rng(1)
    num_rows, length, num_pages = 3, 40, 20
    q, k, v = (jnp.asarray(rng.normal(size=(num_rows, length, heads, 16)), jnp.float32) for heads in (10, 2, 2))
    entry = tuple(jnp.asarray(rng.normal(size=(num_pages, 2, PAGE, 16)), jnp.float32) for _ in range(2))
    table = rng.permutation(num_pages)[: num_rows * WIDTH].reshape(num_rows, WIDTH).astype(np.int32)
    position = np.array([[start], [0], [3]]) + np.arange(length)
    is_real = np.arange(length) < np.array([[length], [11], [0]])
    found, expected = (
        prefill_attend(IMPLEMENTATIONS[each], None, *map(jnp.asarray, (table, position, is_real)))(q, k, v, entry)
        for each in (name, "xla")
    )
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(found[0][is_real], expected[0][is_real], atol=1e-6)


# Shared prompts, rows that end early, pages that run out, and more requests than slots.
SCARCE: dict[str, Any] = {"num_slots": 2, "max_context": 48, "page_tokens": 8, "cache_tokens": 48}
REQUESTS = [GenerateRequest(prompt(i // 2, 23 + 4 * (i // 2)), i, 3 + 9 * (i % 2), temperature=i % 2) for i in range(5)]


@functools.cache
def samples_of_xla():
    return generate_all(tiny_engine(None, attention="xla", products="xla", **SCARCE), REQUESTS)


@pytest.mark.parametrize("name", ["cpu", *KERNELS])
def test_an_engine_with_a_kernel_samples_what_one_with_xla_samples(name):
    engine = tiny_engine(None, attention="cpu" if name == "cpu" else interpreted(name), **SCARCE)
    assert_same_samples(generate_all(engine, REQUESTS), samples_of_xla())
    assert engine.stats()["sampler/num_shared_prompt_tokens"] > 0


KINDS = {"cpu": "cpu", "tpu": "TPU v5 lite", "gpu": "NVIDIA H200"}
FITTING = {"num_slots": 64, "max_context": 40_960, "page_tokens": None, "head_dim": 128, "dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("platform", "changes", "name", "page_tokens"),
    [
        ("cpu", {}, "xla", 16),
        ("cpu", {"dtype": jnp.float32}, "cpu", 16),
        ("cpu", {"dtype": jnp.float32, "head_dim": 12}, "xla", 16),
        ("tpu", {}, "tpu", 64),
        ("gpu", {}, "gpu", 16),
        ("gpu", {"page_tokens": 32}, "gpu", 32),
        ("tpu", {"head_dim": 64}, "xla", 16),
        ("tpu", {"page_tokens": 8}, "xla", 8),
        ("gpu", {"head_dim": 96}, "xla", 16),
    ],
)
def test_auto_is_the_kernel_of_the_platform_where_it_can_run(platform, changes, name, page_tokens):
    chosen = choose("auto", device(platform), **{**FITTING, **changes})
    assert (chosen.implementation.name, chosen.page_tokens) == (name, page_tokens)
    assert (chosen.why_not is None) == (name == platform)
    assert choose("xla", device(platform), **FITTING)[::2] == (IMPLEMENTATIONS["xla"], None)


def device(platform: str) -> SimpleNamespace:
    return SimpleNamespace(platform=platform, device_kind=KINDS[platform])


def test_a_gpu_that_pallas_does_not_know_decodes_by_xla():
    other = SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce GTX 1080")
    why_not = "gpu is compiled by Pallas, which does not know the GPU 'NVIDIA GeForce GTX 1080'"
    assert choose("auto", other, **FITTING) == (IMPLEMENTATIONS["xla"], 16, why_not)
    with pytest.raises(UsageError, match="does not know the GPU 'NVIDIA GeForce GTX 1080'; or set it to auto"):
        choose("gpu", other, **FITTING)


@pytest.mark.parametrize(
    ("wanted", "platform", "changes", "message"),
    [
        ("tpu", "cpu", {}, "sampler.attention = tpu runs on tpu, and the devices here are cpu; or set it to auto"),
        ("gpu", "tpu", {}, "sampler.attention = gpu runs on gpu, and the devices here are tpu"),
        ("tpu", "tpu", {"head_dim": 64}, "tpu needs a head size that is a multiple of 128, and the model's is 64"),
        ("tpu", "tpu", {"page_tokens": 24}, "pages of a multiple of 16 tokens, and sampler.page_tokens = 24"),
        ("tpu", "tpu", {"page_tokens": 16}, "make 655360; raise sampler.page_tokens"),
        ("gpu", "gpu", {"head_dim": 96}, "a power of 2 and at least 16, and the model's is 96"),
        ("cpu", "gpu", {}, "sampler.attention = cpu runs on cpu, and the devices here are gpu"),
        ("cpu", "cpu", {}, "sampler.attention = cpu computes in float32, and model.compute_dtype is bfloat16"),
        (
            "cpu",
            "cpu",
            {"dtype": jnp.float32, "head_dim": 12},
            "cpu needs a head size that is a multiple of [0-9]+, and",
        ),
        ("cudnn", "gpu", {}, "sampler.attention = cudnn is none of auto, tpu, gpu, cpu, xla"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused_by_name(wanted, platform, changes, message):
    with pytest.raises(UsageError, match=message):
        choose(wanted, device(platform), **{**FITTING, **changes})


def test_an_engine_on_cpu_refuses_a_kernel_of_another_platform():
    with pytest.raises(UsageError, match="runs on gpu, and the devices here are cpu"):
        tiny_engine(attention="gpu")
