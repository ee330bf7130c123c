"""What a checkpoint's `config.json` says about a decoder, and a refusal by name of what it says that we do not know."""

from collections.abc import Mapping
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


# Attributes that change no number of a forward pass without dropout.
_INERT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "attention_dropout",
    "classifier_dropout", "_name_or_path", "name_or_path", "id2label", "label2id", "problem_type", "return_dict",
    "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder",
    "add_cross_attention", "max_window_layers", "_attn_implementation_autoset", "is_llama_config", "rope_interleaved",
    "transformers.js_config", "torchscript", "use_bfloat16", "task_specific_params", "finetuning_task",
    "tokenizer_class", "prefix", "unsloth_fixed", "unsloth_version", "quantization",
}  # fmt: skip

_READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "num_labels",
}  # fmt: skip

# Attributes that would change the numbers, with the only values under which they do not.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}

_MODEL_TYPES = {"qwen3": True, "llama": False}
"""Model type to whether queries and keys are RMS-normalised per head before the rotation."""


def sizes_from_hf_config(config: Mapping[str, Any], source: str = "config.json") -> DecoderSizes:
    """The sizes that `config` (a Hugging Face `config.json`) describes.

    Raises `UserError` naming the attribute when one is missing, or changes the numbers in a way this decoder does not
    implement: a silent default there would give plausible and wrong logits.
    """

    def refuse(name: str, why: str) -> UserError:
        return UserError(f"{source}: {name} = {config.get(name)!r} {why}")

    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise refuse("model_type", f"is not one of the decoders implemented here: {', '.join(_MODEL_TYPES)}")
    for name, allowed in _MUST_BE.items():
        if name in config and config[name] not in allowed:
            raise refuse(name, f"is not implemented (only {allowed[0]!r})")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise refuse("layer_types", "is not implemented (only 'full_attention' layers)")
    if config.get("sliding_window") is not None and model_type != "qwen3":
        raise refuse("sliding_window", "is not implemented")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise refuse("sliding_window", "is not implemented (set use_sliding_window to false if the model has none)")
    for name in config:
        if name not in _INERT | _READ | _MUST_BE.keys() | {"layer_types", "sliding_window"}:
            raise refuse(name, "is an attribute that this decoder does not know; it may change the numbers")

    def number(name: str) -> Any:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(name, "is not a number, and the decoder needs it")
        return value

    num_heads = number("num_attention_heads")
    has_score_head = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())
    return DecoderSizes(
        model_type=model_type,
        vocab_size=number("vocab_size"),
        embed_dim=number("hidden_size"),
        mlp_dim=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads") if config.get("num_key_value_heads") is not None else num_heads,
        head_dim=number("head_dim") if config.get("head_dim") is not None else number("hidden_size") // num_heads,
        rms_eps=number("rms_norm_eps"),
        rope=_rope_from_config(config, source),
        max_positions=number("max_position_embeddings"),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qk_norm=_MODEL_TYPES[model_type],
        has_attention_bias=bool(config.get("attention_bias", False)),
        num_labels=_num_labels(config) if has_score_head else 0,
    )


def _num_labels(config: Mapping[str, Any]) -> int:
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)


def _rope_from_config(config: Mapping[str, Any], source: str) -> Rope:
    """Reads theta from `rope_theta` (transformers 4) or `rope_parameters` (5), and refuses two that disagree."""
    nested = dict(config.get("rope_parameters") or {})
    scaling = {**dict(config.get("rope_scaling") or {}), **{k: v for k, v in nested.items() if k != "rope_theta"}}
    thetas = {float(t) for t in (config.get("rope_theta"), nested.get("rope_theta")) if t is not None}
    if len(thetas) != 1:
        found = "neither rope_theta nor rope_parameters.rope_theta is given" if not thetas else f"two thetas: {thetas}"
        raise UserError(f"{source}: {found}; the rotary base cannot be guessed")
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind == "default":
        if any(v is not None and (k, v) != ("partial_rotary_factor", 1.0) for k, v in scaling.items()):
            raise UserError(f"{source}: rope scaling attributes {sorted(scaling)} are not understood")
        return Rope(thetas.pop())
    if kind != "llama3":
        raise UserError(f"{source}: rope_type = {kind!r} is not implemented (default, llama3)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    unknown = set(scaling) - set(names) - {"partial_rotary_factor"}
    missing = [name for name in names if name not in scaling]
    if unknown or missing:
        raise UserError(f"{source}: llama3 rope scaling lacks {missing} or has unknown {sorted(unknown)}")
    factor, low, high, original = (scaling[name] for name in names)
    return Rope(thetas.pop(), Llama3Scaling(float(factor), float(low), float(high), int(original)))
