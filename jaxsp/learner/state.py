"""What an update changes: parameters, optimizer state and the number of updates, as one plain nested dict."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxsp.model.decoder import Params

TrainState = dict[str, Any]
"""`{"params": float32 parameters, "opt_state": the optimizer's, "step": int32 [], updates so far}`."""


def state_shardings(optimizer: optax.GradientTransformation, params: Params, param_shardings: Params) -> TrainState:
    """Shardings of a whole `TrainState`: moments lie as their parameters do, scalars and factors on every device.

    `params` may be abstract.
    """
    mesh = jax.tree.leaves(param_shardings)[0].mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(moment: Any, param: Any, sharding: jax.sharding.NamedSharding) -> Any:
        """That of a parameter, if the moment has its shape; nothing where the optimizer leaves the parameter out."""
        if isinstance(moment, optax.MaskedNode):
            return moment
        return sharding if moment.shape == param.shape else everywhere

    opt_state = optax.tree.map_params(
        optimizer,
        place,
        jax.eval_shape(optimizer.init, params),
        params,
        param_shardings,
        transform_non_params=lambda _: everywhere,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
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
