"""The text of a sample while it grows: what is given out early is never taken back (pure functions, host only).

Text is held back where more tokens may change it: behind a character of which only some bytes are there, and where it
ends with what a stop string begins with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxsp.trajectory import Completion

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_NUM_BROKEN = 3
"""What is there of a character of 4 bytes can decode to so many of them."""


@dataclass(frozen=True)
class Delta:
    """What has come to a sample since the last one; all of a sample's together make its completion.

    Attributes:
        tokens: new ids.
        behaviour_logprobs: one for each of them, see `Completion`.
        raw_logprobs, kept_mass: likewise where the request wants them, else empty.
        text: what is new in the text. It may lag behind the tokens, and is then in a later delta, or cut by a stop.
        completion: the whole sample, with the last delta.
    """

    tokens: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    text: str
    raw_logprobs: tuple[float, ...] = ()
    kept_mass: tuple[float, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True)
class Decoded:
    """The text of a growing list of tokens, as far as its decoding is done.

    `tokens[:num_tokens]` decode to `text`, which ends with a whole character. Decoding goes on from `start`, before
    `num_tokens`: some decoders treat the first token of a text in another way.
    """

    text: str = ""
    num_tokens: int = 0
    start: int = 0


def decode_more(
    done: Decoded, tokens: Sequence[int], decode_text: Callable[[Sequence[int]], str]
) -> tuple[str, Decoded]:
    """The text of all `tokens`, and what is done of it now. The work goes by the tokens that are new, not by all."""
    before = decode_text(tokens[done.start : done.num_tokens])
    text = done.text + decode_text(tokens[done.start :])[len(before) :]
    if text.endswith(_BROKEN):
        return text, done
    is_visible = decode_text(tokens[done.num_tokens :]).strip() != ""
    return text, Decoded(text, len(tokens), done.num_tokens if is_visible else done.start)


def new_stops(done: Decoded, text: str, stop_strings: Sequence[str]) -> tuple[str, ...]:
    """The stop strings that stand in `text`, all of the tokens', but not in what was `done` of it before."""
    return tuple(stop for stop in stop_strings if text.find(stop, max(len(done.text) - len(stop) + 1, 0)) >= 0)


def num_certain(text: str, stop_strings: Sequence[str]) -> int:
    """How many characters of the `text` of a sample that goes on stay, whatever comes: it holds no stop string yet."""
    end = len(text)
    while end > max(len(text) - _NUM_BROKEN, 0) and text[end - 1] == _BROKEN:
        end -= 1
    return end - max((_overlap(text[:end], stop) for stop in stop_strings), default=0)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with, but is more than."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
