"""An update of a decoder some of whose layers have experts."""

import asyncio
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import MIXED_SIZES, MOE_SIZES, random_items, reinforce_loss, segment, tiny_params

from jaxsp.learner.batch import make_batch
from jaxsp.learner.policy_loss import PolicyLoss
from jaxsp.learner.state import init_state
from jaxsp.learner.update import make_logprobs_fn, make_update
from jaxsp.sampler.engine import make_engine
from jaxsp.trajectory import GenerateRequest

NORMALISER = 16.0


@pytest.mark.parametrize("sizes", [MOE_SIZES, MIXED_SIZES], ids=["all layers", "some layers"])
def test_packed_rows_give_the_reinforce_gradient_of_one_sequence_at_a_time(sizes):
    items, descent = random_items(), optax.sgd(1.0)  # parameters show the gradient
    batch, _ = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    loss = PolicyLoss(clip_low=0.2, clip_high=0.2, importance_cap=2.0, kl_coef=0.0)
    update = make_update(sizes, descent, loss, compute_dtype=jnp.float32, logits_chunk=16)
    state, _ = update(init_state(tiny_params(sizes), descent), batch, None, None, len(items), NORMALISER)
    found = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), tiny_params(sizes), state["params"])
    plain = partial(reinforce_loss, sizes, items=items, denominator=len(items) * NORMALISER, importance_cap=2.0)
    expected = jax.jit(jax.grad(plain))(tiny_params(sizes))
    assert all(np.abs(expected["layers"]["experts"][name]).max() > 1e-4 for name in ("gate", "up", "down"))
    assert np.abs(expected["layers"]["router"]).max() > 1e-4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-6), found, expected)


def test_the_samplers_logprobs_are_the_learners():
    engine = make_engine(
        MIXED_SIZES, num_slots=4, max_context=64, decode_chunk=4, prefill_tokens=64, compute_dtype=jnp.float32,
        decode_text=str,
    )  # fmt: skip
    engine.load(tiny_params(MIXED_SIZES), 0)
    prompts = [tuple(range(seed, seed + 5)) for seed in range(4)]

    async def sample():
        requests = [GenerateRequest(prompt, seed=i, max_tokens=8) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    items = []
    for prompt, completion in zip(prompts, asyncio.run(sample()), strict=True):
        made = segment([*prompt, *completion.tokens], len(prompt))
        made.behaviour_logprobs[len(prompt) :] = completion.behaviour_logprobs
        items.append((made, 1.0))
    batch, _ = make_batch(items, row_tokens=64, rows_per_microbatch=1)
    logprobs = make_logprobs_fn(MIXED_SIZES, compute_dtype=jnp.float32, logits_chunk=16)(
        tiny_params(MIXED_SIZES), batch
    )
    assert batch.target_mask.sum() == 4 * 8
    np.testing.assert_allclose(
        np.asarray(logprobs)[batch.target_mask], batch.behaviour_logprobs[batch.target_mask], atol=1e-5
    )
