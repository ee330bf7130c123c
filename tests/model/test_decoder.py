import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_forward import GOLDEN, full_hidden, full_logits

from jaxsp.model.attention import attention
from jaxsp.model.decoder import abstract_params, hidden_states, init_params, logical_axes, logits, scalar_scores
from jaxsp.model.hf_weights import load_hf_params
from jaxsp.model.sizes import sizes_from_hf_config
from jaxsp.model.source import load_params, open_model
from jaxsp.sampler.weight_sync import to_sampler_layout

LANGUAGE_MODELS = (
    "qwen3_tied", "qwen3_untied", "llama3_scaled", "llama_bias", "qwen3_moe", "qwen3_moe_unnormed", "qwen3_moe_mixed",
)  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_logits_equal_those_of_transformers(name):
    source = open_model(str(GOLDEN / name))
    expected = np.load(GOLDEN / name / "expected.npz")
    found = full_logits(source.sizes, load_params(source), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], atol=1e-4)


def test_scores_of_a_sequence_classifier_equal_those_of_transformers_at_the_last_token():
    source = open_model(str(GOLDEN / "qwen3_score"))
    expected = np.load(GOLDEN / "qwen3_score" / "expected.npz")
    params = load_params(source)
    assert source.sizes.num_labels == 3 and "lm_head" not in params
    hidden = full_hidden(source.sizes, params, expected["tokens"])
    found = scalar_scores(params, hidden, jnp.asarray(expected["last_index"], jnp.int32))
    np.testing.assert_allclose(found, expected["logits"], atol=1e-4)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_config_of_transformers_4_gives_the_same_logits_as_that_of_5(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    nested = config.pop("rope_parameters")
    config["rope_theta"] = nested.pop("rope_theta")
    config["rope_scaling"] = nested if nested["rope_type"] != "default" else None
    new, old = open_model(str(GOLDEN / name)).sizes, sizes_from_hf_config(config)
    assert old == new
    expected = np.load(GOLDEN / name / "expected.npz")
    params = load_hf_params(GOLDEN / name, old)
    np.testing.assert_allclose(full_logits(old, params, expected["tokens"]), expected["logits"], atol=1e-4)


def test_rope_theta_and_rope_scaling_change_the_logits():
    for name, change in (
        ("qwen3_tied", {"rope_parameters": {"rope_theta": 100.0}}),
        ("llama3_scaled", {"rope_parameters": {"rope_theta": 10_000.0}}),
    ):
        config = json.loads((GOLDEN / name / "config.json").read_text())
        expected = np.load(GOLDEN / name / "expected.npz")
        sizes = sizes_from_hf_config(config | change)
        found = full_logits(sizes, load_hf_params(GOLDEN / name, sizes), expected["tokens"])
        assert np.abs(found - expected["logits"]).max() > 0.1


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe", "qwen3_moe_mixed"])
def test_unrolled_layers_and_recomputed_layers_give_what_stacked_layers_give(name):
    source = open_model(str(GOLDEN / name))
    params = load_params(source)
    tokens = jnp.asarray(np.load(GOLDEN / name / "expected.npz")["tokens"][:, :12])
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (2, 12, 12))

    @functools.partial(jax.jit, static_argnames="remat")
    def run(p, remat=False):
        return hidden_states(
            source.sizes,
            p,
            tokens,
            positions,
            lambda q, k, v, c: (attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask), c),
            remat=remat,
        )[0]

    np.testing.assert_allclose(run(to_sampler_layout(source.sizes, params, jnp.float32)), run(params), atol=1e-5)
    np.testing.assert_allclose(run(params, remat=True), run(params), atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_untied", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "is_exact"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_products_of_float32_are_exact_forward_and_backward(name, dtype, is_exact):
    source = open_model(str(GOLDEN / name))
    mask = jnp.tril(jnp.ones((1, 4, 4), bool))

    def attend(q, k, v, cache):
        return attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask), cache

    def total(params):
        tokens, positions = jnp.zeros((1, 4), int), jnp.arange(4)[None]
        hidden = hidden_states(source.sizes, params, tokens, positions, attend, compute_dtype=dtype, remat=True)[0]
        return jnp.sum(logits(params, hidden))

    lowered = jax.jit(jax.grad(total)).lower(abstract_params(source.sizes)).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    products = [line for line in products if not re.search(r"[<x]6x", line)]  # the router's: always exact
    assert len(products) > 27  # 9 for a layer and the head, each with two gradients
    assert {"precision = [HIGHEST, HIGHEST]" in line for line in products} == {is_exact}


def test_every_parameter_has_one_logical_axis_per_dimension():
    for name in (*LANGUAGE_MODELS, "qwen3_score"):
        sizes = open_model(str(GOLDEN / name)).sizes
        shapes = jax.tree.map(lambda leaf: len(leaf.shape), abstract_params(sizes))
        names = jax.tree.map(len, logical_axes(sizes), is_leaf=lambda leaf: isinstance(leaf, tuple))
        assert shapes == names


def test_random_parameters_depend_on_the_key_and_differ_between_layers():
    sizes = open_model(str(GOLDEN / "qwen3_tied")).sizes
    make = jax.jit(lambda seed: init_params(sizes, jax.random.key(seed)))
    first, second = (make(seed)["layers"]["q"]["kernel"] for seed in (0, 1))
    assert first.shape == (2, 32, 4, 12)
    assert not np.allclose(first, second) and not np.allclose(first[0], first[1])
