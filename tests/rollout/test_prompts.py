r"""Prompts and their readers are tested as pairs: what a prompt asks for is what its reader takes."""

import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxsp.envs.corpus.quantities import number_pairs
from jaxsp.rollout.prompts import PROMPTS, AnswerType, Proposal, Rejection
from jaxsp.rollout.prompts.compact import format_question
from jaxsp.rollout.prompts.full import first_json_object
from jaxsp.rollout.validity import rejection_reason
from jaxsp.verifiers.math_answer import Verdict
from jaxsp.verifiers.verify import ANSWER_KINDS, KINDS

FULL, COMPACT = PROMPTS["full"], PROMPTS["compact"]
DOCUMENT = "Braces {like} these and 100% of %s stay as they are."
CHOICE = "Which is prime?\nA) 4\nB) 6\nC) 7\nD) 8"
GOOD: dict[AnswerType, tuple[str, str]] = {
    "integer": ("How many legs do 3 spiders have?", "24"),
    "expression": ("What is half of x?", r"\frac{x}{2}"),
    "string": ("Which river runs through Cairo?", "Nile"),
    "choice": (CHOICE, "C"),
}
WRONG = {"integer": "25", "expression": "x", "string": "Rhine", "choice": "A"}


def text_of(messages) -> str:
    (message,) = messages
    assert message["role"] == "user"
    return message["content"]


def verdict_on(reply: str, answer: str, answer_type: AnswerType) -> Verdict:
    kind = KINDS[ANSWER_KINDS[answer_type]]
    verdict = kind.quick(answer, reply) or (kind.slow(answer, reply) if kind.slow else None)
    assert verdict is not None
    return verdict


def asked_json(prompt: str) -> str:
    """The JSON example at the end of a full prompt."""
    return prompt[prompt.index("\n{", prompt.index("Reply with" if "Reply with" in prompt else "Then reply")) :]


def filled(answer_type, question: str, answer) -> dict:
    """The JSON object that the full question prompt shows, with question and answer put in."""
    fields, _ = json.JSONDecoder().raw_decode(asked_json(text_of(FULL.question_messages("", answer_type))).lstrip())
    names = (
        ("multiple_choice_question", "multiple_choice_correct") if answer_type == "choice" else ("question", "answer")
    )
    assert all(name in fields for name in names)
    return {**fields, **dict(zip(names, (question, answer), strict=True))}


# --- what is asked for is what is read


@pytest.mark.parametrize("answer_type", GOOD)
def test_the_full_type_call_reads_every_choice_that_its_prompt_offers(answer_type):
    example = asked_json(text_of(FULL.type_messages(DOCUMENT)))
    assert example.count("true or false") == 2
    is_choice = answer_type == "choice"
    named = "null" if is_choice else f'"{answer_type.capitalize()}"'
    reply = example.replace("true or false", json.dumps(is_choice), 1).replace(
        "true or false", json.dumps(not is_choice)
    )
    offer = '"Integer" or "Expression" or "String" or null'
    assert offer in reply and named in offer
    assert FULL.read_type(reply.replace(offer, named)) == answer_type


@pytest.mark.parametrize("answer_type", GOOD)
def test_the_full_question_call_reads_the_json_that_its_prompt_shows(answer_type):
    reply = "First I think about {it}.\n" + json.dumps(filled(answer_type, *GOOD[answer_type]), indent=1)
    assert FULL.read_question(reply, answer_type) == Proposal(*GOOD[answer_type], answer_type)


@pytest.mark.parametrize("answer_type", GOOD)
def test_an_example_copied_unchanged_is_never_a_valid_task(answer_type):
    read = FULL.read_question(asked_json(text_of(FULL.question_messages(DOCUMENT, answer_type))), answer_type)
    assert isinstance(read, Proposal) and rejection_reason(read, DOCUMENT, False)


@pytest.mark.parametrize("answer_type", GOOD)
def test_a_declined_question_is_an_empty_one(answer_type):
    reply = json.dumps({name: "" for name in filled(answer_type, "", "")})
    read = FULL.read_question(reply, answer_type)
    assert isinstance(read, Proposal) and rejection_reason(read, DOCUMENT, False) == "empty_question"


def test_the_compact_type_call_reads_every_word_that_its_prompt_offers():
    offer = text_of(COMPACT.type_messages(DOCUMENT)).splitlines()[-1]
    words = re.findall(r"\w+", offer.replace(" or ", " "))
    assert [COMPACT.read_type(word) for word in words] == ["integer", "string", "choice", "expression"]
    assert [COMPACT.read_type(f" {word.lower()}.\n") for word in words] == [COMPACT.read_type(word) for word in words]


@pytest.mark.parametrize("answer_type", GOOD)
def test_the_compact_question_call_reads_what_its_prompt_asks_for(answer_type):
    question, answer = GOOD[answer_type]
    asked = text_of(COMPACT.question_messages(DOCUMENT, answer_type)).splitlines()[-1]
    if answer_type == "choice":
        assert "A) B) C) D)" in asked
        question = question.replace("\n", " ")
    proposal = COMPACT.read_question(format_question(question, answer), answer_type)
    assert isinstance(proposal, Proposal) and proposal == Proposal(question, answer, answer_type)
    assert rejection_reason(proposal, DOCUMENT, False) is None


@pytest.mark.parametrize(
    ("name", "form"), [("full", r"So the answer is \boxed{%s}."), ("compact", r"9 + 2 = \boxed{%s}")]
)
@pytest.mark.parametrize("answer_type", GOOD)
def test_a_reply_as_the_reasoner_prompt_asks_for_it_is_read_by_the_verifier(name, form, answer_type):
    question, answer = GOOD[answer_type]
    messages = PROMPTS[name].reasoner_messages(question)
    assert question in messages[-1]["content"]
    assert any(r"\boxed{" in message["content"] for message in messages)
    for given_answer, is_right in ((answer, True), (WRONG[answer_type], False)):
        verdict = verdict_on(form % given_answer, answer, answer_type)
        assert (verdict.correct, verdict.status) == (is_right, "ok")


def test_the_compact_reasoner_prompt_is_a_right_sum_and_a_right_difference_and_then_the_question():
    *examples, asked = COMPACT.reasoner_messages("How many?")
    assert asked == {"role": "user", "content": "How many?"}
    assert [message["role"] for message in examples] == ["user", "assistant"] * 2
    signs = []
    for question, reply in zip(examples[::2], examples[1::2], strict=True):
        match = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)\. \\boxed\{(\d+)\}", reply["content"])
        assert match is not None
        first, sign, second, found, result = match.groups()
        assert found == result
        assert re.findall(r"\d+", question["content"]) == [first, second]  # the result is not told
        assert int(result) == (int(first) + int(second) if sign == "+" else int(first) - int(second))
        assert verdict_on(reply["content"], result, "integer").correct
        signs.append(sign)
    assert signs == ["+", "-"]


@pytest.mark.parametrize("name", PROMPTS)
def test_challenger_prompts_hold_the_document_unchanged_and_the_reasoners_the_question(name):
    prompts = PROMPTS[name]
    assert DOCUMENT in text_of(prompts.type_messages(DOCUMENT))
    for answer_type in GOOD:
        assert DOCUMENT in text_of(prompts.question_messages(DOCUMENT, answer_type))
    assert DOCUMENT in prompts.reasoner_messages(DOCUMENT)[-1]["content"]  # a question may hold braces too


# --- the full readers


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('Well: {"a": 1} and {"a": 2}', {"a": 1}),
        ('<think>{"a": 0} or so</think>\n{"a": 1}', {"a": 1}),
        ('<think>x</think> {"a": 0} <think>y</think> {"a": 1}', {"a": 1}),
        ('```json\n{"a": {"b": {}}}\n```', {"a": {"b": {}}}),
        (r'so \frac{1}{2} of {these} is {"a": "}{"}', {"a": "}{"}),
        ('{"a": "she said \\"{\\" twice"}', {"a": 'she said "{" twice'}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{broken {"a": 1}', {"a": 1}),
        ('{"a": 1', None),
        ("[1, 2]", None),
        ("", None),
        ("{", None),
        ('{"a": 1}</think>', None),
    ],
)
def test_the_first_balanced_object_after_the_thinking_is_read(reply, expected):
    assert first_json_object(reply) == expected


@pytest.mark.parametrize(
    "latex",
    [
        r"\frac{1}{2}",
        r"\sqrt{2}",
        r"\beta \times \theta",
        r"\rho + \nu",
        r"\(x\) \neq \nabla f",
        r"\underline{x}",
        r"\{1\}",
    ],
)
def test_latex_in_json_reads_the_same_with_and_without_doubled_backslashes(latex):
    doubled = latex.replace("\\", "\\\\")
    assert first_json_object(f'{{"a": "{latex}"}}') == first_json_object(f'{{"a": "{doubled}"}}') == {"a": latex}


def test_real_escapes_in_json_are_kept():
    assert first_json_object(r'{"a": "x\nA) \"b\"\tC \u00e9 \/ \\", "b": 1}') == {"a": 'x\nA) "b"\tC é / \\', "b": 1}


@pytest.mark.parametrize(
    "reply",
    ['{"a":' * 5000, '{"a":' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{" * 20_000],
    ids=["deep_objects", "deep_lists", "long_number", "many_braces"],
)
def test_a_reply_that_runs_away_has_no_json(reply):
    assert first_json_object(reply) is None


@settings(deadline=None)
@given(st.text(st.sampled_from('{}[]":,\\ \nabu0123456789-eE.</think>'), max_size=60))
def test_no_reply_makes_a_reader_raise(reply):
    for prompts in PROMPTS.values():
        assert isinstance(prompts.read_type(reply), str | Rejection)
        for answer_type in GOOD:
            assert isinstance(prompts.read_question(reply, answer_type), Proposal | Rejection)


PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\\"))


@settings(deadline=None)
@given(st.dictionaries(PRINTABLE, PRINTABLE, min_size=1))
def test_any_object_in_text_is_read_back(fields):
    written = json.dumps(fields, ensure_ascii=False)
    assume("</think>" not in written)  # it ends the thinking wherever it stands: an object that holds it is cut
    assert first_json_object(f"I think {{so}}.\n{written}\nDone.") == fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"suitable_for_mcq": True, "suitable_for_free_form": False, "best_answer_type": None}, "choice"),
        ({"suitable_for_mcq": True, "suitable_for_free_form": False, "best_answer_type": "Integer"}, "choice"),
        ({"suitable_for_mcq": False, "suitable_for_free_form": True, "best_answer_type": "string"}, "string"),
        ({"suitable_for_mcq": True, "suitable_for_free_form": True, "best_answer_type": "String"}, "no_type"),
        ({"suitable_for_mcq": False, "suitable_for_free_form": False, "best_answer_type": "String"}, "no_type"),
        ({"suitable_for_mcq": False, "suitable_for_free_form": True, "best_answer_type": None}, "no_type"),
        ({"suitable_for_mcq": False, "suitable_for_free_form": True, "best_answer_type": "Boolean"}, "no_type"),
        ({"suitable_for_mcq": "false", "suitable_for_free_form": "true", "best_answer_type": "String"}, "no_type"),
        ({"suitable_for_free_form": True, "best_answer_type": "String"}, "no_type"),
    ],
)
def test_exactly_one_of_the_two_kinds_of_task_must_be_chosen(fields, expected):
    read = FULL.read_type(json.dumps(fields))
    assert (read.reason if isinstance(read, Rejection) else read) == expected


@pytest.mark.parametrize(
    ("answer_type", "fields", "reason"),
    [
        ("integer", None, "no_json"),
        ("integer", {}, "missing_field"),
        ("integer", {"question": "Q?"}, "missing_field"),
        ("integer", {"question": ["Q?"], "answer": "1"}, "missing_field"),
        ("integer", {"question": "Q?", "answer": None}, "missing_field"),
        ("integer", {"question": "Q?", "answer": True}, "missing_field"),
        ("integer", {"question": "Q?", "answer": {"value": 1}}, "missing_field"),
        ("integer", {"question": "Q?", "answer": "1", "answer_type": "String"}, "wrong_type"),
        ("string", {"question": "Q?", "answer": "1", "answer_type": "Integer"}, "wrong_type"),
        ("choice", {"question": CHOICE, "answer": "C"}, "missing_field"),
        ("choice", {"exam_question": "Q?", "multiple_choice_correct": "C"}, "missing_field"),
        ("string", {"multiple_choice_question": CHOICE, "multiple_choice_correct": "C"}, "missing_field"),
    ],
)
def test_the_full_question_call_rejects_with_a_reason(answer_type, fields, reason):
    reply = "I cannot." if fields is None else json.dumps(fields)
    assert FULL.read_question(reply, answer_type) == Rejection(reason)


def test_an_answer_may_be_a_json_number_and_spaces_around_texts_go():
    reply = json.dumps({"question": " Q? \n", "answer": 12, "answer_type": "INTEGER"})
    assert FULL.read_question(reply, "integer") == Proposal("Q?", "12", "integer")


# --- the compact readers


@pytest.mark.parametrize("reply", ["", "numbers", "number word", "I choose number", "integer", "number\nnumber"])
def test_a_compact_type_reply_is_one_of_the_words_and_nothing_else(reply):
    assert COMPACT.read_type(reply) == Rejection("no_type")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Question: Q?",
        "Answer: 1",
        "Q?\n1",
        "Question: Q?\n\nAnswer: 1",
        "Question: Q?\nAnswer: 1\nAnswer: 2",
        "Sure. Question: Q?\nAnswer: 1",
        "Question: Q? Answer: 1",
        "Question: \nAnswer: ",
        "question: Q?\nanswer: 1",
    ],
)
def test_a_compact_question_reply_is_two_lines_and_nothing_else(reply):
    assert COMPACT.read_question(reply, "integer") == Rejection("not_in_format")


def test_a_compact_answer_loses_its_final_full_stop():
    assert COMPACT.read_question("\nQuestion:  Q? \nAnswer: 7. \n", "integer") == Proposal("Q?", "7", "integer")


def test_the_worked_examples_use_no_held_out_pair_of_numbers():
    shown = "\n".join(message["content"] for message in COMPACT.reasoner_messages("?"))
    held_out = number_pairs(is_held_out=True)
    signs = {"+": held_out["add"], "-": held_out["take"]}
    examples = re.findall(r"(\d+) ([+-]) (\d+) =", shown)
    assert len(examples) == 2
    for first, sign, second in examples:
        assert (int(first), int(second)) not in signs[sign]
