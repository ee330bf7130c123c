from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import MOE_SIZES, SIZES, tiny_params

from jaxsp.checkpoint import Checkpointer
from jaxsp.learner.optimizers import OPTIMIZERS, decay_mask, make_optimizer, make_schedule
from jaxsp.learner.state import init_state, state_shardings
from jaxsp.mesh import make_mesh, shardings
from jaxsp.model.decoder import abstract_params, logical_axes


def test_norms_and_biases_do_not_decay():
    kernel, vector = np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.float32)
    params = {
        "embed": vector,
        "final_norm": {"scale": vector[0]},
        "layers": {"q": {"kernel": kernel, "bias": vector}, "mlp_norm": {"scale": vector}},
    }
    decays = {
        "embed": True,
        "final_norm": {"scale": False},
        "layers": {"q": {"kernel": True, "bias": False}, "mlp_norm": {"scale": False}},
    }
    assert decay_mask(params) == decays
    assert jax.tree.structure(decay_mask(abstract_params(SIZES))) == jax.tree.structure(abstract_params(SIZES))
    optimizer = make_optimizer(0.1, weight_decay=0.5)

    @jax.jit
    def decayed(params):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    jax.tree.map(
        lambda x, is_decayed: np.testing.assert_allclose(x, 0.95 if is_decayed else 1), decayed(params), decays
    )


def test_gradients_are_clipped_by_their_global_norm():
    gradients = {"x": jnp.array([3.0, 4.0])}
    # Adam forgets a common scale, so compare the first moments: (1 - beta1) times the clipped gradient
    optimizer = make_optimizer(0.1, beta1=0.9, max_grad_norm=0.5)
    _, state = optimizer.update(gradients, optimizer.init(gradients), gradients)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["x"], [0.03, 0.04], rtol=1e-5)
    unclipped = make_optimizer(0.1, max_grad_norm=None)
    _, state = unclipped.update(gradients, unclipped.init(gradients), gradients)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["x"], [0.3, 0.4], rtol=1e-5)


def gradients_like(params, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)


def first_update(kind, params, gradients, **settings):
    optimizer = make_optimizer(0.1, kind, max_grad_norm=None, **settings)
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(gradients, params)


def test_muon_orthogonalises_each_layer_s_kernels_and_gives_them_adamw_s_size():
    params = tiny_params()
    updates = first_update("muon", params, gradients_like(params))
    for name, num_in in (("q", 1), ("o", 2), ("gate", 1), ("down", 1)):
        kernel, gradient = (tree["layers"][name]["kernel"] for tree in (updates, gradients_like(params)))
        for own, other in zip(np.asarray(kernel), np.asarray(gradient), strict=True):
            shape = (int(np.prod(own.shape[:num_in])), -1)
            assert_orthogonalised(own.reshape(shape), other.reshape(shape), name)


def test_muon_orthogonalises_each_expert_s_kernels():
    params = tiny_params(MOE_SIZES)
    updates = first_update("muon", params, gradients_like(params))
    for name in ("gate", "up", "down"):
        kernels, gradients = (tree["layers"]["experts"][name] for tree in (updates, gradients_like(params)))
        matrices = (np.asarray(array).reshape(-1, *array.shape[2:]) for array in (kernels, gradients))
        for own, other in zip(*matrices, strict=True):
            assert_orthogonalised(own, other, name)


def assert_orthogonalised(update, gradient, name):
    """It is Muon's first of rate 0.1."""
    u, s, vt = np.linalg.svd(gradient, full_matrices=False)
    scale = -0.1 * 0.2 * max(update.shape) ** 0.5
    found = u.T @ (update / scale) @ vt.T
    # Five iterations bring singular values near 1, and leave singular vectors as they are.
    assert (np.abs(np.diag(found) - 1) < 0.4)[s > 0.1 * s[0]].all(), name
    np.testing.assert_allclose(found - np.diag(np.diag(found)), 0, atol=1e-4)
    np.testing.assert_allclose(np.sqrt(np.mean(update**2)), 0.1 * 0.2, rtol=0.25)


def test_muon_leaves_what_is_no_kernel_of_a_layer_to_adamw():
    params, gradients = tiny_params(), gradients_like(tiny_params())
    settings = {"weight_decay": 0.5, "beta1": 0.8}
    mixed, plain = (first_update(kind, params, gradients, **settings) for kind in ("muon", "adamw"))
    others = {"embed", "final_norm"}
    for name in others:
        jax.tree.map(np.testing.assert_array_equal, mixed[name], plain[name])
    norms = [name for name in mixed["layers"] if name.endswith("norm")]
    assert len(norms) == 4 and set(mixed) == others | {"layers"}
    for name in norms:
        jax.tree.map(np.testing.assert_array_equal, mixed["layers"][name], plain["layers"][name])


def test_adafactor_keeps_a_row_and_a_column_whose_first_step_is_exact_for_a_product():
    rng = np.random.default_rng(0)
    # Squares of a product of vectors are a product: the factors give them exactly, and updates are signs.
    first, second = rng.normal(size=128) + 3, rng.normal(size=256) - 4
    params = {"layers": {"gate": {"kernel": jnp.ones((2, 128, 256))}, "mlp_norm": {"scale": jnp.ones((2, 128))}}}
    gradients = jax.tree.map(jnp.zeros_like, params)
    kernels = [np.outer(first, second), np.outer(second[:128], first.sum() * np.ones(256))]
    gradients["layers"]["gate"]["kernel"] = jnp.asarray(kernels, jnp.float32)
    updates = first_update("adafactor", params, gradients, weight_decay=0.5)
    expected = -0.1 * (np.sign(gradients["layers"]["gate"]["kernel"]) + 0.5)
    np.testing.assert_allclose(updates["layers"]["gate"]["kernel"], expected, rtol=1e-4)
    assert (updates["layers"]["mlp_norm"]["scale"] == 0).all(), "norms do not decay"
    state = make_optimizer(0.1, "adafactor").init(params)
    sizes = [x.size for x in jax.tree.leaves(state)]
    assert sum(sizes) < 2 * (128 + 256) + 2 * 128 + 20


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_every_optimizer_has_shardings_and_survives_a_checkpoint(kind, tmp_path):
    mesh = make_mesh(1, 1, 1, 1, 1, jax.devices()[:1])
    placed = shardings(mesh, logical_axes(SIZES))
    optimizer = make_optimizer(optax.linear_schedule(1e-2, 0, 3), kind, weight_decay=0.1)
    state = init_state(tiny_params(), optimizer, placed)
    gradients = gradients_like(state["params"])
    _, state["opt_state"] = jax.jit(optimizer.update)(gradients, state["opt_state"], state["params"])
    params = abstract_params(SIZES)
    shapes = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params), "step": state["step"]}
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(optimizer, params, placed),
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        restored, _ = checkpointer.restore(1, abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def rates_of(schedule: Any, count: int) -> list[float]:
    """Of the first `count` updates."""
    return [float(schedule(number)) for number in np.arange(count)]


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        # Two updates of warm-up to 0.4, and four until the rate is 0.
        ("constant", [0.2, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.2, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0]),
        ("cosine", [0.2, 0.4, 0.4, 0.2 * (1 + 0.5**0.5), 0.2, 0.2 * (1 - 0.5**0.5), 0.0]),
    ],
)
def test_learning_rates_rise_and_fall_as_they_say(kind, rates):
    schedule = make_schedule(kind, 0.4, warmup=2, num_updates=6)
    assert callable(schedule)
    np.testing.assert_allclose(rates_of(schedule, 7), rates, atol=1e-6)


def test_a_constant_rate_is_a_number_and_a_schedule_without_warm_up_begins_at_its_peak():
    assert make_schedule("constant", 0.4, warmup=0, num_updates=6) == 0.4
    schedule = make_schedule("linear", 0.4, warmup=0, num_updates=4)
    assert callable(schedule)
    np.testing.assert_allclose(rates_of(schedule, 5), [0.4, 0.3, 0.2, 0.1, 0.0], atol=1e-6)
