import pytest

from jaxsp.verifiers.choice import check_choice
from jaxsp.verifiers.math_answer import Verdict


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("(C)", "C"),
        ("C.", "C"),
        ("C) Berlin", "C"),
        (r"\text{C}", "C"),
        (r"\textbf{(C)}", "C"),
        ("Answer: C", "C"),
        ("The answer is C, not A", "C"),
        ("c", "C"),
        ("(c)", "C"),
        ("c) a dog", "C"),
        ("A, C", "A"),
    ],
)
def test_the_first_letter_that_stands_alone_is_the_answer(answer, letter):
    assert check_choice(letter, rf"\boxed{{{answer}}}") == Verdict(True, "ok", answer)
    assert check_choice("D", rf"\boxed{{{answer}}}") == Verdict(False, "ok", answer)


def test_only_the_last_box_counts_and_letters_outside_do_not():
    assert check_choice("B", r"A. C. \boxed{A} \boxed{B} so not C").correct
    assert check_choice(r"\boxed{B}", r"\boxed{B}").correct


@pytest.mark.parametrize("answer", ["Berlin", "a dog", "E", "42", "AB", r"\alpha", r"\mathcal{}"])
def test_a_box_without_a_letter_is_unparseable(answer):
    assert check_choice("A", rf"\boxed{{{answer}}}") == Verdict(False, "unparseable", answer)


def test_a_reference_without_a_letter_is_unparseable():
    assert check_choice("Berlin", r"\boxed{B}").status == "unparseable"


@pytest.mark.parametrize("response", ["B", r"\boxed{}", ""])
def test_without_a_box_there_is_no_answer(response):
    assert check_choice("B", response) == Verdict(False, "no_answer", None)
