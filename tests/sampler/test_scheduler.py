import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_sampler import text_of

from jaxsp.config import UserError
from jaxsp.sampler.scheduler import (
    STOP_IDS_PER_SLOT,
    Ending,
    bucket,
    check_request,
    context_buckets,
    find_ending,
    make_slots,
    plan_prefill,
    prompt_buckets,
    row_buckets,
)
from jaxsp.trajectory import GenerateRequest
from tests.tiny import decode_bytes


def test_buckets_ascend_and_end_at_the_limit():
    assert row_buckets(1) == (1,)
    assert row_buckets(32) == (1, 4, 16, 32)
    assert row_buckets(64) == (1, 4, 16, 64)
    assert context_buckets(40, 16) == (48,)
    assert context_buckets(300, 16) == (256, 304)
    assert context_buckets(1024, 16) == (256, 512, 1024)
    assert context_buckets(700, 512) == (512, 1024)
    assert prompt_buckets(8) == (8,)
    assert prompt_buckets(256) == (48, 64, 96, 128, 192, 256)
    assert bucket(65, (64, 128)) == 128
    with pytest.raises(ValueError, match="129"):
        bucket(129, (64, 128))


@given(st.lists(st.integers(1, 400), max_size=70), st.sampled_from([8, 50, 128, 1000]))
def test_a_prefill_plan_covers_each_chunk_once_within_the_budget(lengths, prefill_tokens):
    lengths = [min(length, prefill_tokens) for length in lengths]
    calls = plan_prefill(lengths, prefill_tokens)
    assert sorted(index for call in calls for index in call.chunks) == list(range(len(lengths)))
    for call in calls:
        assert len(call.chunks) <= call.num_rows <= max(1, len(call.chunks) * 4 / 3)
        assert call.num_rows * call.length <= prefill_tokens
        assert max(lengths[index] for index in call.chunks) <= call.length


def request(**settings) -> GenerateRequest:
    return GenerateRequest(**{"tokens": (1, 2), "seed": 0, "max_tokens": 6, **settings})


def check(given: GenerateRequest) -> None:
    check_request(given, max_context=64, max_positions=128, vocab_size=160)


def ending(tokens, num_checked=0, **settings):
    found = find_ending(request(**settings), tokens, num_checked, text_of)
    return found and (found.num_tokens, found.text, found.finish_reason)


def test_a_sample_goes_on_until_something_ends_it():
    assert ending([7, 8, 9]) is None
    assert ending([7, 8, 9], stop_ids=(5,), stop_strings=("x",)) is None


def test_a_stop_id_ends_the_sample_and_is_part_of_it():
    assert ending([7, 5, 9], stop_ids=(5,)) == (2, "007005", "stop")
    assert ending([7, 5, 9, 6], stop_ids=(6, 5)) == (2, "007005", "stop")
    many = tuple(range(100, 100 + STOP_IDS_PER_SLOT))
    assert ending([7, 5, 9], stop_ids=(*many, 5)) == (2, "007005", "stop")


def test_max_tokens_ends_the_sample():
    assert ending([1, 2, 3, 4, 5, 6]) == (6, "001002003004005006", "length")
    assert ending([1, 2, 3, 4, 5, 6], stop_ids=(6,)) == (6, "001002003004005006", "stop")
    assert ending([1, 2, 3, 4, 5, 6, 9], stop_ids=(9,)) == (6, "001002003004005006", "length")


def test_a_stop_string_may_begin_in_an_earlier_token_and_chunk():
    # "123" "456" "789": "345" is complete with the second token, and the text ends before it.
    assert ending([123, 456, 789], stop_strings=("345",)) == (2, "12", "stop")
    assert ending([123, 456, 789], num_checked=1, stop_strings=("345",)) == (2, "12", "stop")
    assert ending([123, 456, 789], stop_strings=("3456789",)) == (3, "12", "stop")
    assert ending([123, 456, 789], stop_strings=("123",)) == (1, "", "stop")


def test_stop_strings_that_stand_before_min_tokens_do_not_count():
    options = {"stop_strings": ("7",), "min_tokens": 2}
    assert ending([7], **options) is None
    assert ending([7, 8], **options) is None
    assert ending([7, 8, 7], **options) == (3, "00700800", "stop")
    assert ending([7, 7], **options) == (2, "00700", "stop")


def test_a_stop_string_counts_from_min_tokens_on_where_its_first_bytes_came_before():
    given = request(stop_strings=("é",), min_tokens=2)
    assert find_ending(given, [*"aé".encode()], 0, decode_bytes) == Ending(3, "a", "stop")
    assert find_ending(given, [*"é".encode()], 0, decode_bytes) == Ending(2, "", "stop")
    assert find_ending(given, [*"éa".encode()], 0, decode_bytes) == Ending(2, "", "stop")
    broken = request(stop_strings=("\N{REPLACEMENT CHARACTER}",), min_tokens=3)
    assert find_ending(broken, [*b"a\xffb"], 0, decode_bytes) is None


def test_a_choice_ends_where_nothing_can_follow():
    choices = ((3, 4), (5,))
    assert ending([3], choices=choices) is None
    assert ending([3, 4], choices=choices) == (2, "003004", "stop")
    assert ending([5], choices=choices) == (1, "005", "stop")


def test_of_stop_string_and_stop_id_the_first_to_complete_wins():
    assert ending([123, 5, 456], stop_ids=(5,), stop_strings=("456",)) == (2, "123005", "stop")
    assert ending([123, 456, 5], stop_ids=(5,), stop_strings=("456",)) == (2, "123", "stop")
    assert ending([123, 456], stop_strings=("56", "34")) == (2, "12", "stop")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tokens": ()}, "tokens"),
        ({"tokens": (3, 160)}, "160"),
        ({"tokens": (3, -1)}, "-1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-44}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"top_p": 1e-46}, "top_p"),
        ({"min_p": 1e-46}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"stop_ids": (3, -1)}, "stop_ids: -1 is no token's id"),
        ({"stop_ids": (2**31,)}, "stop_ids: 2147483648 is no token's id"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": ((160, 1.0),)}, "logit_bias: id 160"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias: nan of token 1"),
        ({"min_tokens": 7}, "min_tokens = 7 is not between 0 and max_tokens = 6"),
        ({"min_tokens": 2, "stop_ids": tuple(range(9))}, "stop_ids: with min_tokens"),
        ({"choices": ((1,), (1, 2))}, r"choices: the choice \[1\] begins another"),
        ({"choices": ((1, 160),)}, "choices: id 160"),
        ({"choices": ((1,) * 7,)}, "max_tokens = 6 is below the longest of the choices, 7"),
        ({"choices": ((1,),), "min_tokens": 1}, "min_tokens: choices"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_by_name(settings, named):
    with pytest.raises(UserError, match=named):
        check(request(**settings))


def test_a_request_that_cannot_fit_is_told_its_length_and_the_limit():
    with pytest.raises(UserError, match=r"70 tokens .*prompt 60 \+ max_tokens 10.*sampler\.max_context = 64"):
        check(request(tokens=(1,) * 60, max_tokens=10))
    check(request(tokens=(1,) * 60, max_tokens=4))


def test_slots_hold_64_bit_seeds_and_count_from_the_last_token():
    slots = make_slots(4, [(request(seed=-1, max_tokens=9), [7, 8]), (request(seed=2**35 + 3, top_k=2**40), [])])
    assert slots.seed[:2].tolist() == [[2**32 - 1, 2**32 - 1], [8, 3]]
    assert slots.last_token.tolist() == [8, 2, 0, 0]
    assert slots.length.tolist() == [3, 1, 0, 0]
    assert slots.token_index.tolist() == [2, 0, 0, 0]
    assert slots.num_left.tolist() == [7, 6, 0, 0]
    assert slots.is_active.tolist() == [True, True, False, False]
    assert slots.top_k[1] == 2**31 - 1


def test_a_stop_id_that_is_given_several_times_takes_one_place():
    given = request(min_tokens=2, stop_ids=(5,) * STOP_IDS_PER_SLOT + (6, 5, 7))
    check(given)
    slots = make_slots(1, [(given, [])])
    assert [token for token in slots.stop_ids[0] if token >= 0] == [5, 6, 7]
