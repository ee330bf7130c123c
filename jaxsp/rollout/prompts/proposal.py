"""What a challenger's reply is read into."""

from dataclasses import dataclass
from typing import Literal

Messages = list[dict[str, str]]
AnswerType = Literal["choice", "integer", "expression", "string"]


@dataclass(frozen=True)
class Proposal:
    """A question that can be asked without its document, and its answer. A choice's text lists its options A to D."""

    question: str
    answer: str
    answer_type: AnswerType


@dataclass(frozen=True)
class Rejection:
    """Why a reply is not a valid task, as a short name that is counted in the metrics."""

    reason: str
