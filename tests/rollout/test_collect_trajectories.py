"""What a step is made of: masks, statuses, no document where none may be, and the same again for the same seed."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from jaxsp.rollout.prompts import PROMPTS
from jaxsp.rollout.roles import Sampling
from jaxsp.verifiers.math_answer import Verdict
from tests.rollout.spice_game import (
    ASKS_TYPE,
    INVALID,
    Cups,
    Game,
    all_segments,
    asked_question,
    by_role,
    plain,
    play,
    play_in,
    rewards_of,
    worked,
)
from tests.tiny import END, ByteRenderer, ScriptedGenerate, check_here, decode_bytes, make_setting

# --- trajectories


def test_the_loss_is_on_the_sampled_tokens_and_on_nothing_else():
    one, two = Cups(3, 4), Cups(5, 6)
    game = Game({one.document: [one.reply, INVALID], two.document: [two.reply]}, {one.question: 3})
    generate = ScriptedGenerate(game, policy_version=17)
    sampled = {}

    async def recorded(request):
        sampled.setdefault(request.tokens, []).append(completion := await generate(request))
        return completion

    played = play_in(make_setting(recorded), [one.document, two.document])
    assert len(all_segments(played)) == 2 * 4 * 2 + 2 * 4
    for trajectory, segment in all_segments(played):
        num_prompt = int(np.argmax(segment.loss_mask))
        assert segment.loss_mask.tolist() == [False] * num_prompt + [True] * (len(segment.tokens) - num_prompt)
        completions = sampled[tuple(segment.tokens[:num_prompt].tolist())]
        match = [c for c in completions if c.tokens == tuple(segment.tokens[num_prompt:].tolist())]
        assert match and segment.tokens[-1] == END
        assert segment.behaviour_logprobs[num_prompt:].tolist() == list(match[0].behaviour_logprobs)
        assert not segment.behaviour_logprobs[:num_prompt].any()
        assert segment.temperature == (0.9 if trajectory.role == "reasoner" else 1.0)
        observed, turn = segment.turns
        assert (observed.kind, observed.start, observed.end) == ("observation", 0, num_prompt)
        assert (turn.kind, turn.start, turn.end) == ("sampled", num_prompt, len(segment.tokens))
        assert (turn.finish_reason, turn.policy_version) == ("stop", 17)


def test_the_worked_examples_of_a_reasoners_prompt_are_not_trained_on():
    cups = Cups(3, 4)
    played = play(Game({cups.document: [cups.reply]}), [cups.document])
    (group,) = by_role(played, "reasoner")
    prompt = ByteRenderer().prompt(PROMPTS["compact"].reasoner_messages(cups.question))
    assert decode_bytes(prompt).count("\\boxed{") == 2
    for trajectory in group.trajectories:
        (segment,) = trajectory.segments
        assert segment.tokens[~segment.loss_mask].tolist() == list(prompt)
        assert segment.tokens[segment.loss_mask].tolist() == [*b"3 + 4 = \\boxed{7}", END]
        assert trajectory.text == "3 + 4 = \\boxed{7}"


def test_a_challengers_trajectory_holds_both_its_calls():
    cups = Cups(3, 4)
    played = play(Game({cups.document: [cups.reply]}), [cups.document])
    for trajectory in played.groups[0].trajectories:
        type_call, question_call = trajectory.segments
        assert decode_bytes(type_call.tokens[type_call.loss_mask]) == "number"
        assert decode_bytes(question_call.tokens[question_call.loss_mask]) == cups.reply


def test_truncated_challengers_and_reasoners_are_counted_as_such():
    cups = Cups(3, 4)
    setting = make_setting(ScriptedGenerate(Game({cups.document: [cups.reply]})))
    cut = play_in(setting, [cups.document], challenger=Sampling(len(cups.reply), 1.0))
    assert {task.reason for task in cut.tasks} == {"truncated"} and not by_role(cut, "reasoner")
    assert {t.status for t in cut.groups[0].trajectories} == {"truncated"}
    assert rewards_of(cut, "challenger") == [[-0.1] * 4]
    assert cut.metrics["challenger/rejected_truncated_frac"] == cut.metrics["challenger/truncated_frac"] == 1
    for trajectory in cut.groups[0].trajectories:
        assert trajectory.segments[1].turns[1].finish_reason == "length"

    cut = play_in(setting, [cups.document], reasoner=Sampling(len(cups.solution) - 1, 1.0))  # no closing brace
    (group,) = by_role(cut, "reasoner")
    assert group.rewards.tolist() == [0.0] * 4 and {t.status for t in group.trajectories} == {"truncated"}
    assert cut.metrics["reasoner/truncated_frac"] == 1 and cut.metrics["reasoner/no_answer_frac"] == 1


def test_a_verdict_that_times_out_pays_nothing_and_is_told_from_a_wrong_answer():
    cups, calls = Cups(3, 4), Counter()

    async def check(proposal, reply):
        calls[proposal.question] += 1
        is_late = calls[proposal.question] == 2
        return Verdict(False, "timeout", "7") if is_late else await check_here(proposal, reply)

    generate = ScriptedGenerate(Game({cups.document: [cups.reply]}))
    played = play_in(make_setting(generate, check=check), [cups.document], max_attempts=1)
    (group,) = by_role(played, "reasoner")
    assert [t.status for t in group.trajectories] == ["ok", "timeout", "ok", "ok"]
    assert group.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert played.metrics["reasoner/timeout_frac"] == 0.25
    assert [row["reason"] for row in played.episodes if row["role"] == "reasoner"] == ["ok", "timeout", "ok", "ok"]


# --- no document reaches the reasoner


def five_word_windows(text: str) -> set[str]:
    words = "".join(c if c.isalnum() or c in "-\\" else " " for c in text).split()
    return {" ".join(words[start : start + 5]) for start in range(len(words) - 4)}


def marked_document(number: int) -> str:
    return " ".join(f"d{number}w{place}" for place in range(60)) + "."


def quoting_script(prompts: str):
    """A challenger that quotes seven words of its document in its question and, where it can, all of it beside."""

    def script(prompt: str, seed: int) -> str:
        words = [word.rstrip(".") for word in prompt.split() if word.startswith("d") and "w" in word]
        if len(words) < 60:
            return f"I say \\boxed{{{words[0]}}}"
        question = f"What of {seed} follows {' '.join(words[10:17])} in a list?"
        if prompts == "compact":
            return "word" if ASKS_TYPE in prompt else f"Question: {question}\nAnswer: {words[17]}"
        if "suitable_for_mcq" in prompt:
            return '{"suitable_for_mcq": false, "suitable_for_free_form": true, "best_answer_type": "String"}'
        fields = {"relevant_quotes": words, "question": question, "answer": words[17], "answer_type": "String"}
        return f"<think>{' '.join(words)}</think>{' '.join(words)}\n{json.dumps(fields)}"

    return script


@pytest.mark.parametrize("prompts", PROMPTS)
def test_no_reasoner_prompt_holds_text_of_a_document_but_for_what_the_question_quotes(prompts):
    documents = [marked_document(number) for number in range(5)]
    generate = ScriptedGenerate(quoting_script(prompts))
    setting = make_setting(generate, prompts)
    played = play_in(setting, documents, challenger=Sampling(9000, 1.0))
    windows = set.union(*map(five_word_windows, documents))
    questions = {task.text for task in played.tasks if task.is_valid}
    assert len(questions) == 5 * 4

    texts = [decode_bytes(request.tokens) for request in generate.requests]
    asked = [
        request
        for request, text in zip(generate.requests, texts, strict=True)
        if len(five_word_windows(text) & windows) < 50
    ]
    assert len(asked) == len(questions) * 4  # every other request is a challenger's, with the whole document
    expected = {setting.renderer.prompt(setting.prompts.reasoner_messages(question)) for question in questions}
    assert {request.tokens for request in asked} == expected  # so a prompt is a function of its question
    for request in asked:
        text = decode_bytes(request.tokens)
        (question,) = [question for question in questions if question in text]
        leaked = five_word_windows(text) & windows
        assert leaked == five_word_windows(question) & windows and len(leaked) == 3
    for group in by_role(played, "reasoner"):
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert len(five_word_windows(decode_bytes(segment.tokens)) & windows) == 3


# --- the same step again


def drawn_by_seed(prompt: str, seed: int) -> str:
    """Replies that depend on prompt and seed alone, as a sampler's do."""
    rng = random.Random(f"{prompt}/{seed}")
    if prompt.startswith("user\nText:"):
        if ASKS_TYPE in prompt:
            return rng.choice(["number"] * 5 + ["nothing"])
        return rng.choice([INVALID, INVALID, Cups(rng.randrange(2, 5), 30).reply])
    first = int(asked_question(prompt).split()[2])
    return worked(first, 30, first + rng.choice([30, 31]))


def test_the_same_arguments_give_the_same_step_however_quickly_replies_come():
    documents = [f"Shelf {number}." for number in range(5)]
    rules = {"attempts_per_round": 3, "max_attempts": 9}
    for shares in (False, True):
        first = plain(play(drawn_by_seed, documents, shares_answers=shares, **rules))
        for timing in range(3):
            delays = iter([random.Random(f"{timing}/{n}").random() / 300 for n in range(2000)])
            slow = play(drawn_by_seed, documents, delay_s=delays.__next__, shares_answers=shares, **rules)
            assert plain(slow) == first
    assert 0 < first[-1]["reasoner/accuracy_frac"] < 1 and 0 < first[-1]["challenger/valid_frac"] < 1


def test_another_seed_or_step_draws_other_samples():
    documents = ["Shelf one.", "Shelf two."]
    generates = [ScriptedGenerate(drawn_by_seed) for _ in range(3)]
    for generate, seed, step in zip(generates, (0, 1, 0), (3, 3, 4), strict=True):
        play_in(make_setting(generate), documents, seed=seed, step=step)
    seeds = [{request.seed for request in generate.requests} for generate in generates]
    assert not seeds[0] & seeds[1] and not seeds[0] & seeds[2]


def test_a_document_at_another_place_does_not_change_what_its_neighbour_draws():
    alone, beside = ScriptedGenerate(drawn_by_seed), ScriptedGenerate(drawn_by_seed)
    play_in(make_setting(alone), ["Shelf one."])
    play_in(make_setting(beside), ["Shelf one.", "Shelf two."])

    def challengers(generate):
        return [request for request in generate.requests if "Shelf one." in decode_bytes(request.tokens)]

    assert challengers(alone)[:4] == challengers(beside)[:4]
