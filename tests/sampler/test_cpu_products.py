"""Products by the C kernel against exact ones, and which products a sampler takes."""

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sampler import SIZES, assert_same_samples, generate_all, prompt

from jaxsp.config import UsageError
from jaxsp.model.decoder import PLAIN
from jaxsp.sampler.cpu_kernels import Kernels, load_kernels
from jaxsp.sampler.cpu_products import choose_products, multiply
from jaxsp.sampler.engine import make_engine
from jaxsp.sampler.weight_sync import in_panels
from jaxsp.trajectory import GenerateRequest
from tests.tiny import random_params

CPU = SimpleNamespace(platform="cpu")


def kernels() -> Kernels:
    found = load_kernels()
    assert isinstance(found, Kernels), f"the kernel {found}"
    return found


def product(x: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
    panels = [in_panels(jnp.asarray(each), 1, kernels().panel) for each in weights]
    return [np.asarray(y) for y in _multiply(x, panels, tuple(each.shape[1] for each in weights))]


@functools.partial(jax.jit, static_argnums=2)
def _multiply(x, panels, num_out):
    return multiply(x, panels, num_out)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40), num_in=st.integers(1, 1400),
    num_out=st.lists(st.integers(1, 150), min_size=1, max_size=3),
)  # fmt: skip
def test_products_are_exact_within_the_rounding_of_their_sums(num_rows, num_in, num_out):
    x, weights = normal(num_in, num_rows, num_in), [normal(width, num_in, width) for width in num_out]
    for found, w in zip(product(x, *weights), weights, strict=True):
        wanted = x.astype(np.float64) @ w
        # Each of at most 640 additions in a block, and of the blocks, rounds a sum of at most these magnitudes.
        bound = np.abs(x).astype(np.float64) @ np.abs(w) * (min(num_in, 640) + 3) * np.finfo(np.float32).eps / 2
        assert (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize("num_rows", [2, 3, 5, 12, 13, 31, 200, 400])
def test_a_row_gives_the_same_bits_alone_and_among_others(num_rows):
    x, w = normal(0, num_rows, 700), normal(1, 700, 90)
    (together,) = product(x, w)
    for row in (0, num_rows // 2, num_rows - 1):
        np.testing.assert_array_equal(product(x[row : row + 1], w)[0][0], together[row])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 12, 13, 31, 200])
def test_weights_in_bfloat16_give_the_bits_that_their_values_in_float32_do(num_rows):
    x, weights = normal(0, num_rows, 700), [jnp.asarray(normal(width, 700, width), jnp.bfloat16) for width in (90, 33)]
    widened = product(x, *(np.asarray(each, np.float32) for each in weights))
    panels = [in_panels(each, 1, kernels().panel) for each in weights]
    assert {each.dtype for each in panels} == {jnp.bfloat16.dtype}
    for found, expected in zip(_multiply(x, panels, (90, 33)), widened, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_calls_from_several_threads_at_once_do_not_meet():
    cases = [(normal(seed, 1 + seed % 20, 600), normal(seed + 50, 600, 333)) for seed in range(12)]
    expected = [product(*case)[0] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: [product(*case)[0] for case in cases], range(8)):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_number_that_is_not_finite_stays_so():
    x, w = normal(0, 3, 50), normal(1, 50, 40)
    x[1, 7], w[3, 2] = np.nan, np.inf
    (found,) = product(x, w)
    assert np.isnan(found[1]).all()
    assert not np.isfinite(found[:, 2]).any()
    assert np.isfinite(found[[0, 2]][:, 3:]).all()


def test_shapes_that_do_not_go_together_are_an_error_and_not_a_crash():
    w = in_panels(jnp.ones((8, 8)), 1, kernels().panel)
    with pytest.raises(jax.errors.JaxRuntimeError, match="x, w and y do not go together"):
        _multiply(np.ones((2, 8), np.float32), [w], (1000,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="x, w and y do not go together"):
        _multiply(np.ones((2, 8), np.float32), [w.astype(jnp.float16)], (8,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="x, w and y do not go together"):  # not one type
        _multiply(np.ones((2, 8), np.float32), [w, w.astype(jnp.bfloat16)], (8, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="x, w and y do not go together"):  # a sum of nothing
        _multiply(np.ones((2, 0), np.float32), [w[:, :0]], (8,))


def test_panels_hold_the_columns_in_their_order_and_zeros_after_them():
    kernel = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    panels = np.asarray(in_panels(jnp.asarray(kernel), 2, 4))
    assert panels.shape == (2, 6, 4)
    np.testing.assert_array_equal(panels[0], kernel.reshape(6, 5)[:, :4])
    np.testing.assert_array_equal(panels[1], np.pad(kernel.reshape(6, 5)[:, 4:], ((0, 0), (0, 3))))


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        dataclasses.replace(SIZES, has_tied_embeddings=False, has_attention_bias=True, has_qk_norm=False),
        dataclasses.replace(SIZES, vocab_size=157, mlp_dim=50, num_heads=6, embed_dim=20),
    ],
    ids=["tied", "untied with biases", "widths that fill no panel"],
)
def test_an_engine_samples_the_same_tokens_by_either_products(sizes):
    requests = [GenerateRequest(prompt(i, 9), i, 12, temperature=i / 2) for i in range(3)]
    completions = []
    for products in ("cpu", "xla"):
        engine = make_engine(
            sizes, num_slots=4, max_context=64, decode_chunk=4, prefill_tokens=32, compute_dtype=jnp.float32,
            decode_text=str, products=products,
        )  # fmt: skip
        engine.load(random_params(sizes, 0), 3)
        completions.append(generate_all(engine, requests))
    assert_same_samples(*completions)


@pytest.mark.parametrize("products", ["cpu", "xla"])
def test_weights_kept_in_bfloat16_sample_as_their_rounded_values_in_float32_do(products):
    exact = random_params(SIZES, 0)
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key == "scale" else leaf.astype(jnp.bfloat16).astype(jnp.float32), exact
    )
    requests = [GenerateRequest(prompt(i, 9), i, 12, temperature=i / 2) for i in range(3)]
    completions = []
    for params, weight_dtype in ((exact, jnp.bfloat16), (rounded, None)):
        engine = make_engine(
            SIZES, num_slots=4, max_context=64, decode_chunk=4, prefill_tokens=32, compute_dtype=jnp.float32,
            decode_text=str, products=products, weight_dtype=weight_dtype,
        )  # fmt: skip
        engine.load(params, 3)
        completions.append(generate_all(engine, requests))
    assert_same_samples(*completions)


def test_auto_is_the_kernel_on_one_cpu_in_float32_and_xla_elsewhere():
    chosen = choose_products("auto", CPU, 1, jnp.float32)
    assert (chosen.name, chosen.panel, chosen.why_not) == ("cpu", kernels().panel, None)
    for device, num_devices, dtype in (
        (SimpleNamespace(platform="gpu"), 1, jnp.float32), (CPU, 2, jnp.float32), (CPU, 1, jnp.bfloat16),
    ):  # fmt: skip
        chosen = choose_products("auto", device, num_devices, dtype)
        assert (chosen.name, chosen.panel, chosen.products) == ("xla", None, PLAIN)
    assert choose_products("xla", CPU, 1, jnp.float32).products is PLAIN


@pytest.mark.parametrize(
    ("device", "num_devices", "dtype", "message"),
    [
        ("tpu", 1, jnp.float32, "runs on CPUs, and the devices here are tpu; or set it to auto"),
        ("cpu", 4, jnp.float32, "runs on one device, and the sampler has 4; or set it to auto"),
        ("cpu", 1, jnp.bfloat16, "multiplies float32, and model.compute_dtype is bfloat16; or set it to auto"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(device, num_devices, dtype, message):
    with pytest.raises(UsageError) as refused:
        choose_products("cpu", SimpleNamespace(platform=device), num_devices, dtype)
    assert str(refused.value) == f"sampler.products = cpu {message}"
    with pytest.raises(UsageError, match=r"sampler\.products = mkl is none of auto, cpu, xla"):
        choose_products("mkl", CPU, 1, jnp.float32)


WITHOUT_KERNELS = """
import jax.numpy as jnp, jax
from jaxsp.config import UsageError
from jaxsp.sampler.cpu_products import choose_products
from tiny_sampler import generate_all, prompt, tiny_engine
from jaxsp.trajectory import GenerateRequest
chosen = choose_products("auto", jax.devices()[0], 1, jnp.float32)
print(chosen.name, "|", chosen.why_not)
print(len(generate_all(tiny_engine(), [GenerateRequest(prompt(0, 5), 0, 4)])[0].tokens))
"""


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "needs a C compiler, and PATH has no no-such-compiler (the variable CC names another)"),
        ("false", "was not compiled by /"),
    ],
)
def test_without_a_compiler_that_works_xla_samples_and_the_reason_can_be_read(tmp_path, compiler, reason):
    here = os.path.dirname(__file__)
    environment = {
        **os.environ, "CC": compiler, "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([here, os.path.dirname(os.path.dirname(here))]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    chosen, num_tokens = done.stdout.splitlines()
    assert chosen.startswith(f"xla | {reason}")
    assert num_tokens == "4"


def load_in_a_process(**changes: str | None) -> subprocess.CompletedProcess[str]:
    """With these environment variables, or without those that are None."""
    program = "from jaxsp.sampler.cpu_kernels import load_kernels; print(load_kernels())"
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_kernels_are_compiled_once_for_a_source_and_a_compiler_with_its_options(tmp_path):
    files: list[set[tuple[str, int]]] = []
    for compiler in ("cc", "cc", "env cc -g0"):
        done = load_in_a_process(XDG_CACHE_HOME=str(tmp_path), CC=compiler)
        assert (done.returncode, done.stdout) == (0, f"{kernels()}\n"), done.stderr
        files.append({(path.name, path.stat().st_ino) for path in (tmp_path / "jaxsp").iterdir()})
    assert len(files[0]) == 1 and files[1] == files[0]
    assert len(files[2]) == 2 and files[2] > files[1]


def test_kernels_are_compiled_also_where_nothing_can_be_kept(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for places in ({"XDG_CACHE_HOME": str(file)}, {"XDG_CACHE_HOME": None, "HOME": "~"}):  # "~" is nobody's home
        done = load_in_a_process(TMPDIR=str(tmp_path), **places)
        assert (done.returncode, done.stdout) == (0, f"{kernels()}\n"), done.stderr
    assert list(tmp_path.iterdir()) == [file]


NARROWER = """
import jax.numpy as jnp
import test_cpu_products, test_paged_attention
print(test_cpu_products.kernels().lanes)
for num_rows in (5, 13, 31):
    test_cpu_products.test_weights_in_bfloat16_give_the_bits_that_their_values_in_float32_do(num_rows)
    test_cpu_products.test_a_row_gives_the_same_bits_alone_and_among_others(num_rows)
test_cpu_products.test_products_are_exact_within_the_rounding_of_their_sums()
test_paged_attention.test_a_row_of_many_blocks_attends_on_a_cpu_as_exact_arithmetic_does()
test_paged_attention.test_a_kernel_gives_what_xla_gives_and_writes_only_the_new_tokens("cpu", jnp.float32, 2e-6, 64)
"""


@pytest.mark.parametrize(
    ("processor", "lanes"), [("x86-64", 4), ("haswell", 8)] if platform.machine() == "x86_64" else [("native", 4)]
)
def test_processors_with_narrower_vectors_get_the_same_answers(tmp_path, processor, lanes):
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec cc $(echo "$@" | sed s/-march=native/-march={processor}/)\n')
    compiler.chmod(0o755)
    here = os.path.dirname(__file__)
    environment = {
        **os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([here, os.path.dirname(os.path.dirname(here))]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", NARROWER], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{lanes}\n"), done.stderr
