"""What a checkpoint's `config.json` says about a decoder, and a refusal by name of what it says that we do not know."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxsp.config import UserError


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency-dependent stretching of the rotary wavelengths, as Llama 3.1 and later do it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Rope:
    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class Moe:
    """Experts in place of the one mlp of a layer."""

    num_experts: int
    num_chosen: int
    """Experts of each token."""
    mlp_dim: int
    """Of one expert."""
    normalises_weights: bool
    """Whether the probabilities of a token's experts are divided by their sum."""
    sparse_layers: tuple[int, ...]
    """The layers that have experts, from 0 on; the others have an mlp."""


@dataclass(frozen=True)
class DecoderSizes:
    """Every number that shapes a decoder. `num_labels` > 0 adds a bias-free score head and drops the language head."""

    model_type: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_positions: int
    has_tied_embeddings: bool
    has_qk_norm: bool
    has_attention_bias: bool = False
    num_labels: int = 0
    moe: Moe | None = None

    def layers_with(self, part: str) -> range | tuple[int, ...]:
        """The layers that have this part (`q`, `experts`, ...), in whose order its parameters are stacked."""
        sparse = () if self.moe is None else self.moe.sparse_layers
        if part in ("router", "experts"):
            return sparse
        if part in ("gate", "up", "down"):
            return tuple(layer for layer in range(self.num_layers) if layer not in sparse)
        return range(self.num_layers)

    @property
    def has_equal_layers(self) -> bool:
        return self.moe is None or len(self.moe.sparse_layers) == self.num_layers


# Attributes that change no number of a forward pass without dropout.
_INERT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "attention_dropout",
    "classifier_dropout", "_name_or_path", "name_or_path", "id2label", "label2id", "problem_type", "return_dict",
    "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder",
    "add_cross_attention", "max_window_layers", "_attn_implementation_autoset", "is_llama_config",
    "transformers.js_config", "torchscript", "use_bfloat16", "task_specific_params", "finetuning_task",
    "tokenizer_class", "prefix", "unsloth_fixed", "unsloth_version",
}  # fmt: skip

_READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "num_labels",
}  # fmt: skip

_READ_OF_MOE = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
# They add a loss for training, whose coefficient is the learner's here, and outputs; no number of a forward pass.
_INERT_OF_MOE = {"router_aux_loss_coef", "output_router_logits"}

# Attributes that would change the numbers, with the only values under which they do not.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "quantization": (None,),
}

_MODEL_TYPES = {"qwen3": True, "qwen3_moe": True, "llama": False}
"""Model type to whether queries and keys are RMS-normalised per head before the rotation."""

_MOE_TYPE = "qwen3_moe"


def sizes_from_hf_config(config: Mapping[str, Any], source: str = "config.json") -> DecoderSizes:
    """The sizes that `config` (a Hugging Face `config.json`) describes.

    Raises `UserError` naming the attribute when one is missing, or changes the numbers in a way this decoder does not
    implement: a silent default there would give plausible and wrong logits.
    """

    def refuse(name: str, why: str) -> UserError:
        return UserError(f"{source}: {name} = {config.get(name)!r} {why}")

    _refuse_what_is_not_implemented(config, refuse)
    model_type = config["model_type"]

    def number(name: str) -> Any:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise refuse(name, "is not a positive number, and the decoder needs one")
        return value

    def count(name: str) -> int:
        if not isinstance(number(name), int):
            raise refuse(name, "is not a whole number")
        return config[name]

    def optional_count(name: str, otherwise: int) -> int:
        """Llama configs may leave these two out; Qwen3's have defaults that do not follow from its other sizes."""
        if name not in config and model_type != "llama":
            raise refuse(name, "is missing, and cannot be guessed")
        return otherwise if config.get(name) is None else count(name)

    num_heads = count("num_attention_heads")
    num_kv_heads = optional_count("num_key_value_heads", num_heads)
    head_dim = optional_count("head_dim", count("hidden_size") // num_heads)
    if num_heads % num_kv_heads:
        raise refuse("num_key_value_heads", f"does not divide num_attention_heads = {num_heads}")
    if head_dim % 2:
        raise refuse("head_dim", f"gives heads of {head_dim}; rotary embeddings need an even size")
    num_layers = count("num_hidden_layers")
    has_score_head = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())
    return DecoderSizes(
        model_type=model_type,
        vocab_size=count("vocab_size"),
        embed_dim=count("hidden_size"),
        mlp_dim=count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=float(number("rms_norm_eps")),
        rope=_rope_from_config(config, source),
        max_positions=count("max_position_embeddings"),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qk_norm=_MODEL_TYPES[model_type],
        has_attention_bias=bool(config.get("attention_bias", False)),
        num_labels=_num_labels(config) if has_score_head else 0,
        moe=_moe_from_config(config, num_layers, count, refuse) if model_type == _MOE_TYPE else None,
    )


def _moe_from_config(
    config: Mapping[str, Any], num_layers: int, count: Callable[[str], int], refuse: Callable[[str, str], UserError]
) -> Moe | None:
    """None where no layer has experts. `num_experts` is the hub's name, `num_local_experts` what transformers 5
    writes; the last two attributes may be left out, as transformers lets them be."""
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    if len(names) == 2 and config["num_experts"] != config["num_local_experts"]:
        raise refuse("num_experts", f"differs from num_local_experts = {config['num_local_experts']!r}")
    num_experts = count(names[0] if names else "num_experts")
    num_chosen = count("num_experts_per_tok")
    if num_chosen > num_experts:
        raise refuse("num_experts_per_tok", f"is more than the {num_experts} experts")
    if not isinstance(config.get("norm_topk_prob"), bool):
        raise refuse("norm_topk_prob", "is neither true nor false, and cannot be guessed")
    step = 1 if config.get("decoder_sparse_step") is None else count("decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise refuse("mlp_only_layers", "is not a list of layers' numbers")
    sparse = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    sizes = Moe(num_experts, num_chosen, count("moe_intermediate_size"), config["norm_topk_prob"], sparse)
    return sizes if sparse else None


def _refuse_what_is_not_implemented(config: Mapping[str, Any], refuse: Callable[[str, str], UserError]) -> None:
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise refuse("model_type", f"is not one of the decoders implemented here: {', '.join(_MODEL_TYPES)}")
    for name, allowed in _MUST_BE.items():
        if name in config and config[name] not in allowed:
            raise refuse(name, f"is not implemented (only {allowed[0]!r})")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise refuse("layer_types", "is not implemented (only 'full_attention' layers)")
    if config.get("sliding_window") is not None and model_type not in ("qwen3", _MOE_TYPE):
        raise refuse("sliding_window", "is not implemented")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise refuse("sliding_window", "is not implemented (set use_sliding_window to false if the model has none)")
    known = _INERT | _READ | _MUST_BE.keys() | {"layer_types", "sliding_window"}
    if model_type == _MOE_TYPE:
        known |= _READ_OF_MOE | _INERT_OF_MOE
    for name in config:
        if name not in known:
            raise refuse(name, "is an attribute that this decoder does not know; it may change the numbers")


def _num_labels(config: Mapping[str, Any]) -> int:
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)


def _rope_from_config(config: Mapping[str, Any], source: str) -> Rope:
    """Reads theta from `rope_theta` (transformers 4) or `rope_parameters` (5), and refuses two that disagree."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise UserError(f"{source}: {name} = {config[name]!r} is not an object")
    places = (config, config.get("rope_scaling") or {}, config.get("rope_parameters") or {})
    thetas = [place["rope_theta"] for place in places if place.get("rope_theta") is not None]
    if not thetas or any(theta != thetas[0] for theta in thetas):
        found = f"two thetas: {thetas}" if thetas else "neither rope_theta nor rope_parameters.rope_theta is given"
        raise UserError(f"{source}: {found}; the rotary base cannot be guessed")
    nested = {name: value for place in places[1:] for name, value in place.items() if name != "rope_theta"}

    def number(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"{source}: {name} = {value!r} of the rotary embedding is not a positive number")
        return float(value)

    theta = number("rope_theta", thetas[0])
    old_kind = nested.pop("type", "default")
    kind = nested.pop("rope_type", old_kind)
    given = {name: value for name, value in nested.items() if value is not None}
    if given.pop("partial_rotary_factor", 1) != 1:
        raise UserError(f"{source}: partial_rotary_factor = {nested['partial_rotary_factor']} is not implemented")
    names = {
        "default": (),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in names:
        raise UserError(f"{source}: rope_type = {kind!r} is not implemented ({', '.join(names)})")
    if given.keys() != set(names[kind]):
        missing, unknown = sorted(set(names[kind]) - given.keys()), sorted(given.keys() - set(names[kind]))
        raise UserError(f"{source}: {kind} rope scaling lacks {missing} or has unknown {unknown}")
    if kind == "default":
        return Rope(theta)
    factor, low, high, original = (number(name, given[name]) for name in names[kind])
    if low >= high:
        raise UserError(f"{source}: low_freq_factor = {low} is not below high_freq_factor = {high}")
    return Rope(theta, Llama3Scaling(factor, low, high, int(original)))
