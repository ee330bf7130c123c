import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.verifiers.math_answer import Verdict, check_math, is_parseable_expression, last_boxed, quick_math


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{3}.", "3"),
        (r"\boxed{1} and then \boxed{2}, done", "2"),
        (r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{ \fbox{ \boxed{3} } }", "3"),
        (r"\boxed{x = \boxed{3} + 1}", r"x = \boxed{3} + 1"),
        (r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}"),
        (r"\fbox{8}", "8"),
        (r"\\boxed{7}", "7"),
        (r"\boxed {5}", "5"),
        (r"{ } } { \boxed{3} }", "3"),
        (r"\boxed{3} no wait, \boxed{4", "3"),
        (r"\boxed{", None),
        (r"\boxed{\boxed{", None),
        ("boxed{3}", None),
        (r"\boxed 3", None),
        ("", None),
        (r"\boxed{3} \boxed{}", ""),
        (r"\boxed{  }", ""),
    ],
)
def test_the_last_complete_box_is_found(text, expected):
    assert last_boxed(text) == expected


@given(st.text(alphabet=r"\{}boxed 1", max_size=60))
def test_any_text_has_a_box_or_none(text):
    content = last_boxed(text)
    assert content is None or content in text
    assert last_boxed(text + r" \boxed{1}") == "1" or text.endswith("\\")


TRUE = [
    ("1/2", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\frac12"),
    ("1/2", "2/4"),
    (r"$\frac{1}{2}$", "0.5"),
    (r"\boxed{1/2}", "0.5"),
    ("1/3", "0.333333"),
    ("1000", "1,000"),
    ("1,000", "1000"),
    ("1000", "1{,}000"),
    ("1000", r"1\,000"),
    ("1000", "1 000"),
    ("1000", "1e3"),
    ("0.0015", "1.5e-3"),
    ("-5", "-5"),
    ("-5", "- 5"),
    ("-5", "\N{MINUS SIGN}5"),
    ("5", "+5"),
    ("3", "03"),
    ("3", "3.0"),
    ("5", "5."),
    ("5", "$5$"),
    ("5", r"\(5\)"),
    ("5", "\n 5 \n"),
    ("5", r"5 \text{ cm}"),
    ("5", "5 kg"),
    ("12", "12 apples"),
    ("5", r"\$5"),
    ("50%", "0.5"),
    ("50", r"50\%"),
    (r"\{1,2\}", "2, 1"),
    ("(1, 2)", "(1,2)"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x²", "x^2"),
    ("7/2", "3 1/2"),
    ("-3.5", r"-3\frac{1}{2}"),
    ("1024", "2^{10}"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\text{north}", r"\text{north}"),
    ("true", "true"),
]

FALSE = [
    ("1/3", "0.333"),
    ("0.5", "50"),
    ("1000", "1.000"),
    ("1000", "1"),
    ("5", "-5"),
    ("5", "5, 6"),
    ("6", r"5 \text{ or } 6"),
    ("(1,2)", "(2,1)"),
    ("x=5", "y=5"),
    ("x", "y"),
    ("0", "1 000"),  # Math-Verify alone reads 1 x 0
    ("1e3", "3"),
    ("2", "3 1/2"),  # and (3 + 1) / 2 here
    ("north", "thorn"),  # and products of letters here
    ("true", "false"),
    ("100000000000000000000", "100000000000000000001"),
    (r"\pi", "3.14"),
]


@pytest.mark.parametrize(("reference", "answer"), TRUE)
def test_equal_answers_are_correct(reference, answer):
    response = rf"Some thoughts, \boxed{{0}} perhaps. In the end: \boxed{{{answer}}} and trailing text, 77."
    assert check_math(reference, response) == Verdict(True, "ok", answer.strip())


@pytest.mark.parametrize(("reference", "answer"), FALSE)
def test_different_answers_are_wrong(reference, answer):
    assert check_math(reference, rf"\boxed{{{answer}}}") == Verdict(False, "ok", answer)


def test_only_the_last_box_counts():
    assert not check_math("3", r"\boxed{3} or rather \boxed{4}").correct
    assert check_math("3", r"\boxed{4} or rather \boxed{\boxed{3}}").correct


@pytest.mark.parametrize("response", ["", "The answer is 3.", r"\boxed{}", r"\boxed{3} and \boxed{ }", r"\boxed{3"])
def test_without_a_box_there_is_no_answer_even_where_the_text_has_it(response):
    assert check_math("3", response) == quick_math("3", response) == Verdict(False, "no_answer", None)


@pytest.mark.parametrize(
    ("reference", "answer"), [("5", "?"), ("?", "5"), ("46", "12 34"), ("5", r"\frac{}{}x^"), ("true", "5")]
)
def test_what_does_not_parse_is_unparseable(reference, answer):
    assert check_math(reference, rf"\boxed{{{answer}}}") == Verdict(False, "unparseable", answer)


def test_the_reference_is_math_verifys_gold_side():
    # 1 < x < 2 accepts the interval as an answer; the interval does not accept the inequality.
    assert check_math("1<x<2", r"\boxed{(1,2)}").correct
    assert not check_math("(1,2)", r"\boxed{1<x<2}").correct


INTEGER_LIKE = st.one_of(
    st.integers(-(10**18), 10**18).map(str),
    st.integers(0, 10**9).map(lambda value: f"{value:,}"),
    st.integers(-20, 20).map(lambda value: f"{value:04d}"),
    st.sampled_from(["-0", "+7", "7.", "$7$", "7.0", "1 000", "10 00", "7%", "x"]),
)


@given(INTEGER_LIKE, INTEGER_LIKE)
@settings(deadline=None, max_examples=100)
def test_the_quick_path_never_differs_from_the_slow_one(reference, answer):
    for gold in (reference, answer):
        quick = quick_math(gold, rf"\boxed{{{answer}}}")
        assert quick is None or quick == check_math(gold, rf"\boxed{{{answer}}}")


def test_the_quick_path_settles_plain_integers():
    assert quick_math("1,000", r"\boxed{1000.}") == Verdict(True, "ok", "1000.")
    assert quick_math("7", r"\boxed{-7}") == Verdict(False, "ok", "-7")
    assert quick_math("7", r"\boxed{7.0}") is None
    assert quick_math("1/2", r"\boxed{1}") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x^2 + 1", True),
        (r"\frac{a}{b}", True),
        ("$5$", True),
        ("50%", True),
        ("", False),
        ("?", False),
        ("12 34", False),
        (r"\frac{", False),
        ("x +", False),
    ],
)
def test_only_what_is_an_expression_parses(text, expected):
    assert is_parseable_expression(text) is expected
