"""The embedded corpus as play meets it: its questions are valid tasks, its conversations are in the compact format."""

import json
from pathlib import Path

from jaxsp.envs import corpus
from jaxsp.envs.corpus.generate import to_jsonl
from jaxsp.rollout.prompts import PROMPTS, Proposal
from jaxsp.rollout.validity import rejection_reason
from jaxsp.rollout.warm_start import NUM_DOCUMENTS, embedded_conversations

FOLDER = Path(str(corpus.__file__)).parent
COMPACT = PROMPTS["compact"]


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


DOCUMENTS = {document["text"]: document for document in read("documents.jsonl")}
CONVERSATIONS = [row["messages"] for row in read("warm_start.jsonl")]


def test_every_embedded_question_is_a_valid_task_and_grounded_in_its_document():
    for document in [*DOCUMENTS.values(), *read("heldout_documents.jsonl")]:
        for question, answer, answer_type in document["questions"]:
            proposal = Proposal(question, answer, answer_type)
            assert rejection_reason(proposal, document["text"], is_grounded_only=True) is None, question


def test_another_answer_to_an_embedded_quantity_question_is_hardly_ever_grounded():
    num_grounded = num_tried = 0
    for document in DOCUMENTS.values():
        for question, answer, answer_type in document["questions"]:
            if answer_type == "integer":
                wrong = [str(number) for number in range(30) if str(number) != answer]
                reasons = [rejection_reason(Proposal(question, a, "integer"), document["text"], True) for a in wrong]
                num_grounded += reasons.count(None)
                num_tried += len(wrong)
    assert num_grounded / num_tried < 0.15  # the other fact's numbers are left


def test_the_committed_warm_start_is_the_one_that_the_module_writes():
    assert (FOLDER / "warm_start.jsonl").read_text(encoding="utf-8") == to_jsonl(embedded_conversations())


def test_warm_start_replies_are_read_as_valid_tasks_of_their_document_and_as_their_type():
    assert len(CONVERSATIONS) == 2 * NUM_DOCUMENTS
    for asks_question, asks_type in zip(CONVERSATIONS[::2], CONVERSATIONS[1::2], strict=True):
        (document,) = [text for text in DOCUMENTS if text in asks_type[0]["content"]]
        *prompt, reply = asks_type
        assert prompt == COMPACT.type_messages(document)
        answer_type = COMPACT.read_type(reply["content"])
        assert isinstance(answer_type, str)

        *prompt, reply = asks_question
        assert prompt == COMPACT.question_messages(document, answer_type)
        proposal = COMPACT.read_question(reply["content"], answer_type)
        assert isinstance(proposal, Proposal)
        assert rejection_reason(proposal, document, is_grounded_only=True) is None
        assert [proposal.question, proposal.answer, answer_type] in DOCUMENTS[document]["questions"]


def test_the_warm_start_holds_different_training_documents_and_no_reply_of_a_reasoner():
    prompts = [messages[0]["content"] for messages in CONVERSATIONS]
    assert len(set(prompts)) == len(prompts)
    for messages in CONVERSATIONS:
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert "boxed" not in messages[1]["content"]
    heldout = {row["question"] for row in read("heldout.jsonl")}
    assert not any(question in messages[1]["content"] for question in heldout for messages in CONVERSATIONS)
