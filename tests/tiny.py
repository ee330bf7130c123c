"""What many tests share: fakes that play is tested with, and real models and runs that are tiny.

The fakes need no JAX; who makes a model imports it in the call.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxsp.config import ModelConfig, RunConfig, dump_config
from jaxsp.rollout.prompts import PROMPTS, Proposal
from jaxsp.rollout.roles import Setting
from jaxsp.trajectory import Completion, Generate, GenerateRequest
from jaxsp.verifiers.math_answer import Verdict, is_parseable_expression
from jaxsp.verifiers.verify import ANSWER_KINDS, KINDS

END = 256
"""The id that ends a byte reply; 257 opens a message and 258 closes it."""
_OPEN, _CLOSE = 257, 258


@dataclass(frozen=True)
class ByteRenderer:
    """Tokens are the bytes of the text; the ids from `END` on are control tokens and decode to nothing."""

    stop_ids: tuple[int, ...] = (END,)
    stop_strings: tuple[str, ...] = ()

    def prompt(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The conversation and the opening of the assistant's turn."""
        turns = [(_OPEN, *f"{turn['role']}\n{turn['content']}".encode(), _CLOSE) for turn in messages]
        return (*(token for turn in turns for token in turn), _OPEN, *b"assistant\n")


def decode_bytes(tokens) -> str:
    """The text of the bytes among `tokens`."""
    return bytes(int(token) for token in tokens if token < END).decode(errors="replace")


@dataclass
class ScriptedGenerate:
    """A `jaxsp.trajectory.Generate` that replies `script(prompt, seed)`, and keeps the requests in `requests`.

    Attributes:
        script: from the decoded prompt and the request's seed to the text of the reply. What exceeds the request's
            `max_tokens`, the closing id included, is cut, and the reply ends with `length`.
        delay_s: how long each answer is held back; called once per request.
    """

    script: Callable[[str, int], str]
    delay_s: Callable[[], float] = lambda: 0.0
    policy_version: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)

    async def __call__(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        reply = self.script(decode_bytes(request.tokens), request.seed)
        await asyncio.sleep(self.delay_s())
        whole = (*reply.encode(), END)
        tokens = whole[: request.max_tokens]
        return Completion(
            tokens=tokens,
            behaviour_logprobs=tuple(-1.0 - position / 1024 for position in range(len(tokens))),
            text=decode_bytes(tokens),
            finish_reason="stop" if tokens == whole else "length",
            policy_version=self.policy_version,
        )


async def check_here(proposal: Proposal, reply: str) -> Verdict:
    """The real verifiers, in this process: for references and replies that cannot hang."""
    kind = KINDS[ANSWER_KINDS[proposal.answer_type]]
    verdict = kind.quick(proposal.answer, reply)
    if verdict is None:
        assert kind.slow is not None
        verdict = kind.slow(proposal.answer, reply)
    return verdict


async def parses_here(text: str) -> bool:
    return is_parseable_expression(text)


def make_setting(generate: Generate, prompts: str = "compact", **changes: Any) -> Setting:
    """A setting of the fakes and the real prompts and verifiers; `changes` replace its fields."""
    fields = {
        "generate": generate,
        "renderer": ByteRenderer(),
        "prompts": PROMPTS[prompts],
        "check": check_here,
        "parses": parses_here,
    }
    return Setting(**{**fields, **changes})


GOLDEN = Path(__file__).parent / "golden"


def tiny_config(model_type: str = "qwen3", num_labels: int = 0) -> dict[str, Any]:
    """The `config.json` of a decoder for the vocabulary of the small golden tokenizer of its type."""
    config = {
        "architectures": ["ForSequenceClassification" if num_labels else "ForCausalLM"], "model_type": model_type,
        "vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu",
        "eos_token_id": {"qwen3": 598, "llama": 609}[model_type],
    }  # fmt: skip
    return config | ({"num_labels": num_labels} if num_labels else {})


def random_params(sizes: Any, seed: int = 0) -> dict[str, Any]:
    """Parameters for a `DecoderSizes`, whose logits spread over a few units: samples differ and greedy has no ties.

    Made with numpy, new arrays each time: compiling `init_params` takes longer than most tests of a tiny model.
    """
    import jax
    import jax.numpy as jnp

    from jaxsp.model.decoder import abstract_params

    generator = np.random.default_rng(seed)

    def leaf(path: Any, shape: Any) -> jax.Array:
        is_scale = path[-1].key == "scale"
        values = generator.uniform(0.5, 1.5, shape.shape) if is_scale else generator.normal(0, 0.2, shape.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(sizes))


def tiny_params(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """`random_params` of the decoder that a `config.json` describes."""
    from jaxsp.model.sizes import sizes_from_hf_config

    return random_params(sizes_from_hf_config(config), seed)


def whole_logits(sizes: Any, params: Any, tokens: Any) -> Any:
    """`[B, L, V]` logits of whole sequences from position 0: plain causal attention, no cache, nothing packed."""
    import jax.numpy as jnp

    from jaxsp.model.attention import attention
    from jaxsp.model.decoder import hidden_states, logits

    num_sequences, length = tokens.shape
    causal = jnp.tril(jnp.ones((num_sequences, length, length), bool))
    hidden, _ = hidden_states(
        sizes,
        params,
        tokens,
        jnp.tile(jnp.arange(length), (num_sequences, 1)),
        lambda q, k, v, cache: (attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), causal), cache),
    )
    return logits(params, hidden)


def write_tiny_model(directory: Path, model_type: str = "qwen3", num_labels: int = 0, seed: int = 0) -> Path:
    """A Hugging Face directory with a random decoder (float32), and a tokenizer with the control tokens of its type."""
    from jaxsp.model.hf_weights import export_hf
    from jaxsp.model.sizes import sizes_from_hf_config

    config = tiny_config(model_type, num_labels)
    tokenizer = GOLDEN / {"qwen3": "tokenizer_qwen3_small", "llama": "tokenizer_llama3_small"}[model_type]
    params = tiny_params(config, seed)
    export_hf(params, sizes_from_hf_config(config), config, directory, tokenizer_from=tokenizer)
    return directory


def write_tiny_gguf(path: Path, seed: int = 0) -> Path:
    """The Qwen3 model of `write_tiny_model` as a GGUF file, with its vocabulary and a chat template."""
    import gguf
    import jax

    from jaxsp.model.tensor_table import rule_of

    config = tiny_config()
    spec = json.loads((GOLDEN / "tokenizer_qwen3_small" / "tokenizer.json").read_text("utf-8"))
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    plain = {token["content"] for token in spec["added_tokens"]} - special
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = sorted(ids, key=lambda text: ids[text])
    tokens += [f"[unused{number}]" for number in range(len(tokens), config["vocab_size"])]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if text in special else 4 if text in plain else 1 for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template("<|im_start|>system\nBe brief.<|im_end|>\n")
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tiny_params(config, seed)):
        rule = rule_of(key_path)
        for layer, own in enumerate(np.asarray(leaf) if rule.is_per_layer else [np.asarray(leaf)]):
            writer.add_tensor(rule.name("gguf", layer), rule.to_file(own))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_run(run_dir: Path, model: Path, steps: Sequence[int] = (4,), **model_settings: Any) -> RunConfig:
    """A run directory with a checkpoint for each step, whose parameters are `tiny_params(seed=step)`."""
    import jax

    from jaxsp.checkpoint import Checkpointer
    from jaxsp.learner.optimizers import make_optimizer
    from jaxsp.learner.state import init_state
    from jaxsp.mesh import make_mesh, shardings
    from jaxsp.model.decoder import logical_axes
    from jaxsp.model.source import open_model

    config = RunConfig(model=ModelConfig(str(model), **{"compute_dtype": "float32", **model_settings}))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(config))
    (run_dir / "seconds.json").write_text('{"rollout": 2.0, "update": 1.0}')
    source = open_model(str(model))
    placed = shardings(make_mesh(1, 1, 1, 1, 1, jax.devices()[:1]), logical_axes(source.sizes))
    with Checkpointer(run_dir / "checkpoints", keep=max(len(steps), 1)) as checkpointer:
        for step in steps:
            state = init_state(tiny_params(source.config, step), make_optimizer(1e-3), placed)
            checkpointer.save(step, {"state": state, "reference": {}}, {"method": {}})
    return config
