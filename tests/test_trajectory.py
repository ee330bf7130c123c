"""From a sample to what is trained on."""

import dataclasses

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


def test_arrays_of_a_segment_agree_and_its_first_token_is_no_target() -> None:
    good = segment_from_completion(REQUEST, COMPLETION)
    with pytest.raises(ValueError, match="differ in length: 4, 4, 2"):
        Segment(good.tokens, good.loss_mask, good.behaviour_logprobs[:2], ())
    with pytest.raises(ValueError, match="no logits before it"):
        Segment(good.tokens, ~good.loss_mask, good.behaviour_logprobs, ())
