"""Prompts to cached keys and values: each distinct prompt once, and a prefix that all of them share once for all.

Programs are compiled for shapes, and a start within the cache is no shape: a call of P rows and L tokens has one
program for each context bucket, whatever the length of the prefix before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxsp.model.decoder import Params
from jaxsp.sampler.programs import Cache, Programs
from jaxsp.sampler.scheduler import (
    PREFIX_STEP,
    SHORTEST_PREFIX,
    Counts,
    PrefillCall,
    bucket,
    common_length,
    plan_prefill,
    prefill_contexts,
    prompt_buckets,
)

Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Prefix:
    """Tokens, and a cache of one row that holds them first."""

    tokens: Tokens
    cache: Cache

    def begins(self, prompt: Tokens) -> bool:
        return len(prompt) > len(self.tokens) and prompt[: len(self.tokens)] == self.tokens


_NO_PREFIX = _Prefix((), [])


@dataclass(frozen=True, eq=False)
class Computed:
    """What one call computed.

    Attributes:
        prompts: indices of the prompts, one for each of the first rows.
        cache: their keys and values; a row's positions after its prompt hold anything.
        hidden: `[P, D]`, the hidden states of their last tokens.
    """

    prompts: tuple[int, ...]
    cache: Cache
    hidden: jax.Array


class Prefill:
    """Computes prompts with one set of parameters; `forget` before there is another."""

    def __init__(
        self, programs: Programs, *, embed_dim: int, compute_dtype: Any, max_context: int, prefill_tokens: int
    ):
        self._programs, self._prefill_tokens = programs, prefill_tokens
        self._embed_dim, self._compute_dtype = embed_dim, compute_dtype
        self._contexts = prefill_contexts(max_context)
        self._prefix = _NO_PREFIX

    def forget(self) -> None:
        """Drops the prefix that is kept from wave to wave."""
        self._prefix = _NO_PREFIX

    def run(self, params: Params, prompts: Sequence[Tokens], counts: Counts) -> Iterator[Computed]:
        """Computes the distinct `prompts`, call by call, and counts the work."""
        prefix = self._shared_prefix(params, prompts, counts)
        num_shared = len(prefix.tokens)
        rests = [prompt[num_shared:] for prompt in prompts]
        counts.prefill_tokens += sum(len(rest) for rest in rests)
        for call in plan_prefill([len(rest) for rest in rests], self._prefill_tokens):
            cache, hidden = self._run_call(params, call, [rests[index] for index in call.prompts], prefix, counts)
            yield Computed(call.prompts, cache, hidden)

    def _shared_prefix(self, params: Params, prompts: Sequence[Tokens], counts: Counts) -> _Prefix:
        """A prefix of all prompts, shorter than each, with its cache: the last one if it still fits.

        Its length is a multiple of `PREFIX_STEP`: what the prompts of a wave have in common by chance would make it
        too long for the next wave.
        """
        if self._prefix.tokens and all(self._prefix.begins(prompt) for prompt in prompts):
            return self._prefix
        length = min(common_length(prompts), self._prefill_tokens) // PREFIX_STEP * PREFIX_STEP
        if len(prompts) < 2 or length < SHORTEST_PREFIX:
            return _NO_PREFIX
        tokens = prompts[0][:length]
        call = PrefillCall((0,), 1, ((0, bucket(length, prompt_buckets(self._prefill_tokens))),))
        cache, _ = self._run_call(params, call, [tokens], _NO_PREFIX, counts)
        counts.prefill_tokens += length
        self._prefix = _Prefix(tokens, cache)
        return self._prefix

    def _run_call(
        self, params: Params, call: PrefillCall, rests: Sequence[Tokens], prefix: _Prefix, counts: Counts
    ) -> tuple[Cache, jax.Array]:
        """The cache of `prefix` followed by each of `rests`, and the hidden states `[P, D]` of their last tokens."""
        num_shared = len(prefix.tokens)
        tokens = np.zeros((call.num_rows, call.capacity), np.int32)
        last_index = np.zeros(call.num_rows, np.int32)
        for row, rest in enumerate(rests):
            tokens[row, : len(rest)] = rest
            last_index[row] = num_shared + len(rest) - 1
        capacity = bucket(num_shared + call.capacity, self._contexts)
        if prefix.tokens:
            index = np.zeros(call.num_rows, np.int32)
            cache: Cache = [
                (self._programs.gather_rows(keys, index, capacity), self._programs.gather_rows(values, index, capacity))
                for keys, values in prefix.cache
            ]
        else:
            cache = self._programs.new_cache(call.num_rows, capacity)
        hidden: Any = np.zeros((call.num_rows, self._embed_dim), self._compute_dtype)
        for start, length in call.chunks:
            chunk = tokens[:, start : start + length]
            cache, hidden = self._programs.prefill(
                params, cache, chunk, np.int32(num_shared + start), last_index, hidden
            )
        counts.padding_tokens += tokens.size - sum(len(rest) for rest in rests)
        return cache, hidden
