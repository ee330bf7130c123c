"""What a decode step costs at least: the bytes it must read and the products it must compute, from a model's config.

Legend: D embedding, N query heads, K kv heads, H head size, F mlp, V vocabulary; all numbers are float32's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Product:
    """`[rows, num_in] @ [num_in, num_out]`, `count` times with other weights. `is_table`: the weights lie as [V, D]."""

    num_in: int
    num_out: int
    count: int
    is_table: bool = False

    @property
    def num_weights(self) -> int:
        return self.num_in * self.num_out * self.count


def products(config: Mapping[str, Any]) -> list[Product]:
    """All products of a decode step but attention's own, equal shapes together. The tied head counts once."""
    embed, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"] * config["head_dim"], _kv_dim(config)
    return [
        Product(embed, heads, layers),  # q
        Product(embed, kv_heads, 2 * layers),  # k, v
        Product(heads, embed, layers),  # o
        Product(embed, mlp, 2 * layers),  # gate, up
        Product(mlp, embed, layers),  # down
        Product(embed, config["vocab_size"], 1, is_table=True),
    ]


def step_bytes(config: Mapping[str, Any], rows: int, context: float) -> float:
    """Bytes that a step must read: every weight once, and the keys and values of `context` tokens of each row."""
    weights = sum(product.num_weights for product in products(config)) * FLOAT_BYTES
    return weights + rows * context * 2 * config["num_hidden_layers"] * _kv_dim(config) * FLOAT_BYTES


def step_flops(config: Mapping[str, Any], rows: int, context: float) -> float:
    """Multiplications and additions of a step, attention's included."""
    weights = sum(product.num_weights for product in products(config))
    heads = config["num_attention_heads"] * config["head_dim"]
    return 2 * rows * (weights + 2 * context * config["num_hidden_layers"] * heads)


@dataclass(frozen=True)
class Limits:
    """Tokens/s of a batch that the machine would allow if nothing else took time."""

    bandwidth: float
    """By the best of copying and updating in place."""
    read: float
    """By reading alone, which is what most of a decode step does."""
    matrix: float
    """By the products of the model's own shapes."""
    square: float
    """By products of large square matrices."""


def limits(config: Mapping[str, Any], rows: int, context: float, measured: Mapping[str, float]) -> Limits:
    """`measured` is what `machine_worker` replies: `*_bytes_per_s`, `*_flops_per_s`."""
    steps_by_bytes = rows / step_bytes(config, rows, context)
    steps_by_flops = rows / step_flops(config, rows, context)
    moved = max(value for name, value in measured.items() if name.startswith(("copy", "update")))
    read = max(value for name, value in measured.items() if name.startswith("read"))
    return Limits(
        bandwidth=moved * steps_by_bytes,
        read=read * steps_by_bytes,
        matrix=measured["products_flops_per_s"] * steps_by_flops,
        square=measured["square_flops_per_s"] * steps_by_flops,
    )


def _kv_dim(config: Mapping[str, Any]) -> int:
    return config["num_key_value_heads"] * config["head_dim"]
