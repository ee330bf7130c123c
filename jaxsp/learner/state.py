"""What an update changes: parameters, optimizer state and the number of updates, as one plain nested dict."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxsp.model.decoder import Params

TrainState = dict[str, Any]
"""`{"params": float32 parameters, "opt_state": the optimizer's, "step": int32 [], updates so far}`."""


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.95,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) after clipping by the global norm; `None` clips nothing.

    Norm scales and biases do not decay.
    """
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, optax.adamw(learning_rate, b1=beta1, b2=beta2, weight_decay=weight_decay, mask=decay_mask))


def decay_mask(params: Params) -> Any:
    """True for each parameter that weight decay applies to: by name, as stacked norm scales have two axes."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, param_shardings: Params) -> TrainState:
    """Shardings of a whole `TrainState`: moments lie as their parameters do, scalars on every device.

    `params` may be abstract.
    """
    mesh = jax.tree.leaves(param_shardings)[0].mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        param_shardings,
        transform_non_params=lambda _: everywhere,
    )
    return {"params": param_shardings, "opt_state": opt_state, "step": everywhere}


def init_state(
    params: Params, optimizer: optax.GradientTransformation, param_shardings: Params | None = None
) -> TrainState:
    """A state at step 0 that holds `params` themselves: the first update donates, that is, consumes them."""
    if param_shardings is None:
        return {"params": params, "opt_state": jax.jit(optimizer.init)(params), "step": jnp.zeros((), jnp.int32)}
    shardings = state_shardings(optimizer, params, param_shardings)
    return {
        "params": jax.device_put(params, param_shardings),
        "opt_state": jax.jit(optimizer.init, out_shardings=shardings["opt_state"])(params),
        "step": jax.device_put(jnp.zeros((), jnp.int32), shardings["step"]),
    }
