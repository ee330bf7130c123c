"""A random two-layer decoder, an engine around it, and what its samples are checked against."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes, Moe, Rope
from jaxsp.sampler.engine import Engine, make_engine
from jaxsp.sampler.paged_attention import IMPLEMENTATIONS, Implementation
from jaxsp.sampler.sampling import process_logits, sample_tokens
from jaxsp.sampler.scheduler import find_ending
from jaxsp.trajectory import Completion, GenerateRequest
from tests.tiny import random_params, whole_logits

SIZES = DecoderSizes(
    model_type="qwen3", vocab_size=160, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_eps=1e-6, rope=Rope(1e4), max_positions=1024, has_tied_embeddings=True, has_qk_norm=True,
)  # fmt: skip


MOE_SIZES = dataclasses.replace(SIZES, model_type="qwen3_moe", num_layers=3, moe=Moe(8, 2, 24, True, (0, 2)))
"""Layers with experts around one without."""


def tiny_params(seed: int = 0, sizes: DecoderSizes = SIZES) -> Params:
    return random_params(sizes, seed)


def text_of(tokens: Sequence[int]) -> str:
    """Three digits for each token, so that a string may begin in the middle of one."""
    return "".join(f"{token:03d}" for token in tokens)


def tiny_engine(
    params: Params | None = None, *, sizes: DecoderSizes = SIZES, num_slots: int = 4, decode_chunk: int = 4,
    prefill_tokens: int = 128, **settings
) -> Engine:  # fmt: skip
    engine = make_engine(
        sizes, num_slots=num_slots, max_context=settings.pop("max_context", 128), decode_chunk=decode_chunk,
        prefill_tokens=prefill_tokens, compute_dtype=settings.pop("compute_dtype", jnp.float32),
        decode_text=settings.pop("decode_text", text_of), **settings,
    )  # fmt: skip
    engine.load(tiny_params(sizes=sizes) if params is None else params, policy_version=3)
    return engine


KERNELS = {
    "tpu": {"block_tokens": 32},
    "gpu": {"block_tokens": 16, "part_tokens": 32},
}
"""Kernels and what they compute at one time: little, so that a row of some pages has several blocks."""


def interpreted(name: str) -> Implementation:
    """A kernel that runs anywhere, in Pallas's interpreter."""
    kernel = IMPLEMENTATIONS[name]
    assert kernel.decode is not None
    decode = functools.partial(kernel.decode, interpret=True, **KERNELS[name])
    return dataclasses.replace(kernel, platform=None, complaint=lambda shape: None, decode=decode)


def generate_all(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Submits all requests in one turn of a new event loop."""

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(gather())


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, SIZES.vocab_size, length).tolist())


def assert_same_samples(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens, texts and endings; log-probabilities within 1e-5, which is what other shapes may change."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=1e-5)
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-5)
        np.testing.assert_allclose(one.kept_mass, other.kept_mass, atol=1e-5)


def reference_sample(params: Params, request: GenerateRequest, sizes: DecoderSizes = SIZES) -> Completion:
    """What `request` samples, by one whole forward pass per token."""
    options = (request.temperature, request.top_k, request.top_p, request.min_p)
    seed = np.array([[request.seed >> 32, request.seed & 0xFFFFFFFF]], np.uint32)
    tokens: list[int] = []
    logprobs: list[float] = []
    raw_logprobs: list[float] = []
    kept_mass: list[float] = []
    ending = None
    while ending is None:
        whole = (*request.tokens, *tokens)
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(whole)] = whole
        raw = np.asarray(_last_logits(sizes, params, padded, len(whole)))
        edited = edited_by_definition(raw, request, tokens)
        token, logprob, is_kept = jax.device_get(_draw(edited[None], seed, len(tokens), *options))
        if request.wants_raw:
            raw_logprobs.append(float(np.log(_softmax(raw)[token])))
            whole_mass = _softmax(edited / request.temperature) if request.temperature else np.ones(len(edited))
            kept_mass.append(float(whole_mass[is_kept].sum()) if request.temperature else 1.0)
        tokens.append(int(token))
        logprobs.append(float(logprob))
        ending = find_ending(request, tokens, len(tokens) - 1, text_of)
    return Completion(
        tuple(tokens), tuple(logprobs), ending.text, ending.finish_reason, 3, tuple(raw_logprobs), tuple(kept_mass)
    )


def edited_by_definition(logits: np.ndarray, request: GenerateRequest, tokens: Sequence[int]) -> np.ndarray:
    """`[V]`: penalty, bias, banned stops and choices, one token at a time."""
    scores = logits.astype(np.float32).copy()
    for token in {*request.tokens, *tokens}:
        scores[token] *= (
            request.repetition_penalty if scores[token] <= 0 else 1 / np.float32(request.repetition_penalty)
        )
    for token, bias in request.logit_bias:
        scores[token] += bias
    if len(tokens) < request.min_tokens:
        scores[list(request.stop_ids)] = -np.inf
    if request.choices:
        possible = [c[len(tokens)] for c in request.choices if c[: len(tokens)] == tuple(tokens)]
        scores[~np.isin(np.arange(len(scores)), possible)] = -np.inf
    return scores


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(sizes, params, tokens, length):
    return whole_logits(sizes, params, tokens)[0, length - 1]


@jax.jit
def _draw(scores, seed, token_index, temperature, top_k, top_p, min_p):
    rows = [jnp.atleast_1d(x) for x in (token_index, temperature, top_k, top_p, min_p)]
    token, logprob = sample_tokens(scores, seed, *rows)
    return token[0], logprob[0], jnp.isfinite(process_logits(scores, *rows[1:])[0])


def reference_logprobs(params: Params, request: GenerateRequest, tokens: Sequence[int]) -> np.ndarray:
    """`[num sampled, V]`: the distribution each of `tokens` was drawn from, by one forward pass without a cache."""
    whole = (*request.tokens, *tokens)
    length = 128 if len(whole) <= 128 else 384
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(whole)] = whole
    options = (request.temperature, request.top_k, request.top_p, request.min_p)
    logprobs = _all_logprobs(params, padded, *(np.full(length, value) for value in options))
    return np.asarray(logprobs)[len(request.tokens) - 1 : len(whole) - 1]


@jax.jit
def _all_logprobs(params, tokens, temperature, top_k, top_p, min_p):
    scores = process_logits(whole_logits(SIZES, params, tokens)[0], temperature, top_k, top_p, min_p)
    return jax.nn.log_softmax(scores)
