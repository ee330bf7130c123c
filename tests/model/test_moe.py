import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_forward import GOLDEN

from jaxsp.model.moe import load_balancing_loss, route, run_experts_on
from jaxsp.model.sizes import Moe

SIZES = Moe(num_experts=6, num_chosen=2, mlp_dim=20, normalises_weights=True, sparse_layers=(0, 1))


@pytest.fixture(scope="module")
def recorded():
    return np.load(GOLDEN / "qwen3_moe" / "expected.npz")


def test_load_balancing_loss_is_that_of_transformers_with_and_without_padding(recorded):
    probs = jax.nn.softmax(recorded["router_logits"], axis=-1)
    _, experts = jax.lax.top_k(probs, SIZES.num_chosen)
    np.testing.assert_allclose(load_balancing_loss(probs, experts), recorded["aux_loss"], rtol=1e-6)
    masked = load_balancing_loss(probs, experts, jnp.asarray(recorded["router_mask"]))
    np.testing.assert_allclose(masked, recorded["masked_aux_loss"], rtol=1e-6)
    assert abs(recorded["aux_loss"] - recorded["masked_aux_loss"]) > 1e-3


def test_load_balancing_loss_is_the_number_of_choices_at_even_load_and_grows_with_uneven_load():
    experts = jnp.asarray([[[0, 1], [2, 3], [4, 5]]])
    even = jnp.full((1, 3, 6), 1 / 6)
    np.testing.assert_allclose(load_balancing_loss(even, experts), 2.0, rtol=1e-6)
    to_two = jnp.zeros((1, 3, 6)).at[..., :2].set(0.5)
    np.testing.assert_allclose(load_balancing_loss(to_two, jnp.zeros_like(experts).at[..., 1].set(1)), 6.0, rtol=1e-6)


@pytest.mark.parametrize(("normalises", "expected"), [(True, [0.75, 0.25]), (False, [0.6, 0.2])])
def test_weights_are_probabilities_of_the_likeliest_experts_divided_by_their_sum_if_so_trained(normalises, expected):
    router = jnp.log(jnp.asarray([[0.05, 0.6, 0.15, 0.2]]))
    sizes = Moe(4, 2, 8, normalises, (0,))
    probs, experts, weights = route(sizes, router, jnp.ones((3, 1), jnp.bfloat16))
    np.testing.assert_allclose(probs, np.tile([0.05, 0.6, 0.15, 0.2], (3, 1)), rtol=1e-5)
    np.testing.assert_array_equal(experts, [[1, 3]] * 3)
    np.testing.assert_allclose(weights, [expected] * 3, rtol=1e-5)
    assert probs.dtype == weights.dtype == jnp.float32


def test_values_and_gradients_are_those_of_a_loop_over_experts():
    generator = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(generator.normal(size=shape) * 0.3, jnp.float32)

    x, router = normal(2, 9, 16), normal(16, 6)
    kernels = normal(6, 16, 20), normal(6, 16, 20), normal(6, 20, 16)
    run = run_experts_on(None, "cpu", splits_tokens=False)

    def grouped(x, router, kernels):
        _, experts, weights = route(SIZES, router, x)
        return run(x, experts, weights, *kernels)

    def looped(x, router, kernels):
        _, experts, weights = route(SIZES, router, x)
        total = jnp.zeros_like(x)
        for expert, (gate, up, down) in enumerate(zip(*kernels, strict=True)):
            weight = jnp.sum(jnp.where(experts == expert, weights, 0), axis=-1, keepdims=True)
            total += weight * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
        return total

    target = normal(2, 9, 16)
    np.testing.assert_allclose(grouped(x, router, kernels), looped(x, router, kernels), atol=1e-5)
    gradients = [
        jax.grad(lambda *arguments, f=function: jnp.sum(target * f(*arguments)), argnums=(0, 1, 2))(x, router, kernels)
        for function in (grouped, looped)
    ]
    jax.tree.map(lambda found, expected: np.testing.assert_allclose(found, expected, atol=1e-5), *gradients)
