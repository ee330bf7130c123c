import asyncio
import dataclasses
import inspect
import json
import random

import pytest

from jaxsp.rollout.prompts import PROMPTS, Proposal, Rejection
from jaxsp.rollout.roles import Sampling, Setting, answer, propose
from jaxsp.rollout.seeds import derive_seed
from tests.tiny import END, ByteRenderer, ScriptedGenerate, decode_bytes, make_setting

DOCUMENT = "Anna has 3 red cups and 4 blue cups, so Anna has 7 cups in all."
QUESTION = "Anna has 3 red cups and 4 blue cups. How many cups does Anna have in all?"
GOOD = f"Question: {QUESTION}\nAnswer: 7"
LONG = Sampling(max_tokens=1000, temperature=1.0)
ASKS_TYPE = "Number, word, choice or formula?"


def challenger(type_reply: str = "number", question_reply: str = GOOD) -> ScriptedGenerate:
    return ScriptedGenerate(lambda prompt, seed: type_reply if ASKS_TYPE in prompt else question_reply)


def attempt_with(generate: ScriptedGenerate, sampling: Sampling = LONG, is_grounded_only: bool = False, **changes):
    (attempt,) = asyncio.run(propose(make_setting(generate, **changes), [DOCUMENT], [5], sampling, is_grounded_only))
    return attempt


def answers_to(generate: ScriptedGenerate, proposals: list[Proposal], sampling: Sampling = LONG, **changes):
    seeds = list(range(len(proposals)))
    return asyncio.run(answer(make_setting(generate, **changes), proposals, seeds, sampling))


def test_an_attempt_is_a_type_call_and_a_question_call_of_that_type():
    generate = challenger()
    attempt = attempt_with(generate)
    assert attempt.outcome == Proposal(QUESTION, "7", "integer")
    prompts = [decode_bytes(call.request.tokens) for call in attempt.calls]
    assert ASKS_TYPE in prompts[0] and "Write a question with a number as its answer." in prompts[1]
    assert all(DOCUMENT in prompt for prompt in prompts)
    assert attempt.text == f"number\n{GOOD}"
    assert [call.request for call in attempt.calls] == generate.requests


def test_requests_carry_the_sampling_and_what_stops_a_reply():
    renderer = ByteRenderer(stop_ids=(END, 7), stop_strings=("\nUser:",))
    attempt = attempt_with(challenger(), Sampling(77, 0.5), renderer=renderer)
    for call in attempt.calls:
        request = call.request
        assert (request.max_tokens, request.temperature) == (77, 0.5)
        assert (request.stop_ids, request.stop_strings) == ((END, 7), ("\nUser:",))
        assert (request.top_k, request.top_p, request.min_p) == (0, 1.0, 0.0)


def test_every_call_of_every_attempt_draws_with_noise_of_its_own():
    generate = challenger()
    asyncio.run(propose(make_setting(generate), [DOCUMENT] * 3, [5, 6, 5], LONG, False))
    type_5, type_6, again_type_5, question_5, question_6, again_question_5 = [r.seed for r in generate.requests]
    assert len({5, 6, type_5, type_6, question_5, question_6}) == 6
    assert (type_5, question_5) == (again_type_5, again_question_5)


def test_no_question_is_asked_for_after_an_unreadable_type():
    attempt = attempt_with(challenger(type_reply="maybe"))
    assert attempt.outcome == Rejection("no_type") and len(attempt.calls) == 1


@pytest.mark.parametrize(
    ("type_reply", "question_reply", "reason"),
    [
        ("number", "What is it?", "not_in_format"),
        ("number", "Question: What is it?\nAnswer: cups", "not_an_integer"),
        ("word", "Question: What is it?\nAnswer: one of the many", "too_many_words"),
        ("choice", "Question: What is it?\nAnswer: A", "not_four_options"),
        ("formula", "Question: What is it?\nAnswer: ???", "not_an_expression"),
        ("number", "Question: According to the text, what is it?\nAnswer: 7", "refers_to_source"),
    ],
)
def test_a_rejected_attempt_has_a_reason(type_reply, question_reply, reason):
    assert attempt_with(challenger(type_reply, question_reply)).outcome == Rejection(reason)


def test_an_expression_that_parses_is_valid():
    outcome = attempt_with(challenger("formula", "Question: What is half of x?\nAnswer: \\frac{x}{2}")).outcome
    assert outcome == Proposal("What is half of x?", r"\frac{x}{2}", "expression")


def test_grounding_is_asked_for_only_where_the_rules_say_so():
    made_up = challenger(question_reply="Question: Anna has 5 cups and 6 pens. How many things?\nAnswer: 11")
    assert isinstance(attempt_with(made_up).outcome, Proposal)
    assert attempt_with(made_up, is_grounded_only=True).outcome == Rejection("not_grounded")


def test_a_truncated_type_is_never_read():
    attempt = attempt_with(challenger(type_reply="number"), Sampling(len("number"), 1.0))
    assert attempt.calls[0].completion.text == "number"  # only the end of the reply is missing
    assert attempt.outcome == Rejection("truncated") and len(attempt.calls) == 1


@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_truncated_question_is_never_read_though_it_looks_whole(prompts):
    type_reply, whole = "number", f"Question: {QUESTION}\nAnswer: 7"
    if prompts == "full":
        type_reply = json.dumps(
            {"suitable_for_mcq": False, "suitable_for_free_form": True, "best_answer_type": "Integer"}
        )
        whole = json.dumps({"question": QUESTION, "answer": "7", "answer_type": "Integer"})

    def script(prompt: str, seed: int) -> str:
        is_type_call = ASKS_TYPE in prompt or "suitable_for_mcq" in prompt
        return type_reply if is_type_call else whole

    assert len(whole) > len(type_reply) + 1
    assert isinstance(attempt_with(ScriptedGenerate(script), prompts=prompts).outcome, Proposal)
    cut = attempt_with(ScriptedGenerate(script), Sampling(len(whole), 1.0), prompts=prompts)
    assert cut.calls[1].completion.text == whole
    assert cut.outcome == Rejection("truncated")


def test_an_answer_is_asked_for_by_the_reasoners_prompt_alone_and_the_verdict_is_on_the_reply():
    question = Proposal(QUESTION, "7", "integer")
    right, wrong = r"3 + 4 = \boxed{7}", r"3 + 4 = \boxed{8}"
    answers = answers_to(ScriptedGenerate(lambda prompt, seed: wrong if seed else right), [question, question])
    for given, reply in zip(answers, (right, wrong), strict=True):
        # The examples' own boxes stand in the prompt, where no verdict looks.
        assert given.call.request.tokens == ByteRenderer().prompt(PROMPTS["compact"].reasoner_messages(QUESTION))
        assert given.call.completion.text == reply and given.verdict.correct == (reply == right)
        segment = given.call.segment
        assert segment.tokens[segment.loss_mask].tolist() == [*reply.encode(), END]


def test_a_reply_without_an_answer_is_not_saved_by_the_boxes_of_the_worked_examples():
    (given,) = answers_to(ScriptedGenerate(lambda prompt, seed: "3 + 4 = 7"), [Proposal(QUESTION, "7", "integer")])
    assert "\\boxed{7}" in decode_bytes(given.call.request.tokens)
    assert (given.verdict.correct, given.verdict.status) == (False, "no_answer")


def test_answers_and_attempts_come_back_in_the_order_of_their_requests_whatever_their_timing():
    rng = random.Random(0)
    generate = ScriptedGenerate(lambda prompt, seed: f"\\boxed{{{seed}}}", delay_s=lambda: rng.random() / 300)
    proposals = [Proposal(f"Question {number}?", str(number), "integer") for number in range(20)]
    answers = answers_to(generate, proposals)
    assert [given.verdict.extracted for given in answers] == [str(number) for number in range(20)]
    assert all(given.verdict.correct for given in answers)

    documents = [f"document {number}" for number in range(20)]
    generate = ScriptedGenerate(lambda prompt, seed: f"no {seed}", delay_s=lambda: rng.random() / 300)
    attempts = asyncio.run(propose(make_setting(generate), documents, list(range(20)), LONG, False))
    assert [attempt.text for attempt in attempts] == [f"no {derive_seed(number, 'type')}" for number in range(20)]


def test_every_type_call_ends_before_the_first_question_call_starts():
    rng, ended = random.Random(0), []

    def script(prompt: str, seed: int) -> str:
        return "number" if ASKS_TYPE in prompt else GOOD

    inner = ScriptedGenerate(script, delay_s=lambda: rng.random() / 300)

    async def generate(request):
        is_type_call = ASKS_TYPE in decode_bytes(request.tokens)
        assert is_type_call or len(ended) >= 10
        completion = await inner(request)
        ended.append(is_type_call)
        return completion

    asyncio.run(propose(make_setting(generate), [DOCUMENT] * 10, list(range(10)), LONG, False))
    assert ended == [True] * 10 + [False] * 10


def test_every_call_is_counted_when_it_is_done():
    told = []

    def count(done: int, total: int) -> None:
        told.append((done, total))

    def types(prompt: str, seed: int) -> str:
        return ("maybe" if "second" in prompt else "number") if ASKS_TYPE in prompt else GOOD

    setting = make_setting(ScriptedGenerate(types))
    asyncio.run(propose(setting, ["first", "second", "third"], [1, 2, 3], LONG, False, count))
    assert told == [(done, 6) for done in range(7)]  # a question that is never asked for is done too
    told.clear()
    asyncio.run(answer(setting, [Proposal(QUESTION, "7", "integer")] * 3, [1, 2, 3], LONG, count))
    assert told == [(done, 3) for done in range(4)]


def test_nothing_that_makes_a_reasoner_prompt_can_hold_a_document():
    # The only way in is the proposal, and a proposal holds what the challenger wrote.
    assert list(inspect.signature(answer).parameters) == ["setting", "proposals", "seeds", "sampling", "on_count"]
    assert {field.name for field in dataclasses.fields(Proposal)} == {"question", "answer", "answer_type"}
    assert not any("document" in field.name for field in dataclasses.fields(Setting))
    for prompts in PROMPTS.values():
        assert list(inspect.signature(prompts.reasoner_messages).parameters) == ["question"]
