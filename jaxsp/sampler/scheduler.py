"""The sampler's decisions on the host: shape buckets, which prompts share a prefill call, where a sample ends.

Everything here is a pure function of its arguments; arrays are numpy.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxsp.config import UserError
from jaxsp.token_trie import make_trie
from jaxsp.trajectory import FinishReason, GenerateRequest

STOP_IDS_PER_SLOT = 8
"""Stop ids that the device looks at. More than these end a sample too, but only when the chunk reaches the host."""

SMALLEST = 1e-6
"""Of temperature, top-p and min-p: what is less would be 0 or infinity in float32 somewhere."""
LARGEST_BIAS = 1e4
"""Of the logit bias: beyond it, float32 scores lose what tells them apart."""
SMALLEST_CONTEXT = 256
"""Fewer positions cost nearly as much to read, and every context has programs of its own to compile."""
SMALLEST_PROMPT = 48


class Slots(NamedTuple):
    """What decoding needs to know of each row, one value per row (B rows): numpy on the host, traced on device.

    The keys and values of `length` tokens are cached; `last_token` follows them and is not cached yet.
    """

    last_token: Any  # int32 [B]
    length: Any  # int32 [B]
    token_index: Any  # int32 [B], tokens sampled so far
    num_left: Any  # int32 [B], tokens that may still be sampled
    is_active: Any  # bool [B]
    seed: Any  # uint32 [B, 2], high and low word
    temperature: Any  # float32 [B]
    top_k: Any  # int32 [B]
    top_p: Any  # float32 [B]
    min_p: Any  # float32 [B]
    stop_ids: Any  # int32 [B, STOP_IDS_PER_SLOT], -1 where there is none


def make_slots(num_rows: int, rows: Iterable[tuple[GenerateRequest, Sequence[int]]]) -> Slots:
    """Arrays for `num_rows` rows, of which the first hold `rows` (a request and its tokens so far) and decode."""
    slots = Slots(
        last_token=np.zeros(num_rows, np.int32),
        length=np.zeros(num_rows, np.int32),
        token_index=np.zeros(num_rows, np.int32),
        num_left=np.zeros(num_rows, np.int32),
        is_active=np.zeros(num_rows, np.bool_),
        seed=np.zeros((num_rows, 2), np.uint32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        stop_ids=np.full((num_rows, STOP_IDS_PER_SLOT), -1, np.int32),
    )
    for row, (request, sampled) in enumerate(rows):
        slots.last_token[row] = sampled[-1] if sampled else request.tokens[-1]
        slots.length[row] = len(request.tokens) + len(sampled) - 1
        slots.token_index[row] = len(sampled)
        slots.num_left[row] = request.max_tokens - len(sampled)
        slots.is_active[row] = True
        slots.seed[row] = (request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF)
        slots.temperature[row] = request.temperature
        slots.top_k[row] = min(request.top_k, np.iinfo(np.int32).max)
        slots.top_p[row] = request.top_p
        slots.min_p[row] = request.min_p
        stop_ids = list(dict.fromkeys(request.stop_ids))[:STOP_IDS_PER_SLOT]
        slots.stop_ids[row, : len(stop_ids)] = stop_ids
    return slots


def check_request(request: GenerateRequest, *, max_context: int, max_positions: int, vocab_size: int) -> None:
    """Raises `UserError` naming the field of a request that cannot be meant, or cannot fit."""
    if not request.tokens:
        raise UserError("tokens: the prompt is empty; a sample needs at least one token to follow")
    outside = [token for token in request.tokens if not 0 <= token < vocab_size]
    if outside:
        raise UserError(f"tokens: id {outside[0]} is outside the model's vocabulary of {vocab_size}")
    if request.max_tokens < 1:
        raise UserError(f"max_tokens = {request.max_tokens} is below 1")
    if request.temperature != 0 and not SMALLEST <= request.temperature <= 1 / SMALLEST:
        raise UserError(
            f"temperature = {request.temperature} is neither 0 (greedy) nor between {SMALLEST} and {1 / SMALLEST:g}"
        )
    if request.top_k < 0:
        raise UserError(f"top_k = {request.top_k} is below 0 (0 switches it off)")
    if not SMALLEST <= request.top_p <= 1:
        raise UserError(f"top_p = {request.top_p} is not between {SMALLEST} and 1 (1 switches it off)")
    if request.min_p != 0 and not SMALLEST <= request.min_p < 1:
        raise UserError(f"min_p = {request.min_p} is neither 0 (off) nor between {SMALLEST} and 1")
    no_ids = [token for token in request.stop_ids if not 0 <= token <= np.iinfo(np.int32).max]
    if no_ids:
        raise UserError(f"stop_ids: {no_ids[0]} is no token's id")
    if any(not stop for stop in request.stop_strings):
        raise UserError("stop_strings: an empty string would end every sample at once")
    _check_edits(request, vocab_size)
    total = len(request.tokens) + request.max_tokens
    if total > max_context:
        raise UserError(
            f"a request of {total} tokens (prompt {len(request.tokens)} + max_tokens {request.max_tokens}) exceeds "
            + (
                f"sampler.max_context = {max_context}; raise it, shorten the prompt or lower max_tokens"
                if max_context < max_positions
                else f"the {max_positions} positions the model was made for (max_position_embeddings); "
                "shorten the prompt or lower max_tokens"
            )
        )


def _check_edits(request: GenerateRequest, vocab_size: int) -> None:
    if not SMALLEST <= request.repetition_penalty <= 1 / SMALLEST:
        raise UserError(f"repetition_penalty = {request.repetition_penalty} is not between {SMALLEST} and 1e6 (1: off)")
    for token, value in request.logit_bias:
        if not 0 <= token < vocab_size:
            raise UserError(f"logit_bias: id {token} is outside the model's vocabulary of {vocab_size}")
        if not -LARGEST_BIAS <= value <= LARGEST_BIAS:
            raise UserError(f"logit_bias: {value} of token {token} is not between -{LARGEST_BIAS} and {LARGEST_BIAS}")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise UserError(f"min_tokens = {request.min_tokens} is not between 0 and max_tokens = {request.max_tokens}")
    if request.min_tokens and len(set(request.stop_ids)) > STOP_IDS_PER_SLOT:
        raise UserError(f"stop_ids: with min_tokens there may be at most {STOP_IDS_PER_SLOT}")
    if not request.choices:
        return
    if request.min_tokens:
        raise UserError("min_tokens: choices have lengths of their own; leave it at 0")
    outside = [token for choice in request.choices for token in choice if not 0 <= token < vocab_size]
    if outside:
        raise UserError(f"choices: id {outside[0]} is outside the model's vocabulary of {vocab_size}")
    try:
        make_trie(request.choices)
    except ValueError as error:
        raise UserError(f"choices: {error}") from error
    longest = max(map(len, request.choices))
    if longest > request.max_tokens:
        raise UserError(f"max_tokens = {request.max_tokens} is below the longest of the choices, {longest} tokens")


def row_buckets(num_slots: int) -> tuple[int, ...]:
    """Row counts that programs are compiled for: powers of 4, and `num_slots` itself."""
    return (*_powers(1, 4, num_slots), num_slots)


def context_buckets(max_context: int, page_tokens: int) -> tuple[int, ...]:
    """Positions that attention may read: powers of 2 from `SMALLEST_CONTEXT`, and `max_context`, in whole pages."""
    sizes = (*_powers(SMALLEST_CONTEXT, 2, max_context), max_context)
    return tuple(dict.fromkeys(-(-size // page_tokens) * page_tokens for size in sizes))


def prompt_buckets(prefill_tokens: int) -> tuple[int, ...]:
    """Lengths of a prefill call: `SMALLEST_PROMPT` times powers of 2 and 4/3 times these, up to `prefill_tokens`.

    Prefill is bound by arithmetic, so padding costs what it adds: at most a third of the call here, from
    `SMALLEST_PROMPT` tokens upwards.
    """
    steps = {*_powers(SMALLEST_PROMPT, 2, prefill_tokens), *_powers(SMALLEST_PROMPT * 4 // 3, 2, prefill_tokens)}
    return (*sorted(steps), prefill_tokens)


def _powers(first: int, factor: int, limit: int) -> list[int]:
    """`first * factor^i` below `limit`."""
    values = []
    while first < limit:
        values.append(first)
        first *= factor
    return values


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `size`. Raises ValueError if none does."""
    for candidate in buckets:
        if size <= candidate:
            return candidate
    raise ValueError(f"{size} is above the largest bucket {buckets[-1]}")


@dataclass(frozen=True)
class PrefillCall:
    """Chunks of prompts computed together, `num_rows` rows of `length` tokens; what `chunks` do not fill is padding."""

    chunks: tuple[int, ...]
    num_rows: int
    length: int


def plan_prefill(lengths: Sequence[int], prefill_tokens: int) -> list[PrefillCall]:
    """Calls that cover chunks of these lengths (at most `prefill_tokens` each), which it names by their index.

    Shapes are from small tables: chunks of one length bucket go together, 1, 4 or 16 at a time, and a call may be
    padded with up to a quarter of its rows.
    """
    buckets = prompt_buckets(prefill_tokens)
    calls: list[PrefillCall] = []
    by_bucket: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_bucket.setdefault(bucket(length, buckets), []).append(index)
    for size, indices in sorted(by_bucket.items()):
        while indices:
            num_rows = max(
                rows
                for rows in (1, 4, 16)
                if rows == 1 or (rows * size <= prefill_tokens and len(indices) >= 3 * rows // 4)
            )
            calls.append(PrefillCall(tuple(indices[:num_rows]), num_rows, size))
            indices = indices[num_rows:]
    return calls


@dataclass(frozen=True)
class Ending:
    """Where a sample ends: its first `num_tokens` tokens, and its text."""

    num_tokens: int
    text: str
    finish_reason: FinishReason


def find_ending(
    request: GenerateRequest,
    tokens: Sequence[int],
    num_checked: int,
    decode_text: Callable[[Sequence[int]], str],
    stop_strings: Sequence[str] | None = None,
) -> Ending | None:
    """How `tokens`, of which the first `num_checked` are known to go on, end the sample; None if they do not.

    `stop_strings` are those of the request that the other tokens may have completed; None: perhaps all. Without any,
    the text of a sample that goes on is not decoded.

    A stop id, the end of a choice or a completed stop string ends it, whichever comes first, else `max_tokens`. A stop
    string counts from the token that completes it in the decoded text, wherever it began; the text is cut before it.
    Before `min_tokens` none of them does.
    """
    if request.choices:  # no sample is longer than its choice: the device stops there
        trie = make_trie(request.choices)
        stop = len(tokens) if trie.is_leaf(trie.walk(tokens)) else None
    else:
        stop = next((i + 1 for i in range(num_checked, len(tokens)) if tokens[i] in request.stop_ids), None)
    end = min(stop or len(tokens), request.max_tokens)
    stop_strings = request.stop_strings if stop_strings is None else stop_strings
    if stop_strings:
        before = decode_text(tokens[: request.min_tokens - 1]) if request.min_tokens > 1 else ""
        whole = decode_text(tokens[:end])
        if _places_of(stop_strings, whole, before):
            for num_tokens in range(max(num_checked + 1, request.min_tokens), end + 1):
                text = whole if num_tokens == end else decode_text(tokens[:num_tokens])
                if found := _places_of(stop_strings, text, before):
                    return Ending(num_tokens, text[: min(found)], "stop")
    if end == stop:
        return Ending(end, decode_text(tokens[:end]), "stop")
    return Ending(end, decode_text(tokens[:end]), "length") if end == request.max_tokens else None


def _places_of(strings: Sequence[str], text: str, before: str) -> list[int]:
    """Where each of `strings` begins that is in the text, but not within `before`, which its first tokens read."""
    while not text.startswith(before):  # its last character was there in part
        before = before[:-1]
    return [at for string in strings if (at := text.find(string, max(len(before) - len(string) + 1, 0))) >= 0]


@dataclass
class Counts:
    """What the engine has done, added up."""

    requests: int = 0
    held_back: int = 0
    """Of these, which found the queue full."""
    prefill_tokens: int = 0
    shared_prompt_tokens: int = 0
    """Prompt tokens that were not computed, since their pages were there; with `prefill_tokens` they make all."""
    padding_tokens: int = 0
    sampled_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    """Rows computed, summed over decode steps."""
    used_row_steps: int = 0
    """Of these, rows that made a token."""
    preemptions: int = 0
    """Times that a row or a prompt gave its pages back to be computed again."""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def metrics(self, num_slots: int) -> dict[str, float]:
        """Counts, seconds, and shares of the work done."""
        seconds = self.prefill_s + self.decode_s
        prompt_tokens = self.prefill_tokens + self.shared_prompt_tokens
        return {
            "sampler/num_requests": self.requests,
            "sampler/num_held_back": self.held_back,
            "sampler/num_prefill_tokens": self.prefill_tokens,
            "sampler/num_shared_prompt_tokens": self.shared_prompt_tokens,
            "sampler/shared_prompt_frac": self.shared_prompt_tokens / max(prompt_tokens, 1),
            "sampler/prefill_padding_frac": self.padding_tokens / max(self.prefill_tokens + self.padding_tokens, 1),
            "sampler/num_preemptions": self.preemptions,
            "sampler/num_sampled_tokens": self.sampled_tokens,
            "sampler/num_decode_steps": self.decode_steps,
            "sampler/slot_occupancy_frac": self.used_row_steps / max(self.decode_steps * num_slots, 1),
            "sampler/row_padding_frac": 1 - self.used_row_steps / self.row_steps if self.row_steps else 0.0,
            "sampler/prefill_s": self.prefill_s,
            "sampler/decode_s": self.decode_s,
            "sampler/tokens_per_s": self.sampled_tokens / seconds if seconds else 0.0,
        }
