"""Conversations to imitate, read from JSONL, as trajectories with the assistant's tokens as targets."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxsp.config import UserError
from jaxsp.envs import corpus
from jaxsp.json_lines import read_json_lines
from jaxsp.rollout.seeds import derive_seed
from jaxsp.trajectory import Segment, Turn

Message = dict[str, str]
_ROLES = {"system", "user", "assistant", "tool"}


def read_conversations(path: str) -> list[list[Message]]:
    """The `messages` of every line of a JSONL file; `embedded` is the packaged warm start.

    Raises `UserError` naming the line and what is wrong with it.
    """
    file = Path(str(corpus.__file__)).parent / "warm_start.jsonl" if path == "embedded" else Path(path)
    rows = read_json_lines(file, "warm_start.conversations:")
    conversations = [_messages(row, place) for place, row in rows]
    if not conversations:
        raise UserError(f"warm_start.conversations: {file} holds no conversation")
    return conversations


def _messages(row: dict[str, Any], place: str) -> list[Message]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{place}: field `messages` is not a list with at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UserError(f"{place}: a message has no text `content`")
        if message.get("role") not in _ROLES:
            raise UserError(f"{place}: role {message.get('role')!r} is not one of {', '.join(sorted(_ROLES))}")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{place}: no assistant message, so there is nothing to imitate")
    return messages


def draw_conversations(
    conversations: Sequence[list[Message]], batch_size: int, step: int, seed: int
) -> list[list[Message]]:
    """The batch of a step: consecutive parts of a shuffled order, shuffled anew for every pass over the data."""
    batch: list[list[Message]] = []
    orders: dict[int, list[int]] = {}
    for index in range(step * batch_size, (step + 1) * batch_size):
        passes, place = divmod(index, len(conversations))
        if passes not in orders:
            orders[passes] = list(range(len(conversations)))
            random.Random(derive_seed(seed, "conversations", passes)).shuffle(orders[passes])
        batch.append(conversations[orders[passes][place]])
    return batch


def imitation_segment(
    messages: Sequence[Message], supervised: Callable[[Sequence[Message]], tuple[list[int], list[bool]]]
) -> Segment:
    """A segment whose targets are the assistant's tokens, the end of each turn included."""
    tokens, loss_mask = supervised(messages)
    return Segment(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.asarray(loss_mask, bool),
        behaviour_logprobs=np.zeros(len(tokens), np.float32),
        turns=(Turn("observation", 0, len(tokens)),),
    )
