import math
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_sampler import (
    assert_same_samples,
    generate_all,
    prompt,
    reference_logprobs,
    reference_sample,
    tiny_engine,
    tiny_params,
)

from jaxsp.sampler.score_edits import after_token, edit_scores, make_score_edits, seen_at_first
from jaxsp.trajectory import GenerateRequest

PARAMS = tiny_params()
MANY = tuple((token, 1.0) for token in range(20))


def edited(logits, request: GenerateRequest, sampled=()):
    edits = make_score_edits(2, [(request, sampled)], 8)
    assert edits is not None
    seen = seen_at_first(edits, len(logits))
    stop_ids = np.full((2, 8), -1, np.int32)
    stop_ids[0, : len(request.stop_ids)] = request.stop_ids
    scores = edit_scores(jnp.tile(jnp.asarray(logits, jnp.float32), (2, 1)), edits, seen, jnp.asarray(stop_ids))
    np.testing.assert_array_equal(scores[1], np.asarray(logits, np.float32))  # a row without a wish
    return np.asarray(scores[0])


def request(**settings) -> GenerateRequest:
    return GenerateRequest(**{"tokens": (1, 2), "seed": 0, "max_tokens": 6, **settings})


def test_a_batch_without_a_wish_has_no_edits():
    assert make_score_edits(2, [(request(), ()), (request(top_k=3, stop_ids=(1,)), (2,))], 8) is None


def test_the_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    found = edited([1.0, 4.0, -2.0, 3.0], request(repetition_penalty=2.0), (3,))
    np.testing.assert_allclose(found, [1, 4 / 2, -2 * 2, 3 / 2])


def test_a_bias_is_added_also_where_there_are_more_than_the_smallest_arrays_hold():
    np.testing.assert_allclose(edited([0.5] * 4, request(logit_bias=((1, 2.0), (3, -1.0)))), [0.5, 2.5, 0.5, -0.5])
    np.testing.assert_allclose(edited(np.zeros(30), request(logit_bias=MANY)), [1] * 20 + [0] * 10)


def test_stop_ids_cannot_be_drawn_before_min_tokens():
    wish = request(min_tokens=2, stop_ids=(0, 3))
    for sampled, is_banned in (((), True), ((1,), True), ((1, 1), False)):
        assert np.isneginf(edited([1.0] * 5, wish, sampled)).tolist() == [is_banned, False, False, is_banned, False]


def test_choices_leave_the_tokens_with_which_one_of_them_goes_on():
    wish = request(choices=((1, 2), (1, 3), (4,)))
    assert np.flatnonzero(np.isfinite(edited([0.0] * 6, wish))).tolist() == [1, 4]
    assert np.flatnonzero(np.isfinite(edited([0.0] * 6, wish, (1,)))).tolist() == [2, 3]


def test_on_the_device_edits_go_on_as_the_host_would_make_them_anew():
    wish = request(choices=((1, 2), (1, 3), (4,)), repetition_penalty=1.5)
    edits = make_score_edits(1, [(wish, ())], 8)
    assert edits is not None
    seen = seen_at_first(edits, 6)
    for sampled, is_leaf in (((1,), False), ((1, 3), True)):
        edits, seen, found_leaf = after_token(edits, seen, jnp.array(sampled[-1:]))
        anew = make_score_edits(1, [(wish, sampled)], 8)
        assert anew is not None
        assert (edits.node.tolist(), found_leaf.tolist()) == (anew.node.tolist(), [is_leaf])
        np.testing.assert_array_equal(seen, seen_at_first(anew, 6))


WISHES = [
    {"repetition_penalty": 1.8}, {"logit_bias": ((3, 5.0), (8, 4.0))}, {"min_tokens": 5, "stop_ids": tuple(range(8))},
    {"choices": ((3, 4, 5), (3, 6, 5), (9, 1)), "max_tokens": 3}, {"wants_raw": True, "top_p": 0.6},
    {"choices": ((3, 4, 5), (9, 1)), "max_tokens": 3, "wants_raw": True, "top_k": 1}, {},
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_samples_with_wishes_are_those_of_the_reference_alone_and_together(temperature):
    requests = [
        GenerateRequest(**{"tokens": prompt(i, 9), "seed": i, "max_tokens": 12, "temperature": temperature, **wish})
        for i, wish in enumerate(WISHES)
    ]
    engine = tiny_engine(PARAMS)
    expected = [reference_sample(PARAMS, each) for each in requests]
    assert_same_samples(generate_all(engine, requests), expected)
    for each, alone in zip(requests, expected, strict=True):
        assert_same_samples(generate_all(engine, [each]), [alone])


def test_wishes_of_new_values_compile_nothing_anew():
    engine = tiny_engine(PARAMS)

    def wave(seed: int) -> None:
        wishes: tuple[dict[str, Any], ...] = (
            {"repetition_penalty": 1 + seed / 9}, {"logit_bias": MANY[seed:]}, {"min_tokens": seed},
            {"choices": ((seed,), (seed + 1, 2))}, {},
        )  # fmt: skip
        generate_all(engine, [GenerateRequest(prompt(seed, 9), seed, 8, **wish) for wish in wishes])

    wave(1)
    warm = engine.num_compilations
    wave(2)
    wave(3)
    assert engine.num_compilations == warm


def test_choices_are_drawn_with_the_product_of_renormalised_probabilities():
    choices = ((3, 4, 5), (3, 6, 5), (9, 1))
    one = GenerateRequest(prompt(0, 9), 0, 3, choices=choices)
    expected = {}
    for choice in choices:
        logprobs = reference_logprobs(PARAMS, one, choice)
        possible = [[3, 9], [4, 6] if choice[0] == 3 else [1], [5]][: len(choice)]
        expected[choice] = sum(
            float(row[token] - np.logaddexp.reduce(row[allowed]))
            for row, token, allowed in zip(logprobs, choice, possible, strict=True)
        )
    assert math.isclose(sum(map(math.exp, expected.values())), 1, abs_tol=1e-5)
    completions = generate_all(
        tiny_engine(PARAMS, num_slots=64),
        [GenerateRequest(one.tokens, seed, 3, choices=choices) for seed in range(900)],
    )
    for completion in completions:
        assert completion.finish_reason == "stop"
        assert math.isclose(sum(completion.behaviour_logprobs), expected[completion.tokens], abs_tol=1e-5)
    counts = Counter(completion.tokens for completion in completions)
    wanted = np.array([math.exp(expected[choice]) for choice in choices])
    wanted *= 900 / wanted.sum()
    assert stats.chisquare([counts[choice] for choice in choices], wanted).pvalue > 1e-3


def test_a_kept_mass_is_what_the_truncation_took_from_the_logprobs():
    whole = GenerateRequest(prompt(1, 9), 4, 10, temperature=0.7)
    cut = GenerateRequest(prompt(1, 9), 4, 10, temperature=0.7, top_k=5, wants_raw=True)
    (completion,) = generate_all(tiny_engine(PARAMS), [cut])
    before = reference_logprobs(PARAMS, whole, completion.tokens)
    picked = before[np.arange(10), list(completion.tokens)]
    assert max(completion.kept_mass) < 0.99
    np.testing.assert_allclose(completion.behaviour_logprobs + np.log(completion.kept_mass), picked, atol=1e-5)
    raw = reference_logprobs(PARAMS, GenerateRequest(whole.tokens, 0, 10), completion.tokens)
    np.testing.assert_allclose(completion.raw_logprobs, raw[np.arange(10), list(completion.tokens)], atol=1e-5)
