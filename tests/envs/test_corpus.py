import json
import re
from collections import Counter
from pathlib import Path

import pytest

from jaxsp.envs import corpus
from jaxsp.envs.corpus.definitions import DEFINITIONS, RELATION_QUESTIONS, RELATIONS
from jaxsp.envs.corpus.generate import embedded_files, to_jsonl
from jaxsp.envs.corpus.quantities import ADDING, KINDS, number_pairs, solve

FOLDER = Path(str(corpus.__file__)).parent


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


DOCUMENTS = read("documents.jsonl")
HELDOUT_DOCUMENTS = read("heldout_documents.jsonl")
HELDOUT = read("heldout.jsonl")


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


QUANTITY_TOPICS = ("quantities", "comparisons")


def asked(documents: list[dict], *topics: str) -> list[tuple[str, str, str]]:
    """Question, answer and answer type of every question of the documents on these topics."""
    return [tuple(row) for document in documents if document["topic"] in topics for row in document["questions"]]


# --- the files


@pytest.mark.parametrize("name", embedded_files())
def test_the_committed_files_are_those_that_the_generator_writes(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == to_jsonl(embedded_files()[name])


def test_there_are_at_least_three_hundred_documents_on_four_topics():
    assert len(DOCUMENTS) >= 300
    for documents in (DOCUMENTS, HELDOUT_DOCUMENTS):
        assert {document["topic"] for document in documents} == {*QUANTITY_TOPICS, "definitions", "relations"}
        assert all(document["questions"] for document in documents)


def test_no_document_is_there_twice():
    every = DOCUMENTS + HELDOUT_DOCUMENTS
    assert len({document["text"] for document in every}) == len({document["id"] for document in every}) == len(every)


def test_texts_are_plain_sentences_without_markup():
    texts = [document["text"] for document in DOCUMENTS + HELDOUT_DOCUMENTS]
    texts += [row["question"] for row in HELDOUT] + [row["answer"] for row in HELDOUT]
    for document in DOCUMENTS + HELDOUT_DOCUMENTS:
        assert re.fullmatch(r"([A-Z][a-z0-9 ,]*([A-Z][a-z0-9 ,]*)*\.( |$))+", document["text"]), document["text"]
        for question, answer, _ in document["questions"]:
            texts += [question, answer]
    for text in texts:
        assert re.fullmatch(r"[A-Za-z0-9 .,?)]+", text) and text == text.strip() and "  " not in text, text


def test_a_document_states_the_facts_that_its_questions_need():
    for documents in (DOCUMENTS, HELDOUT_DOCUMENTS):
        for document in documents:
            for question, answer, answer_type in document["questions"]:
                if answer_type == "choice":
                    answer = question.split(f"{answer}) ")[1].split(" ")[0]
                assert answer.lower() in re.findall(r"\w+", document["text"].lower())
                assert set(numbers(question)) <= set(numbers(document["text"]))


# --- right answers


def test_every_quantity_question_is_answered_rightly_by_solve():
    questions = asked(DOCUMENTS, *QUANTITY_TOPICS) + asked(HELDOUT_DOCUMENTS, *QUANTITY_TOPICS)
    questions += [(row["question"], row["answer"], "integer") for row in HELDOUT if row["kind"] in KINDS]
    assert len(questions) > 600
    for question, answer, answer_type in questions:
        assert (str(solve(question)), answer_type) == (answer, "integer"), question


def test_quantity_answers_follow_from_the_words_of_their_question():
    # An independent reading: what is added is told together, what is taken away never is.
    adding = re.compile(r"in all\?|altogether\?|cost together\?|together\?")
    for question, answer, _ in asked(DOCUMENTS, *QUANTITY_TOPICS):
        first, second = numbers(question)
        assert int(answer) == (first + second if adding.search(question) else first - second)


def test_every_quantity_fact_is_one_sentence_with_its_two_parts_and_their_result():
    # Grounding by sentence rests on this: the numbers of a question and its answer are those of one sentence.
    for document in DOCUMENTS + HELDOUT_DOCUMENTS:
        if document["topic"] in QUANTITY_TOPICS:
            facts = [numbers(sentence) for sentence in re.split(r"(?<=[.!?]) ", document["text"])]
            asked_for = [[*numbers(question), int(answer)] for question, answer, _ in document["questions"]]
            assert [fact for fact in facts if fact] == asked_for, document["text"]
            assert (
                len({number for fact in asked_for for number in fact}) == 6
            )  # so no number says which fact it is of but its own


def test_definitions_and_relations_are_answered_rightly():
    meanings = {meaning: term for entries in DEFINITIONS.values() for term, meaning in entries}
    assert len(meanings) == sum(map(len, DEFINITIONS.values()))  # no two words share a definition
    facts = {RELATION_QUESTIONS[pattern].format(a=a): b for pattern, entries in RELATIONS.items() for a, b in entries}
    questions = [row for topic in ("definitions", "relations") for row in asked(DOCUMENTS + HELDOUT_DOCUMENTS, topic)]
    questions += [(row["question"], row["answer"], row["answer_type"]) for row in HELDOUT if row["kind"] not in KINDS]
    for question, answer, answer_type in questions:
        if answer_type == "string":
            assert meanings[question.removeprefix("What do we call ").removesuffix("?")] == answer
        else:
            text, options = re.split(r" (?=A\) )", question)
            listed = dict(re.findall(r"([A-D])\) (\w+)", options))
            assert list(listed) == list("ABCD") and len(set(listed.values())) == 4
            assert listed[answer] == facts[text]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Anna has 3 cups and Ben has 4 cups. How many cups do both have?", 7),
        ("Anna has 9 cups and 4 pens. How many things does Anna have in total?", 13),
        ("Anna had 9 cups and lost 4 of them. How many cups remain?", 5),
        ("Anna is 4 years old and Ben is 9 years old. How many years younger is Anna than Ben?", 5),
        ("Anna left home with 3 pens. Ben gave 4 more to Anna. How many pens does Anna have in all?", 7),
        ("A pen costs 3 dollars in all. A ball costs 9 dollars. How much more is the ball than the pen?", 6),
        ("It is warm! Anna has 3 cups and 4 pens. How many things is that altogether?", 7),
        ("If Anna had 9 cups and gave 4 of them to Ben, how many cups are left?", 5),
        ("Anna has 3 red cups and 4 blue cups. How many cups does Anna have overall?", 7),
        ("A pen costs 3 dollars and a ball costs 9 dollars. How many dollars are there when combined?", 12),
        ("Anna has 3 red cups and 4 blue cups. How many cups does Anna have?", 7),
        ("There are 3 red cups and 4 blue cups in the box of Ben. How many cups are in the box?", 7),
        ("There are 3 red cups and 4 blue cups in the box of Ben. How many cups are there in the box of Ben?", 7),
        ("Anna had 9 cups and gave 4 of them to Ben. How many cups does Anna now have?", 5),
        ("Anna had 9 cups on Monday and lost 4 of them on the way to Ben. How many cups does Anna still have?", 5),
    ],
)
def test_solve_reads_what_the_last_sentence_asks_for(question, answer):
    assert solve(question) == answer


@pytest.mark.parametrize(
    "question",
    [
        "",
        "What is the capital of France?",
        "Anna has 3 cups. How many cups does Anna have in all?",  # one number
        "Anna has 3 cups, 4 pens and 5 balls. How many things does Anna have in all?",  # three
        "Anna has 3 cups and 4 pens. How many cups does Anna have?",  # neither adding nor taking
        "Anna had 9 cups and lost 4. How many cups were left in all?",  # both
        "Anna has 3 cups and 4 pens in all.",  # no question
        "Anna has 3 cups and 4 pens. How many things does Anna have in all",
        "Anna has 3 cups and 4 pens. How many tall things does Anna have?",  # `all` within a word
        "Anna had 4 cups and lost 9 of them. How many cups are left?",  # cannot be
        "Anna has 9 cups and 4 pens. How many cleft things does Anna have?",
        "Anna had 9 cups and gave 4 of them to Ben. How many cups does Ben now have?",  # nobody told
        "Anna had 9 cups and gave 4 of them to Ben. How many cups did Anna have?",  # told, no step
        "Anna has 3 red cups and 4 blue cups. How many red cups does Anna have?",
        "There are 3 red cups and 4 blue cups in the box of Ben. How many cups are in the box of Anna?",
        "Of the 9 cups on the table, Anna took 4. How many cups does Anna have?",
    ],
)
def test_solve_has_no_answer_to_what_is_not_a_question_of_one_step(question):
    assert solve(question) is None


# --- held out


Pairs = dict[str, set[frozenset[int]]]
"""Pairs of numbers in no order, apart for questions that add and that take away."""


def pairs_used(questions: list[str]) -> Pairs:
    used: Pairs = {"add": set(), "take": set()}
    for question in questions:
        first, second = numbers(question)
        used["add" if solve(question) == first + second else "take"].add(frozenset((first, second)))
    return used


def test_no_held_out_number_pair_is_in_a_training_document_in_either_order():
    training = pairs_used([question for question, _, _ in asked(DOCUMENTS, *QUANTITY_TOPICS)])
    heldout = pairs_used(
        [row["question"] for row in HELDOUT if row["kind"] in KINDS]
        + [question for question, _, _ in asked(HELDOUT_DOCUMENTS, *QUANTITY_TOPICS)]
    )
    for operation in ("add", "take"):
        in_training, held_out = (
            set(map(frozenset, number_pairs(is_held_out)[operation])) for is_held_out in (False, True)
        )
        assert not in_training & held_out
        assert training[operation] <= in_training and heldout[operation] <= held_out
        assert len(heldout[operation]) >= 5  # some 28 pairs add and one in five is held out


def test_a_pair_and_its_mirror_image_are_held_out_together():
    for is_held_out in (False, True):
        pairs = set(number_pairs(is_held_out)["add"])
        assert pairs == {(second, first) for first, second in pairs}


def test_no_held_out_definition_or_relation_is_in_a_training_document():
    texts = [document["text"] for document in DOCUMENTS]
    meanings = {term: meaning for entries in DEFINITIONS.values() for term, meaning in entries}
    for row in HELDOUT:
        if row["kind"] == "definition":
            # The whole sentence: the held-out meaning of ice is a part of the training meaning of snow.
            assert not any(f"{row['answer']} is {meanings[row['answer']]}" in text.lower() for text in texts)
        elif row["kind"] == "relation":
            question, options = re.split(r" (?=A\) )", row["question"])
            option = dict(re.findall(r"([A-D])\) (\w+)", options))[row["answer"]]
            (pattern,) = [
                pattern.format(a=a, b=b)
                for pattern, entries in RELATIONS.items()
                for a, b in entries
                if (RELATION_QUESTIONS[pattern].format(a=a), b) == (question, option)
            ]
            assert not any(pattern.lower() in text.lower() for text in texts)


def test_no_held_out_document_or_question_is_in_training():
    training = {document["text"] for document in DOCUMENTS}
    training_questions = {question for document in DOCUMENTS for question, _, _ in document["questions"]}
    heldout_questions = {row["question"] for row in HELDOUT}
    assert not training & {document["text"] for document in HELDOUT_DOCUMENTS}
    assert not training_questions & heldout_questions
    assert len(heldout_questions) == len(HELDOUT) >= 100


def test_held_out_questions_are_of_every_kind_and_36_of_each_quantity_kind():
    counts = Counter(row["kind"] for row in HELDOUT)
    assert set(counts) == {*KINDS, "definition", "relation"}
    assert [counts[kind] for kind in KINDS] == [36] * len(KINDS)
    types = {row["kind"]: row["answer_type"] for row in HELDOUT}
    assert types == {**dict.fromkeys(KINDS, "integer"), "definition": "string", "relation": "choice"}


def test_what_is_taken_away_is_compared_in_the_documents_on_comparisons_and_only_there():
    for topic, asks in (("quantities", "left?"), ("comparisons", " than ")):
        differences = [
            q for q, answer, _ in asked(DOCUMENTS + HELDOUT_DOCUMENTS, topic) if int(answer) < max(numbers(q))
        ]
        assert differences and all(asks in question for question in differences)


def test_every_quantity_document_asks_for_one_sum_and_one_difference():
    for document in DOCUMENTS + HELDOUT_DOCUMENTS:
        if document["topic"] in QUANTITY_TOPICS:
            sums = [int(answer) == sum(numbers(question)) for question, answer, _ in document["questions"]]
            assert sorted(sums) == [False, True] and len(ADDING) == 2
