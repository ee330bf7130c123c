"""A tiny decoder, trajectories that share prefixes, and the plainest possible loss to compare with."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.learner.batch import Item
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes, Moe, Rope
from jaxsp.trajectory import Segment
from tests.tiny import random_params, whole_logits

SIZES = DecoderSizes(
    model_type="qwen3",
    vocab_size=40,
    embed_dim=16,
    mlp_dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_eps=1e-6,
    rope=Rope(10_000.0),
    max_positions=512,
    has_tied_embeddings=True,
    has_qk_norm=True,
)
MOE_SIZES = replace(SIZES, model_type="qwen3_moe", moe=Moe(8, 2, 12, True, (0, 1)))
MIXED_SIZES = replace(SIZES, model_type="qwen3_moe", num_layers=3, moe=Moe(8, 2, 12, False, (0, 2)))
"""Layers with experts around one without."""


def tiny_params(sizes: DecoderSizes = SIZES) -> Params:
    return random_params(sizes)


def segment(
    tokens: Sequence[int],
    mask: Sequence[bool] | np.ndarray | int,
    temperature: float = 1.0,
) -> Segment:
    """`mask`: which tokens are targets, or how many leading ones are not."""
    loss_mask = np.arange(len(tokens)) >= mask if isinstance(mask, int) else np.asarray(mask, bool)
    logprobs = np.zeros(len(tokens), np.float32)
    return Segment(np.asarray(tokens, np.int32), loss_mask, logprobs, (), temperature)


def random_items(seed: int = 0, num_groups: int = 2, group_size: int = 5, header: int = 3) -> list[Item]:
    """Groups with a common chat header and a common prompt each; some answers share tokens, one segment has turns."""
    rng = np.random.default_rng(seed)
    items: list[Item] = []
    head = rng.integers(0, SIZES.vocab_size, header).tolist()
    for _ in range(num_groups):
        prompt = head + rng.integers(0, SIZES.vocab_size, rng.integers(2, 8)).tolist()
        stem = rng.integers(0, SIZES.vocab_size, 3).tolist()
        for member in range(group_size):
            answer = (stem if member % 2 else []) + rng.integers(0, SIZES.vocab_size, rng.integers(1, 9)).tolist()
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            if member == 2:  # a second turn: part of what follows was observed
                mask[-1] = False
            made = segment(prompt + answer, mask, temperature=float(rng.choice([0.7, 1.0, 1.3])))
            made.behaviour_logprobs[mask] = rng.uniform(-4, -2, int(mask.sum()))
            items.append((made, float(rng.normal())))
    return items


def full_logprobs(sizes: DecoderSizes, params: Params, segments: Sequence[Segment]) -> jax.Array:
    """`[S, L]` log-probability of each token, one sequence in each row, from full logits; 0 where not a target.

    A plain causal forward pass over rows padded on the right.
    """
    length = max(len(one.tokens) for one in segments)
    padded = [np.pad(one.tokens, (0, length - len(one.tokens))) for one in segments]
    masks = [np.pad(one.loss_mask, (0, length - len(one.tokens))) for one in segments]
    tokens, mask = jnp.asarray(np.stack(padded)), jnp.asarray(np.stack(masks))
    temperatures = jnp.asarray([one.temperature or 1.0 for one in segments])
    scores = jax.nn.log_softmax(whole_logits(sizes, params, tokens) / temperatures[:, None, None], axis=-1)
    found = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(mask, jnp.pad(found, ((0, 0), (1, 0))), 0.0)


def reinforce_loss(
    sizes: DecoderSizes, params: Params, items: Sequence[Item], denominator: float, importance_cap: float
) -> jax.Array:
    """`-sum w A logprob / denominator`, the plainest form; its gradient is the first update's."""
    logprobs = full_logprobs(sizes, params, [one for one, _ in items])
    length = logprobs.shape[1]
    behaviour = np.stack([np.pad(one.behaviour_logprobs, (0, length - len(one.tokens))) for one, _ in items])
    weights = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logprobs) - behaviour), importance_cap)
    advantages = jnp.asarray([[advantage] for _, advantage in items])
    return -jnp.sum(weights * advantages * logprobs) / denominator
