"""A whole step of SPICE, played with scripted replies and the real prompts, readers and verifiers."""

import asyncio
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.rollout.collect import attempt_until_valid, play_spice
from jaxsp.rollout.prompts import PROMPTS, Proposal
from jaxsp.rollout.rewards import gaussian_variance
from jaxsp.trajectory import Task
from tests.rollout.spice_game import ASKS_TYPE, INVALID, Cups, Game, by_role, play, play_in, rewards_of, rules_of
from tests.tiny import ByteRenderer, ScriptedGenerate, make_setting

# --- rewards and groups


def test_a_pass_rate_of_k_eighths_pays_the_challenger_the_table_of_the_paper():
    cups = [Cups(2 + k, 20 + k) for k in range(9)]
    game = Game({c.document: [c.reply] for c in cups}, {c.question: k for k, c in enumerate(cups)})
    played = play(game, [c.document for c in cups], group_size=8, max_attempts=1, attempts_per_round=1)
    table = [0.0439, 0.3720, 0.8226, 0.9879, 1.0, 0.9879, 0.8226, 0.3720, 0.0439]
    assert [rewards for (rewards,) in rewards_of(played, "challenger")] == pytest.approx(table, abs=5e-5)
    assert rewards_of(played, "reasoner") == [[1.0] * k + [0.0] * (8 - k) for k in range(9)]
    assert [task.solve_rate for task in played.tasks] == [k / 8 for k in range(9)]


def test_a_whole_step_gives_groups_tasks_episodes_and_metrics():
    one, two = Cups(3, 4), Cups(5, 6)
    game = Game({one.document: [one.reply, INVALID, INVALID, one.reply], two.document: [INVALID]}, {one.question: 6})
    played = play(game, [one.document, two.document], max_attempts=8)

    half = gaussian_variance(0.5, 0.01)
    assert [(group.group_id, group.role) for group in played.groups] == [
        ("3/document0", "challenger"),
        ("3/document1", "challenger"),
        (played.groups[2].group_id, "reasoner"),
    ]
    # The six right ones of eight tries are the first answer set's four and two of the second's.
    trivial = gaussian_variance(1.0, 0.01)
    assert rewards_of(played, "challenger") == [[trivial, -0.1, -0.1, half], [-0.1] * 4]
    assert [t.status for t in played.groups[0].trajectories] == ["ok", "invalid", "invalid", "ok"]
    assert played.groups[0].trajectories[0].text == f"number\n{one.reply}"

    common = {"role": "challenger", "step": 3, "policy_version": 17, "answer_type": "integer"}
    valid = {**common, "text": one.question, "answer": "7", "source": "id-0", "is_valid": True, "reason": "ok"}
    invalid = {
        **common,
        "text": f"number\n{INVALID}",
        "answer": "",
        "answer_type": "",
        "is_valid": False,
        "reason": "not_in_format",
    }
    assert played.tasks == (
        Task(task_id="3/task0", solve_rate=1.0, **valid),
        Task(task_id="3/task1", source="id-0", **invalid),
        Task(task_id="3/task2", source="id-0", **invalid),
        Task(task_id="3/task3", solve_rate=0.5, **valid),
        *(Task(task_id=f"3/task{place}", source="id-1", **invalid) for place in range(4, 12)),
    )

    metrics = played.metrics
    assert (
        metrics["challenger/valid_frac"] == 2 / 12
    )  # the second document's eight attempts count, not only the four kept
    assert metrics["challenger/rejected_not_in_format_frac"] == 10 / 12
    assert metrics["challenger/attempts_mean"] == 6
    assert metrics["challenger/reward_mean"] == pytest.approx((trivial + half - 0.6) / 8)
    assert metrics["challenger/distinct_frac"] == 0.5
    assert metrics["reasoner/accuracy_frac"] == 6 / 8
    assert metrics["reasoner/mixed_frac"] == 0.5
    assert metrics["reasoner/tokens_mean"] == len("3 + 4 = \\boxed{7}.")  # the end of the reply counts
    num_tokens = 12 * len("number.") + 2 * len(one.reply + ".") + 10 * len(INVALID + ".")
    assert metrics["challenger/tokens_mean"] == pytest.approx(num_tokens / 12)
    assert metrics["reasoner/no_answer_frac"] == metrics["reasoner/timeout_frac"] == 0
    assert metrics["reasoner/truncated_frac"] == metrics["challenger/truncated_frac"] == 0


def test_a_question_that_nobody_solves_can_be_paid_apart_from_one_that_everybody_solves():
    solved, unsolved = Cups(3, 4), Cups(2, 6)
    game = Game({cups.document: [cups.reply] * 4 for cups in (solved, unsolved)}, {unsolved.question: 0})
    documents = [solved.document, unsolved.document]
    trivial = gaussian_variance(0, 0.01)
    assert rewards_of(play(game, documents), "challenger") == [[trivial] * 4, [trivial] * 4]
    game.times.clear()
    assert rewards_of(play(game, documents, unsolved_reward=-0.1), "challenger") == [[trivial] * 4, [-0.1] * 4]


def test_a_question_pays_less_the_more_attempts_of_its_document_ask_it():
    one, other, hard = Cups(3, 4), Cups(2, 6), Cups(5, 4)
    both = f"{one.document} {other.document}"
    replies = {
        both: [one.reply, other.reply, one.reply, one.reply], other.document: [other.reply, INVALID],
        hard.document: [hard.reply],
    }  # fmt: skip
    game = Game(replies, {hard.question: 0})
    played = play(game, list(replies), repetition_penalty=0.3, unsolved_reward=-0.1)
    trivial = gaussian_variance(0, 0.01)
    asked_by_many, asked_once, unsolved = rewards_of(played, "challenger")
    assert asked_by_many == pytest.approx([trivial - 0.2, trivial, trivial - 0.2, trivial - 0.2])
    assert asked_once == [trivial, -0.1, -0.1, -0.1]  # though another document's attempt asks the same
    assert unsolved == [-0.1] * 4
    assert [row["reward"] for row in played.episodes if row["role"] == "challenger"][:4] == asked_by_many


def test_episodes_hold_a_row_for_each_trajectory_with_texts_counts_rewards_and_reasons():
    cups = Cups(3, 4)
    game = Game({cups.document: [cups.reply, INVALID]}, {cups.question: 1})
    played = play(game, [cups.document], max_attempts=2, attempts_per_round=2)
    renderer, prompts = ByteRenderer(), PROMPTS["compact"]
    challenger, *reasoners, rejected = played.episodes
    type_prompt = renderer.prompt(prompts.type_messages(cups.document))
    question_prompt = renderer.prompt(prompts.question_messages(cups.document, "integer"))
    assert challenger == {
        "role": "challenger",
        "task_id": "3/task0",
        "document": "id-0",
        "text": f"number\n{cups.reply}",
        "num_prompt_tokens": len(type_prompt) + len(question_prompt),
        "num_sampled_tokens": len("number") + len(cups.reply) + 2,
        "finish_reason": "stop",
        "is_kept": True,
        "reward": gaussian_variance(0.25, 0.01),
        "reason": "ok",
        "solve_rate": 0.25,
        "answers_of": "3/task0",
    }
    assert (rejected["reason"], rejected["reward"], rejected["solve_rate"]) == ("not_in_format", -0.1, None)
    assert rejected["is_kept"] and rejected["answers_of"] is None
    assert len(reasoners) == 4
    assert reasoners[0] == {
        "role": "reasoner",
        "task_id": "3/task0",
        "question": cups.question,
        "reference": "7",
        "text": "3 + 4 = \\boxed{7}",
        "num_prompt_tokens": len(renderer.prompt(prompts.reasoner_messages(cups.question))),
        "num_sampled_tokens": len("3 + 4 = \\boxed{7}") + 1,
        "finish_reason": "stop",
        "reward": 1.0,
        "reason": "ok",
        "extracted": "7",
        "is_trained": True,
    }
    assert [row["reward"] for row in reasoners] == [1.0, 0.0, 0.0, 0.0]
    json.dumps(played.episodes)


def test_without_any_valid_task_the_whole_group_is_invalid_and_the_reasoner_has_nothing_to_do():
    cups = Cups(3, 4)
    played = play(Game({cups.document: [INVALID]}), [cups.document], max_attempts=9)
    assert rewards_of(played, "challenger") == [[-0.1] * 4] and not by_role(played, "reasoner")
    assert {t.status for t in played.groups[0].trajectories} == {"invalid"}
    assert not any(task.is_valid for task in played.tasks)
    assert played.metrics["challenger/valid_frac"] == 0 and played.metrics["challenger/attempts_mean"] == 9
    no_value = {name for name, value in played.metrics.items() if math.isnan(value)}
    assert no_value == {"challenger/distinct_frac", *(name for name in played.metrics if name.startswith("reasoner/"))}


def test_a_step_without_documents_plays_nothing():
    played = play(Game({}), [])
    assert (played.groups, played.tasks, played.episodes) == ((), (), [])
    assert all(math.isnan(value) for value in played.metrics.values())


def test_attempts_that_are_not_kept_are_recorded_but_neither_answered_nor_paid():
    cups = Cups(3, 4)
    game = Game({cups.document: [INVALID] * 4 + [cups.reply, INVALID, cups.reply, INVALID]}, {cups.question: 2})
    generate = ScriptedGenerate(game)
    played = play_in(make_setting(generate), [cups.document], max_attempts=8)
    (group,) = by_role(played, "challenger")
    assert len(group.trajectories) == 4 and len(played.tasks) == 8
    proposed = [row for row in played.episodes if row["role"] == "challenger"]
    assert [row["task_id"] for row in proposed] == [task.task_id for task in played.tasks]
    assert [row["reason"] for row in proposed] == [task.reason for task in played.tasks]
    # A quarter was valid, so one of four is kept.
    assert Counter(row["reason"] for row in proposed if row["is_kept"]) == {"ok": 1, "not_in_format": 3}
    for row, task in zip(proposed, played.tasks, strict=True):
        is_answered = row["is_kept"] and task.is_valid
        assert task.solve_rate == row["solve_rate"] == (0.5 if is_answered else None)
        assert row["answers_of"] == (task.task_id if is_answered else None)
        paid = gaussian_variance(0.5, 0.01) if is_answered else -0.1
        assert row["reward"] == (paid if row["is_kept"] else None)
    assert sum(request.max_tokens == 100 for request in generate.requests) == 4
    assert sum(row["role"] == "reasoner" for row in played.episodes) == 4
    assert played.metrics["challenger/valid_frac"] == 2 / 8
    assert played.metrics["challenger/reward_mean"] == pytest.approx((gaussian_variance(0.5, 0.01) - 0.3) / 4)


def test_shares_of_valid_and_of_each_rejection_add_up_to_one():
    cups = Cups(3, 4)
    attempts = [cups.reply, INVALID, "Question: Q?\nAnswer: x", cups.reply + " cups"]
    metrics = play(Game({cups.document: attempts}), [cups.document]).metrics
    rejected = {name: value for name, value in metrics.items() if name.startswith("challenger/rejected_")}
    assert rejected == {"challenger/rejected_not_in_format_frac": 0.25, "challenger/rejected_not_an_integer_frac": 0.5}
    assert metrics["challenger/valid_frac"] == 0.25


# --- attempts


@settings(deadline=None)
@given(first_valid=st.integers(1, 20), per_round=st.integers(1, 6), max_attempts=st.integers(1, 15))
def test_rounds_go_on_until_one_attempt_is_valid_or_n_are_made(first_valid, per_round, max_attempts):
    cups, other = Cups(3, 4), Cups(5, 6)
    game = Game({cups.document: [INVALID] * (first_valid - 1) + [cups.reply], other.document: [other.reply]})
    documents = [("a", cups.document), ("b", other.document)]
    rules = rules_of(attempts_per_round=per_round, max_attempts=max_attempts)
    setting = make_setting(ScriptedGenerate(game))
    late, early = asyncio.run(attempt_until_valid(documents, setting, rules, seed=0, step=0))
    assert len(late) == min(math.ceil(first_valid / per_round) * per_round, max_attempts)
    assert len(early) == min(per_round, max_attempts)
    assert any(isinstance(attempt.outcome, Proposal) for attempt in late) == (first_valid <= max_attempts)
    seeds = [attempt.calls[0].request.seed for attempt in late + early]
    assert len(set(seeds)) == len(seeds)


def test_progress_is_told_for_every_round_and_role():
    cups, told = Cups(3, 4), []
    game = Game({cups.document: [INVALID] * 5 + [cups.reply]})
    asyncio.run(
        play_spice(
            [("a", cups.document)],
            make_setting(ScriptedGenerate(game)),
            rules_of(max_attempts=8),
            seed=0,
            step=0,
            policy_version=0,
            on_progress=lambda *progress: told.append(progress),
        )
    )
    # Two rounds of four attempts with two calls each. Three of the eight are valid, so two of the four that are kept
    # (4 * 3 / 8, rounded to even), with four answers each.
    expected = [("challenger", done, 8) for _ in range(2) for done in range(9)]
    assert told == expected + [("reasoner", done, 8) for done in range(9)]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        rules_of(group_size=1)


# --- the reasoner's tasks


def four_tasks_of_one_document(**changes) -> tuple[list[Cups], dict]:
    """A document with four valid questions, solved 0, 2, 4 and 4 times of 4."""
    cups = [Cups(3 + k, 20) for k in range(4)]
    document = "A shelf is full of cups."
    game = {
        "attempts": {document: [c.reply for c in cups]},
        "num_right": {c.question: right for c, right in zip(cups, (0, 2, 4, 4), strict=True)},
    }
    return cups, {"game": game, "documents": [document], **changes}


def trained_questions(seed: int, **rules) -> list[str]:
    _, case = four_tasks_of_one_document()
    played = play(Game(**case["game"]), case["documents"], seed=seed, **rules)
    groups = [group.group_id for group in by_role(played, "reasoner")]
    return [task.text for group in groups for task in played.tasks if task.task_id == group]


def test_one_task_of_each_document_trains_the_reasoner_on_the_answers_already_sampled():
    cups = [Cups(3 + k, 20) for k in range(8)]
    documents = [f"Shelf {k} is full of cups." for k in range(4)]
    attempts = {documents[k]: [c.reply for c in (cups[k], cups[k + 4], cups[k], cups[k + 4])] for k in range(4)}
    generate = ScriptedGenerate(Game(attempts))
    played = play_in(make_setting(generate), documents)
    assert len(generate.requests) == 4 * 4 * 2 + 4 * 4 * 4  # nothing is sampled for training alone
    groups = by_role(played, "reasoner")
    sources = [task.source for group in groups for task in played.tasks if task.task_id == group.group_id]
    assert sources == ["id-0", "id-1", "id-2", "id-3"]
    asked = {request.tokens for request in generate.requests}
    for group in groups:
        assert len(group.trajectories) == 4
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert tuple(segment.tokens[~segment.loss_mask].tolist()) in asked
    trained = {row["task_id"] for row in played.episodes if row.get("is_trained")}
    assert trained == {group.group_id for group in groups}


def test_the_task_is_drawn_at_random_among_all_valid_ones():
    cups, _ = four_tasks_of_one_document()
    drawn = Counter(text for seed in range(40) for text in trained_questions(seed))
    assert set(drawn) == {c.question for c in cups} and sum(drawn.values()) == 40
    assert max(drawn.values()) < 20


def test_preferring_mixed_tasks_draws_the_one_that_is_solved_sometimes():
    cups, _ = four_tasks_of_one_document()
    drawn = [trained_questions(seed, prefers_mixed_tasks=True) for seed in range(20)]
    assert drawn == [[cups[1].question]] * 20


def test_preferring_mixed_tasks_takes_others_where_there_are_too_few():
    cups, _ = four_tasks_of_one_document()
    for seed in range(10):
        drawn = trained_questions(seed, prefers_mixed_tasks=True, tasks_per_document=2)
        assert len(set(drawn)) == 2 and cups[1].question in drawn


def test_more_tasks_per_document_are_as_many_as_there_are_different_questions():
    cups, _ = four_tasks_of_one_document()
    assert len(set(trained_questions(0, tasks_per_document=3))) == 3
    assert sorted(trained_questions(0, tasks_per_document=9)) == sorted(c.question for c in cups)


def test_no_question_trains_twice_in_a_step_though_several_documents_ask_it():
    one, two = Cups(3, 4), Cups(5, 6)
    attempts = {"First shelf.": [one.reply], "Second shelf.": [one.reply], "Third shelf.": [one.reply, two.reply]}
    for shares in (False, True):
        played = play(Game(attempts), list(attempts), shares_answers=shares, tasks_per_document=2)
        texts = {task.task_id: task.text for task in played.tasks}
        assert [texts[task_id] for task_id in played.trained_task_ids] == [one.question, two.question]
        assert [group.group_id for group in by_role(played, "reasoner")] == list(played.trained_task_ids)


def test_shared_answers_are_sampled_recorded_and_counted_once_for_equal_proposals():
    cups = Cups(3, 4)
    wrong = f"Question: {cups.question}\nAnswer: 8"
    attempts = {"First shelf.": [cups.reply, cups.reply, wrong, INVALID], "Second shelf.": [cups.reply]}
    num_answers, played = {}, {}
    for shares in (False, True):
        generate = ScriptedGenerate(Game(attempts, {cups.question: 4}))
        played[shares] = play_in(make_setting(generate), list(attempts), shares_answers=shares)
        num_answers[shares] = sum(request.max_tokens == 100 for request in generate.requests)
    assert num_answers == {False: 7 * 4, True: 2 * 4}
    # The first set of four answers is right for the answer 7, and the second, all zeros, is wrong for the answer 8.
    assert [task.solve_rate for task in played[True].tasks] == [1, 1, 0, None, 1, 1, 1, 1]
    for shares in (False, True):
        rows = [row for row in played[shares].episodes if row["role"] == "reasoner"]
        assert len(rows) == num_answers[shares]
        assert played[shares].metrics["reasoner/accuracy_frac"] == 4 / num_answers[shares]
        assert sum(row["is_trained"] for row in rows) == 4
    proposed = [row for row in played[True].episodes if row["role"] == "challenger"]
    first = ["3/task0", "3/task0", "3/task2", None]
    assert [row["answers_of"] for row in proposed] == [*first, *["3/task0"] * 4]


def test_the_same_words_asked_for_as_another_type_are_another_task():
    document, question = "One shelf.", "What is 3 cups and 4 cups?"

    def script(prompt: str, seed: int) -> str:
        if ASKS_TYPE in prompt:
            return "number" if seed % 2 else "word"
        return f"Question: {question}\nAnswer: 7" if document in prompt else "\\boxed{7.0}"

    played = play(script, [document], shares_answers=True, max_attempts=8, group_size=8, attempts_per_round=8)
    assert {task.answer_type for task in played.tasks} == {"integer", "string"}
    # 7.0 is the number 7, but not the text.
    assert {(task.answer_type, task.solve_rate) for task in played.tasks} == {("integer", 1), ("string", 0)}
