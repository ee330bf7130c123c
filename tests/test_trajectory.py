"""From a sample to what is trained on."""

import dataclasses
import math

import pytest

from jaxsp.trajectory import Completion, GenerateRequest, Segment, Turn, segment_from_completion

REQUEST = GenerateRequest((5, 6), seed=0, max_tokens=4, temperature=0.5)
COMPLETION = Completion((7, 2), (-0.5, -0.25), "seven", "stop", 3)


def test_a_completion_becomes_a_segment_whose_sampled_tokens_are_the_targets() -> None:
    segment = segment_from_completion(REQUEST, COMPLETION)
    assert segment.tokens.tolist() == [5, 6, 7, 2]
    assert segment.loss_mask.tolist() == [False, False, True, True]
    assert segment.behaviour_logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert segment.turns == (Turn("observation", 0, 2), Turn("sampled", 2, 4, "stop", 3))
    assert segment.temperature == 0.5


@pytest.mark.parametrize(("field", "value"), [("top_k", 50), ("top_p", 0.9), ("min_p", 0.1)])
def test_a_truncated_distribution_cannot_be_trained_on(field: str, value: float) -> None:
    # Its log-probabilities are of the kept tokens alone, those of the learner of the whole vocabulary.
    request = dataclasses.replace(REQUEST, **{field: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=f"^{field} = {value} "):
        segment_from_completion(request, COMPLETION)
    # Greedy samples are of the untruncated distribution whatever these say.
    segment_from_completion(dataclasses.replace(request, temperature=0.0), COMPLETION)


def test_the_kept_mass_gives_back_the_logprobs_before_the_truncation() -> None:
    request = dataclasses.replace(REQUEST, top_p=0.9, wants_raw=True)
    completion = dataclasses.replace(COMPLETION, kept_mass=(0.5, 1.0))
    segment = segment_from_completion(request, completion)
    assert segment.behaviour_logprobs == pytest.approx([0, 0, -0.5 + math.log(0.5), -0.25])


@pytest.mark.parametrize(
    ("field", "value"), [("repetition_penalty", 1.2), ("logit_bias", ((3, 1.0),)), ("min_tokens", 2)]
)
def test_scores_that_the_learner_cannot_follow_are_not_trained_on(field: str, value: object) -> None:
    request = dataclasses.replace(REQUEST, wants_raw=True, **{field: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=f"^{field} = .* changes the distribution"):
        segment_from_completion(request, dataclasses.replace(COMPLETION, kept_mass=(1.0, 1.0)))


def test_a_choice_is_trained_on_among_the_tokens_that_were_possible() -> None:
    request = dataclasses.replace(REQUEST, choices=((7, 2), (7, 3), (8, 2)))
    assert segment_from_completion(request, COMPLETION).allowed_tokens == ((2, (7, 8)), (3, (2, 3)))
    assert segment_from_completion(REQUEST, COMPLETION).allowed_tokens == ()


def test_arrays_of_a_segment_agree_and_its_first_token_is_no_target() -> None:
    good = segment_from_completion(REQUEST, COMPLETION)
    with pytest.raises(ValueError, match="differ in length: 4, 4, 2"):
        Segment(good.tokens, good.loss_mask, good.behaviour_logprobs[:2], ())
    with pytest.raises(ValueError, match="no logits before it"):
        Segment(good.tokens, ~good.loss_mask, good.behaviour_logprobs, ())
