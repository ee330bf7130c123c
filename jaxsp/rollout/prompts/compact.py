"""The short prompts: one line in, one word or two lines out, so that a model of some hundred million parameters can
follow them after a short warm start. The structure is that of the full set: type, question, reasoner."""

import re

from jaxsp.rollout.prompts.proposal import AnswerType, Messages, Proposal, Rejection

TYPE_WORDS: dict[AnswerType, str] = {
    "integer": "number",
    "string": "word",
    "choice": "choice",
    "expression": "formula",
}
_TYPE_OF_WORD: dict[str, AnswerType] = {word: answer_type for answer_type, word in TYPE_WORDS.items()}
_ASKS = {
    "integer": "Write a question with a number as its answer.",
    "string": "Write a question with one word as its answer.",
    "choice": "Write a question with four options A) B) C) D).",
    "expression": "Write a question with a formula as its answer.",
}
_EXAMPLES: Messages = [
    {"role": "user", "content": "Mia has 4 cups and gets 3 more. How many cups does Mia have?"},
    {"role": "assistant", "content": "4 + 3 = 7. \\boxed{7}"},
    {"role": "user", "content": "Leo has 9 nuts and eats 4. How many nuts are left?"},
    {"role": "assistant", "content": "9 - 4 = 5. \\boxed{5}"},
]
_QUESTION = re.compile(r"Question:\s*([^\n]+)\nAnswer:\s*([^\n]+)")


def type_messages(document: str) -> Messages:
    return [{"role": "user", "content": f"Text: {document}\nNumber, word, choice or formula?"}]


def read_type(reply: str) -> AnswerType | Rejection:
    """The answer type that the reply's one word names."""
    word = reply.strip().lower().rstrip(".")
    return _TYPE_OF_WORD.get(word) or Rejection("no_type")


def question_messages(document: str, answer_type: AnswerType) -> Messages:
    return [{"role": "user", "content": f"Text: {document}\n{_ASKS[answer_type]}"}]


def format_question(question: str, answer: str) -> str:
    """The reply that `read_question` reads back."""
    return f"Question: {question}\nAnswer: {answer}"


def read_question(reply: str, answer_type: AnswerType) -> Proposal | Rejection:
    """The reply's two lines, nothing else allowed around them."""
    match = _QUESTION.fullmatch(reply.strip())
    if match is None:
        return Rejection("not_in_format")
    return Proposal(match[1].strip(), match[2].strip().rstrip("."), answer_type)


def reasoner_messages(question: str) -> Messages:
    """The question after two worked examples, one that adds and one that takes away, which show the form alone."""
    return [*_EXAMPLES, {"role": "user", "content": question}]
