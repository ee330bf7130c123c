"""What the machine can do, measured in the same run: memory bandwidth, and products of the model's shapes.

Each number is the best of a few passes of the faster of two programs, NumPy on all cores and XLA.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench.limits import FLOAT_BYTES, Product, products
from tests.bench.worker import Place, Reply, serve
from tests.bench.workloads import Workload

_PASSES = 4
_SQUARE = 2048


class Machine:
    """Arrays as large as all weights of the model, and matrices of its shapes."""

    def __init__(self, place: Place) -> None:
        self._products = products(json.loads((place.model_dir / "config.json").read_text()))
        self._num_threads = place.num_threads

    def handle(self, verb: str, workload: Workload) -> Reply:
        """Nothing needs preparation but compilation, and the best pass is one without."""
        rows = len(workload.requests)
        if verb == "prepare" or not workload.is_uniform:
            return {"seconds": 0.0}
        started = time.perf_counter()
        found = {**self._bandwidth(), **self._throughput(rows)}
        return {"seconds": time.perf_counter() - started, "details": found}

    def _bandwidth(self) -> dict[str, float]:
        """Bytes read and written per second, of arrays as large as all weights."""
        size = sum(product.num_weights for product in self._products)
        return {**_numpy_bandwidth(size, self._num_threads), **_xla_bandwidth(size)}

    def _throughput(self, rows: int) -> dict[str, float]:
        """FLOP/s of the model's products with `rows` rows, and of large square ones."""
        seconds = [min(_product_s(product, rows)) for product in self._products]
        flops = [2 * rows * product.num_weights for product in self._products]
        by_shape = {
            f"{product.num_in}x{product.num_out}_flops_per_s": count / time_s
            for product, count, time_s in zip(self._products, flops, seconds, strict=True)
        }
        square = Product(_SQUARE, _SQUARE, 1)
        square_flops = 2 * _SQUARE * square.num_weights
        return {
            **by_shape,
            "products_flops_per_s": sum(flops) / sum(seconds),
            "square_flops_per_s": square_flops / min(_product_s(square, _SQUARE)),
        }


def _numpy_bandwidth(size: int, num_threads: int) -> dict[str, float]:
    source, target = (np.array_split(np.ones(size, np.float32), num_threads) for _ in range(2))
    num_bytes, one = size * FLOAT_BYTES, np.float32(1.0)
    with ThreadPoolExecutor(num_threads) as pool:
        copy_s = _best(lambda: list(pool.map(np.copyto, target, source)))
        update_s = _best(lambda: list(pool.map(lambda part: np.multiply(part, one, out=part), target)))
        read_s = _best(lambda: list(pool.map(np.max, source)))
    return {
        "copy_numpy_bytes_per_s": 2 * num_bytes / copy_s,
        "update_numpy_bytes_per_s": 2 * num_bytes / update_s,
        "read_numpy_bytes_per_s": num_bytes / read_s,
    }


def _xla_bandwidth(size: int) -> dict[str, float]:
    num_bytes = size * FLOAT_BYTES
    copy = jax.jit(lambda x: x + 1)
    update = jax.jit(lambda x, y: x + 2 * y, donate_argnums=0)
    y = jnp.ones(size)
    copy_s = _best(lambda: copy(y))
    kept = [jnp.zeros(size)]

    def update_in_place() -> Any:
        kept.append(update(kept.pop(), y))
        return kept

    return {
        "copy_xla_bytes_per_s": 2 * num_bytes / copy_s,
        "update_xla_bytes_per_s": 3 * num_bytes / _best(update_in_place),
    }


def _product_s(product: Product, rows: int) -> tuple[float, float]:
    """Seconds of a product by XLA and by NumPy. Every one of its `count` has weights of its own, as in the model."""
    shape = (product.num_out, product.num_in) if product.is_table else (product.num_in, product.num_out)
    x = np.random.default_rng(0).standard_normal((rows, product.num_in), np.float32)
    weights = [np.full(shape, 0.5, np.float32) for _ in range(product.count)]
    by_numpy = _best(lambda: [x @ (each.T if product.is_table else each) for each in weights])
    on_device = [jnp.asarray(each) for each in weights]
    axis = 1 if product.is_table else 0
    xla = jax.jit(lambda x, weights: [jax.lax.dot_general(x, each, (((1,), (axis,)), ((), ()))) for each in weights])
    return _best(lambda: xla(x, on_device)), by_numpy


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest pass; the first one, in which XLA compiles, does not count."""
    seconds = []
    for _ in range(_PASSES + 1):
        started = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


if __name__ == "__main__":
    serve(lambda place: Machine(place).handle, ["numpy", "jax"])
