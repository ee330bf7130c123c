import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.config import UserError
from jaxsp.rollout.conversations import draw_conversations, imitation_segment, read_conversations
from jaxsp.rollout.seeds import derive_seed

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\u2028there é"}]


def numbered(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": str(number)}] for number in range(count)]


def test_conversations_are_read_in_order_with_blank_lines_skipped(tmp_path):
    file = tmp_path / "conversations.jsonl"
    lines = [json.dumps({"messages": m}, ensure_ascii=False) for m in (HELLO, numbered(1)[0])]
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert read_conversations(str(file)) == [HELLO, numbered(1)[0]]


def test_the_embedded_warm_start_is_read_by_its_name():
    assert len(read_conversations("embedded")) >= 100


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "not a line of JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "`messages` is not a list"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": "Hi"}', "at least one message"),
        ('{"messages": [{"role": "assistant"}]}', "no text `content`"),
        ('{"messages": [{"role": "robot", "content": "Hi"}]}', "role 'robot' is not one of"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no assistant message"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line, said):
    file = tmp_path / "conversations.jsonl"
    file.write_text(json.dumps({"messages": HELLO}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=f"conversations.jsonl:2: .*{said}"):
        read_conversations(str(file))


def test_a_file_that_is_missing_or_holds_nothing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"warm_start\.conversations: .*none\.jsonl cannot be read"):
        read_conversations(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no conversation"):
        read_conversations(str(tmp_path / "empty.jsonl"))


@settings(deadline=None)
@given(count=st.integers(1, 12), batch_size=st.integers(1, 15), seed=st.integers(0, 5))
def test_every_pass_over_the_data_draws_each_conversation_once(count, batch_size, seed):
    steps = [draw_conversations(numbered(count), batch_size, step, seed) for step in range(count)]
    assert all(len(batch) == batch_size for batch in steps)
    drawn = [int(messages[0]["content"]) for batch in steps for messages in batch]
    for start in range(0, len(drawn), count):
        assert sorted(drawn[start : start + count]) == list(range(count))


def test_passes_differ_in_order_and_a_step_can_be_drawn_again():
    first, second = (draw_conversations(numbered(20), 20, step, 0) for step in (0, 1))
    assert first != second and first != numbered(20)
    assert draw_conversations(numbered(20), 20, 1, 0) == second
    assert draw_conversations(numbered(20), 20, 0, 1) != first


def test_the_targets_of_a_conversation_are_where_the_renderer_says():
    segment = imitation_segment(HELLO, lambda messages: ([5, 6, 7, 2], [False, False, True, True]))
    assert segment.tokens.tolist() == [5, 6, 7, 2] and segment.loss_mask.tolist() == [False, False, True, True]
    assert not segment.behaviour_logprobs.any()


def test_seeds_depend_on_every_part_and_lie_below_2_to_31():
    seeds = {derive_seed(a, b, name, c) for a in range(5) for b in range(5) for name in ("x", "y") for c in range(20)}
    assert len(seeds) == 5 * 5 * 2 * 20 and all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3) and derive_seed("a", "b") != derive_seed("ab")
    assert derive_seed(0, 3, "challenger", 1, 2) == 1506727523  # a run that is resumed elsewhere draws the same
