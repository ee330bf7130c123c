import pytest

from jaxsp.config import UserError
from jaxsp.model.sizes import Llama3Scaling, Moe, Rope, sizes_from_hf_config

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    **{name: value for name, value in QWEN3_8B.items() if name != "architectures"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_qwen3_8bs_config_gives_its_sizes():
    sizes = sizes_from_hf_config(QWEN3_8B)
    assert (sizes.embed_dim, sizes.mlp_dim, sizes.num_layers) == (4096, 12288, 36)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (32, 8, 128)
    assert sizes.rope == Rope(1e6) and sizes.has_qk_norm and not sizes.has_tied_embeddings and sizes.num_labels == 0


def test_qwen3_30b_a3bs_config_gives_its_sizes_under_the_name_of_the_hub_and_of_transformers_5():
    sizes = sizes_from_hf_config(QWEN3_30B_A3B)
    assert sizes.moe == Moe(128, 8, 768, True, tuple(range(48))) and sizes.has_equal_layers and sizes.has_qk_norm
    renamed = {name: value for name, value in QWEN3_30B_A3B.items() if name != "num_experts"}
    assert sizes_from_hf_config(renamed | {"num_local_experts": 128}) == sizes


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [(1, [0, 3], (1, 2, 4, 5)), (2, [], (1, 3, 5)), (2, [3], (1, 5)), (3, None, (2, 5)), (7, [], None)],
)
def test_layers_have_experts_every_so_many_layers_but_for_those_named(step, dense, sparse):
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": dense}
    sizes = sizes_from_hf_config(QWEN3_30B_A3B | changes)
    assert (sizes.moe.sparse_layers if sizes.moe else None) == sparse
    assert sizes.layers_with("experts") == (sparse or ())
    assert sorted([*sizes.layers_with("experts"), *sizes.layers_with("up")]) == list(range(6))
    assert list(sizes.layers_with("q")) == list(range(6)) and sizes.has_equal_layers == (sparse is None)


def test_llama_sizes_that_follow_from_others_may_be_left_out():
    sizes = sizes_from_hf_config(LLAMA)
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.has_qk_norm) == (32, 64, False)


def test_llama3_scaling_is_read_under_its_old_and_its_new_name():
    old = sizes_from_hf_config(LLAMA | {"rope_scaling": LLAMA3_SCALING})
    without_theta = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    new = sizes_from_hf_config(without_theta | {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}})
    assert old == new
    assert old.rope == Rope(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def test_number_of_labels_comes_from_id2label_and_is_two_without_it():
    classifier = QWEN3_8B | {"architectures": ["Qwen3ForSequenceClassification"]}
    assert sizes_from_hf_config(classifier).num_labels == 2
    assert sizes_from_hf_config(classifier | {"id2label": {"0": "LABEL_0"}}).num_labels == 1


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN3_8B, {"model_type": "gemma3"}, "model_type = 'gemma3'"),
        (QWEN3_8B, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias = True"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved = True"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp = 2"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        (LLAMA, {"logit_scale": 2.0}, "logit_scale = 2.0 is an attribute that this decoder does not know"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096"),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True"),
        (QWEN3_8B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN3_8B, {"num_experts": 8}, "num_experts = 8 is an attribute that this decoder does not know"),
        (QWEN3_30B_A3B, {"num_experts": None}, "num_experts = None"),
        (QWEN3_30B_A3B, {"num_local_experts": 64}, "num_experts = 128 differs from num_local_experts = 64"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 is more than the 128 experts"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        (QWEN3_30B_A3B, {"norm_topk_prob": None}, "norm_topk_prob = None"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 3}, "mlp_only_layers = 3"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8"),
        (QWEN3_8B, {"hidden_size": None}, "hidden_size = None"),
        (QWEN3_8B, {"hidden_size": "4096"}, "hidden_size = '4096'"),
        (QWEN3_8B, {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        (QWEN3_8B, {"vocab_size": 10.5}, "vocab_size = 10.5 is not a whole number"),
        (QWEN3_8B, {"num_key_value_heads": 5}, "num_key_value_heads = 5 does not divide"),
        (QWEN3_8B, {"head_dim": 127}, "head_dim = 127"),
        (QWEN3_8B, {"rms_norm_eps": None}, "rms_norm_eps = None"),
        (QWEN3_8B, {"rope_theta": None}, "neither rope_theta nor rope_parameters.rope_theta"),
        (QWEN3_8B, {"rope_theta": "1e6"}, "rope_theta = '1e6'"),
        (QWEN3_8B, {"rope_parameters": {"rope_theta": 1e4}}, "two thetas"),
        (QWEN3_8B, {"rope_parameters": 5}, "rope_parameters = 5 is not an object"),
        (QWEN3_8B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        (QWEN3_8B, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type = 'linear'"),
        (QWEN3_8B, {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor"),
        (LLAMA, {"rope_scaling": {**LLAMA3_SCALING, "factor": None}}, "lacks ['factor']"),
        (LLAMA, {"rope_scaling": {**LLAMA3_SCALING, "beta_fast": 32}}, "unknown ['beta_fast']"),
        (LLAMA, {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}}, "low_freq_factor = 4.0"),
        (LLAMA, {"rope_scaling": {**LLAMA3_SCALING, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ],
)
def test_attributes_that_would_change_the_numbers_are_refused_by_name(base, change, named):
    with pytest.raises(UserError, match=r"some/config\.json") as caught:
        sizes_from_hf_config(base | change, "some/config.json")
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads"])
def test_qwen3_sizes_with_defaults_of_their_own_must_be_given(name):
    with pytest.raises(UserError, match=f"{name} = None is missing"):
        sizes_from_hf_config({key: value for key, value in QWEN3_8B.items() if key != name})
