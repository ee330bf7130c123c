"""Where each parameter stands in a weight file: one table for reading and writing, for Hugging Face and GGUF names.

Files hold one matrix `[out, in]` per layer and projection; parameters hold kernels `[in, out]` with heads split and all
layers stacked, and all experts. A layout says both at once: in `(N H) D -> D N H` the file's rows are N heads of H.

Legend: D embedding, N heads (query or kv), H head size, F mlp, E experts, V vocabulary, C labels.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxsp.config import UserError
from jaxsp.model.decoder import KEPT_IN_FLOAT32, Params, abstract_params
from jaxsp.model.sizes import DecoderSizes

Naming = Literal["hf", "gguf"]
Bounds = tuple[tuple[int, int], ...]
"""`(start, stop)` along each axis."""

ReadPart = Callable[[str, slice, slice], np.ndarray]
"""`read(name, rows, columns)` gives that part of a file's tensor; `columns` is `slice(None)` where it has one axis.

`rows` always holds whole heads where the rows are heads."""

_CHUNK_ELEMENTS = 4 * 2**20
"""A tensor is read in parts of about this many elements, which bounds what a load holds beside its result."""


@dataclass(frozen=True)
class TensorRule:
    """One parameter. `path` is its keys below the root or below `layers`; names hold `{i}` where layers have one each,
    and `{e}` where experts do.

    `gguf` is None where the format has no such tensor for these decoders.
    """

    path: tuple[str, ...]
    hf: str
    gguf: str | None
    layout: str

    @property
    def is_per_layer(self) -> bool:
        return "{i}" in self.hf

    @property
    def is_per_expert(self) -> bool:
        return "{e}" in self.hf

    @property
    def num_stacks(self) -> int:
        """Leading axes of the parameter that a file has several tensors for: of layers, and of experts."""
        return self.is_per_layer + self.is_per_expert

    def name(self, naming: Naming, layer: int, expert: int = 0) -> str:
        template = self.hf if naming == "hf" else self.gguf
        if template is None:
            raise ValueError(f"{'.'.join(self.path)} has no name in {naming} files")
        return template.format(i=layer, e=expert)

    def file_axes(self) -> list[list[str]]:
        """The letters of the file's axes, a merged axis as several: `[["N", "H"], ["D"]]`."""
        left = self.layout.split("->")[0]
        return [(merged or single).split() for merged, single in re.findall(r"\((.*?)\)|(\w)", left)]

    def own_axes(self) -> list[str]:
        return self.layout.split("->")[1].split()

    def file_shape(self, own_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in a file of a parameter of one layer's `own_shape`."""
        sizes = dict(zip(self.own_axes(), own_shape, strict=True))
        return tuple(int(np.prod([sizes[letter] for letter in axis])) for axis in self.file_axes())

    def to_file(self, own: np.ndarray) -> np.ndarray:
        """One layer's parameter as a file holds it, contiguous."""
        letters = [letter for axis in self.file_axes() for letter in axis]
        order = [self.own_axes().index(letter) for letter in letters]
        return np.ascontiguousarray(own.transpose(order).reshape(self.file_shape(own.shape)))


_HEADS, _OUT = "(N H) D -> D N H", "D (N H) -> N H D"
TENSORS = (
    TensorRule(("embed",), "model.embed_tokens.weight", "token_embd.weight", "V D -> V D"),
    TensorRule(("final_norm", "scale"), "model.norm.weight", "output_norm.weight", "D -> D"),
    TensorRule(("lm_head", "kernel"), "lm_head.weight", "output.weight", "V D -> D V"),
    TensorRule(("score", "kernel"), "score.weight", None, "C D -> D C"),
    *(
        TensorRule(path, f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}", layout)
        for path, hf, gguf, layout in (
            (("attention_norm", "scale"), "input_layernorm.weight", "attn_norm.weight", "D -> D"),
            (("q", "kernel"), "self_attn.q_proj.weight", "attn_q.weight", _HEADS),
            (("k", "kernel"), "self_attn.k_proj.weight", "attn_k.weight", _HEADS),
            (("v", "kernel"), "self_attn.v_proj.weight", "attn_v.weight", _HEADS),
            (("o", "kernel"), "self_attn.o_proj.weight", "attn_output.weight", _OUT),
            (("q", "bias"), "self_attn.q_proj.bias", "attn_q.bias", "(N H) -> N H"),
            (("k", "bias"), "self_attn.k_proj.bias", "attn_k.bias", "(N H) -> N H"),
            (("v", "bias"), "self_attn.v_proj.bias", "attn_v.bias", "(N H) -> N H"),
            (("o", "bias"), "self_attn.o_proj.bias", "attn_output.bias", "D -> D"),
            (("q_norm", "scale"), "self_attn.q_norm.weight", "attn_q_norm.weight", "H -> H"),
            (("k_norm", "scale"), "self_attn.k_norm.weight", "attn_k_norm.weight", "H -> H"),
            (("mlp_norm", "scale"), "post_attention_layernorm.weight", "ffn_norm.weight", "D -> D"),
            (("gate", "kernel"), "mlp.gate_proj.weight", "ffn_gate.weight", "F D -> D F"),
            (("up", "kernel"), "mlp.up_proj.weight", "ffn_up.weight", "F D -> D F"),
            (("down", "kernel"), "mlp.down_proj.weight", "ffn_down.weight", "D F -> F D"),
        )
    ),
    *(
        TensorRule(path, f"model.layers.{{i}}.mlp.{hf}", None, layout)
        for path, hf, layout in (
            (("router",), "gate.weight", "E D -> D E"),
            (("experts", "gate"), "experts.{e}.gate_proj.weight", "F D -> D F"),
            (("experts", "up"), "experts.{e}.up_proj.weight", "F D -> D F"),
            (("experts", "down"), "experts.{e}.down_proj.weight", "D F -> F D"),
        )
    ),
)
_BY_PATH = {(rule.is_per_layer, rule.path): rule for rule in TENSORS}


def rule_of(path: tuple[Any, ...]) -> TensorRule:
    """The rule of a parameter by its JAX key path from the root."""
    keys = tuple(str(part.key) for part in path)
    is_per_layer = keys[0] == "layers"
    return _BY_PATH[is_per_layer, keys[1:] if is_per_layer else keys]


def expected_tensors(sizes: DecoderSizes, naming: Naming) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a file of such a model must hold, layer by layer."""
    expected = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(sizes)):
        rule = rule_of(path)
        for _, name in tensors_of(rule, sizes, naming, [(0, size) for size in leaf.shape]):
            expected[name] = rule.file_shape(leaf.shape[rule.num_stacks :])
    return expected


def tensors_of(
    rule: TensorRule, sizes: DecoderSizes, naming: Naming, bounds: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """The tensors that `bounds` of a parameter take part in: each one's place along the stacks, and its name."""
    layers = sizes.layers_with(rule.path[0])
    for place in itertools.product(*(range(*bound) for bound in bounds[: rule.num_stacks])):
        numbers = (layers[place[0]], *place[1:]) if place else (0,)
        yield place, rule.name(naming, *numbers)


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], file_of: Callable[[str], object]
) -> None:
    """Raises `UserError` naming the first tensor that is missing, unknown or of another shape, and its file."""
    for name, shape in found.items():
        if name not in expected:
            raise UserError(f"{file_of(name)}: tensor {name} {list(shape)} belongs to no part of this decoder")
        if shape != expected[name]:
            wanted = list(expected[name])
            raise UserError(f"{file_of(name)}: tensor {name} has shape {list(shape)}, the config asks for {wanted}")
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{file_of(name)}: tensor {name} {list(shape)} is missing")


def assemble(sizes: DecoderSizes, naming: Naming, read: ReadPart, *, dtype: Any, shardings: Params | None) -> Params:
    """The parameters, each device's shard read by itself and straight into the buffer that becomes the shard.

    They are cast to `dtype`, but norm scales and routers to float32, in which the decoder applies them and training
    keeps them.
    `shardings` has the shape of `init_params`; without it everything lies on the first local device. Host memory holds
    the shards of one parameter (all layers) and one part of a file's tensor at a time.
    """
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding = first) -> jax.Array:
        """One parameter, read from the file where its rule says."""
        rule = rule_of(path)
        own_dtype = np.float32 if rule.path[-1] in KEPT_IN_FLOAT32 else dtype
        buffers: dict[Bounds, np.ndarray] = {}

        def shard(index: Any) -> np.ndarray:
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
            if bounds not in buffers:  # replicas share one buffer
                buffers[bounds] = _aligned_empty(tuple(stop - start for start, stop in bounds), own_dtype)
                num_stacks = rule.num_stacks
                for place, name in tensors_of(rule, sizes, naming, bounds):
                    slot = tuple(number - start for number, (start, _) in zip(place, bounds, strict=False))
                    part = buffers[bounds][slot]
                    _fill(part, rule, leaf.shape[num_stacks:], bounds[num_stacks:], name, read)
            return buffers[bounds]

        array = jax.make_array_from_callback(leaf.shape, sharding, shard)
        # Transfers are asynchronous: without waiting, buffers of several parameters would pile up.
        return array.block_until_ready()

    abstract = abstract_params(sizes)
    trees = (abstract,) if shardings is None else (abstract, shardings)
    return jax.tree_util.tree_map_with_path(load, *trees)


def _fill(out: np.ndarray, rule: TensorRule, shape: tuple[int, ...], bounds: Bounds, name: str, read: ReadPart) -> None:
    """Writes the part `bounds` of one layer's parameter into `out`, a block of file rows at a time."""
    own = rule.own_axes()
    size, bound = dict(zip(own, shape, strict=True)), dict(zip(own, bounds, strict=True))
    file_axes = rule.file_axes()
    letters = [letter for axis in file_axes for letter in axis]
    # Only a file axis's first letter is cut while reading; its other letters are cut from what was read.
    inner = [int(np.prod([size[letter] for letter in axis[1:]])) for axis in file_axes]
    columns = slice(None)
    if len(file_axes) == 2:
        start, stop = bound[file_axes[1][0]]
        columns = slice(start * inner[1], stop * inner[1])
    lead = letters[0]
    width = inner[0] * (1 if len(file_axes) == 1 else columns.stop - columns.start)
    step = max(1, _CHUNK_ELEMENTS // width)
    leads = {axis[0] for axis in file_axes}
    for start in range(*bound[lead], step):
        stop = min(start + step, bound[lead][1])
        part = read(name, slice(start * inner[0], stop * inner[0]), columns)
        extents = [
            stop - start if letter == lead else bound[letter][1] - bound[letter][0] if letter in leads else size[letter]
            for letter in letters
        ]
        part = part.reshape(extents)[tuple(slice(None) if c in leads else slice(*bound[c]) for c in letters)]
        part = part.transpose([letters.index(letter) for letter in own])
        offset = bound[lead][0]
        out[tuple(slice(start - offset, stop - offset) if c == lead else slice(None) for c in own)] = part


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which the CPU backend adopts instead of copying."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)
