"""What the roles of SPICE are told, and how their replies are read. Two sets: `full` and `compact`."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxsp.rollout.prompts import compact, full
from jaxsp.rollout.prompts.proposal import AnswerType, Messages, Proposal, Rejection


@dataclass(frozen=True)
class PromptSet:
    """`type_messages` and `question_messages` are the challenger's two calls, `reasoner_messages` the reasoner's one.

    The reasoner's messages are made from the question alone: it never sees the document.
    """

    type_messages: Callable[[str], Messages]
    read_type: Callable[[str], AnswerType | Rejection]
    question_messages: Callable[[str, AnswerType], Messages]
    read_question: Callable[[str, AnswerType], Proposal | Rejection]
    reasoner_messages: Callable[[str], Messages]


PROMPTS = {
    "full": PromptSet(
        full.type_messages, full.read_type, full.question_messages, full.read_question, full.reasoner_messages
    ),
    "compact": PromptSet(
        compact.type_messages,
        compact.read_type,
        compact.question_messages,
        compact.read_question,
        compact.reasoner_messages,
    ),
}

__all__ = ["PROMPTS", "AnswerType", "Messages", "PromptSet", "Proposal", "Rejection"]
