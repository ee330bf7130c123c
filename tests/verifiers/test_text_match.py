import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsp.verifiers.math_answer import Verdict
from jaxsp.verifiers.text_match import check_text, normalise_text


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("Paris", "paris"),
        ("New York", "  new\n york. "),
        ("the Nile", "Nile"),
        ("Nile", "The Nile"),
        ("an owl", "owl"),
        ("Paris", r"\text{Paris}"),
        ("Paris", r"\textbf{\text{Paris}}"),
        ("sodium chloride", r"\text{sodium}\ \text{chloride}"),
        ("Paris", '"Paris"'),
        ("Paris", "\N{LEFT DOUBLE QUOTATION MARK}Paris\N{RIGHT DOUBLE QUOTATION MARK}"),
        ("Paris", "**Paris**"),
        ("Paris", "(Paris)"),
        ("x", "$x$"),
        ("50%", r"50\%"),
        ("Straße", "STRASSE"),
        ("A1", "\uff21\uff11"),
        ("caf\u00e9", "cafe\u0301"),
        ("well-known", "well\N{EN DASH}known"),
    ],
)
def test_texts_equal_up_to_form_are_correct(reference, answer):
    assert check_text(reference, rf"\boxed{{London}} \boxed{{{answer}}}, I think") == Verdict(
        True, "ok", answer.strip()
    )


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("Paris", "Paris, France"),
        ("C", "C++"),
        ("5", "-5"),
        ("50", "50%"),
        ("cafe", "caf\u00e9"),
        ("north east", "east north"),
        ("the", "an"),
        ("Lord of the Rings", "Lord of Rings"),
    ],
)
def test_different_texts_are_wrong(reference, answer):
    assert check_text(reference, rf"\boxed{{{answer}}}") == Verdict(False, "ok", answer)


@pytest.mark.parametrize("response", ["Paris", "", r"\boxed{}", r"\boxed{...}"])
def test_without_an_answer_in_a_box_there_is_none(response):
    assert check_text("Paris", response) == Verdict(False, "no_answer", None)


def test_a_reference_of_punctuation_alone_is_unparseable():
    assert check_text("...", r"\boxed{Paris}").status == "unparseable"


@given(st.text(max_size=30))
def test_white_space_and_case_never_matter(text):
    assert normalise_text(f" {text}\n") == normalise_text(text)
    assert normalise_text(normalise_text(text).upper()) == normalise_text(normalise_text(text))
