import pytest

from jaxsp.rollout.prompts import Proposal
from jaxsp.rollout.validity import MAX_QUESTION_CHARACTERS, rejection_reason

DOCUMENT = (
    "Anna has 3 red cups and 4 blue cups, so Anna has 7 cups in all. Ben had 9 pens and lost 4 of them, 5 are left. "
    "Cleo had 6 nuts and got 6 more, which makes 12."
)
SUM = "Anna has 3 red cups and 4 blue cups. How many cups does Anna have in all?"
OPTIONS = "Which is prime? A) 4 B) 6 C) 7 D) 8"


def reason(question: str, answer: str, answer_type, is_grounded_only: bool = False) -> str | None:
    return rejection_reason(Proposal(question, answer, answer_type), DOCUMENT, is_grounded_only)


@pytest.mark.parametrize(
    ("question", "answer", "answer_type"),
    [
        (SUM, "7", "integer"),
        ("What is 2 - 5?", "-3", "integer"),
        ("What is ten to the fourteenth?", "1" + 14 * "0", "integer"),
        ("Which river runs through Cairo?", "Nile", "string"),
        ("Who wrote it?", "Johann Sebastian Bach", "string"),
        ("What is half of x?", r"\frac{x}{2}", "expression"),
        (OPTIONS, "C", "choice"),
        ("Which does vitamin E. lack? A) 4 B) 6 C) 7 D) 8", "C", "choice"),  # an E that marks no option
        ("Which is in oil? A) vitamin E. B) iron C) zinc D) salt", "A", "choice"),
        ("Which is in oil? A) iron B) zinc C) salt D) vitamin E.", "D", "choice"),
        ("Which is in oil? A) iron B) zinc C) salt D) vitamin E. Choose.", "D", "choice"),
        ("Which is in oil? A. iron B. zinc C. salt D. vitamin E.", "D", "choice"),
        ("Which is in oil?\nA. iron\nB. zinc\nC. salt\nD. vitamin E. Choose.", "D", "choice"),
        ("Which is in oil?\nA) iron\nB) zinc\nC) salt\nD) tocopherol (vitamin E) only", "D", "choice"),
        ("Do vitamin D. and vitamin E. differ? A. no B. yes C. at times D. in name", "B", "choice"),
        ("**Which?**\n- **A.** one\n- **B.** two\n- **C.** three\n- **D.** four", "A", "choice"),
        ("Which?\nA. one\nB. two\nC. three\nD. four", "A", "choice"),
        ("Which?\n(A) one\n(B) two\n(C) three\n(D) four", "D", "choice"),
        ("Why?\nA: one\nB: two\nC: three\nD: four", "B", "choice"),
        ("What is the context of a textile?", "wool", "string"),  # words that only contain a forbidden one
    ],
)
def test_a_well_formed_task_is_valid(question, answer, answer_type):
    assert reason(question, answer, answer_type) is None


@pytest.mark.parametrize(
    "question",
    [
        "According to the provided passage, who ran?",
        "In the provided passage, who ran?",
        "What does the following text say?",
        "What is told in these two\nparagraphs and those documents?",
        "In the given\nattached documents, who ran?",
        "What do the passages have in common?",
        "Which stories? The stories tell it.",
        "Given text and numbers, what is x?",
        "Who is named in the text above?",
        "What does the figure show in the table below?",
        "What do the following tables list?",
        "Which value in the table is the largest?",
        "How many cases are in Figure 3?",
        "The table shows sales. What is their sum?",
        "According to the data, what is x?",
        "According to this recent report, what is x?",
        "What do the authors claim?",
    ],
)
def test_a_question_that_leans_on_its_source_is_rejected(question):
    assert reason(question, "7", "integer") == "refers_to_source"


@pytest.mark.parametrize(
    "question",
    [
        "According to the Pythagorean theorem, how long is c if a = 3 and b = 4?",
        "According to the ideal gas law, by what factor does the volume grow?",
        "Five plates lie on the table and 2 more are brought. How many plates are there?",
        "How many legs do a table and 3 chairs have?",
        "Eight guests sit at table 4. How many more sit at a round table of 15?",
        "How many novels did the author of Emma finish?",
        "What is the following number in 1, 3, 5?",
        "Ann wrote a story of 7 pages. How many pages is it?",
        "She figures that 3 and 4 make what?",
        "How many articles does a constitution of 3 parts with 7 articles each have?",
    ],
)
def test_a_question_that_only_shares_words_with_a_source_is_valid(question):
    assert reason(question, "7", "integer") is None


@pytest.mark.parametrize(
    ("question", "answer", "answer_type", "expected"),
    [
        ("", "7", "integer", "empty_question"),
        ("", "", "integer", "empty_question"),
        (SUM, "", "integer", "empty_answer"),
        ("x" * (MAX_QUESTION_CHARACTERS + 1), "7", "integer", "too_long"),
        ("What does the text say?", "7", "integer", "refers_to_source"),
        ("In this passage, who ran?", "Ben", "string", "refers_to_source"),
        ("From the given document, what is x?", "2", "integer", "refers_to_source"),
        ("In the ABOVE paragraph, what is x?", "2", "integer", "refers_to_source"),
        ("What does The Author claim?", "little", "string", "refers_to_source"),
        ("According to the study, what is x?", "2", "integer", "refers_to_source"),
        (SUM, "7 cups", "integer", "not_an_integer"),
        (SUM, "7.0", "integer", "not_an_integer"),
        (SUM, "1,000", "integer", "not_an_integer"),
        (SUM, "seven", "integer", "not_an_integer"),
        (SUM, "--7", "integer", "not_an_integer"),
        (SUM, "\N{ARABIC-INDIC DIGIT SEVEN}", "integer", "not_an_integer"),
        (SUM, 16 * "9", "integer", "not_an_integer"),
        ("Who wrote it?", "one of the Bachs", "string", "too_many_words"),
        (OPTIONS, "c", "choice", "not_a_letter"),
        (OPTIONS, "C)", "choice", "not_a_letter"),
        (OPTIONS, "7", "choice", "not_a_letter"),
        (OPTIONS + " E) 9", "C", "choice", "not_four_options"),
        (OPTIONS + " E) 9", "E", "choice", "not_a_letter"),
        (OPTIONS + "\nE) 9", "C", "choice", "not_four_options"),
        (OPTIONS + " E) 9 F) 10", "C", "choice", "not_four_options"),
        ("Which?\nA. one\nB. two\nC. three\nD. four\nE. five", "A", "choice", "not_four_options"),
        ("Which? (A) one (B) two (C) three (D) vitamin E. (E) five", "A", "choice", "not_four_options"),
        ("Which is prime? A) 4 B) 6 C) 7", "C", "choice", "not_four_options"),
        ("Which is in fish? A) iron B) zinc C) vitamin D.", "C", "choice", "not_four_options"),
        ("Which is prime? A) 4 B) 6 C) 7 D)", "C", "choice", "not_four_options"),
        ("Which is prime? D) 4 C) 6 B) 7 A) 8", "C", "choice", "not_four_options"),
        ("Which is prime, 4, 6, 7 or 8?", "C", "choice", "not_four_options"),
        ("Which \ud800?", "Nile", "string", "not_unicode"),
        ("Which?", "\udfff", "string", "not_unicode"),
    ],
)
def test_each_broken_rule_has_its_reason(question, answer, answer_type, expected):
    assert reason(question, answer, answer_type) == expected


def test_a_question_of_the_greatest_length_is_valid():
    assert reason("x" * MAX_QUESTION_CHARACTERS, "7", "integer") is None


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        (SUM, "7", None),
        ("Ben had 9 pens and lost 4. How many are left?", "5", None),
        ("Cleo had 6 nuts and got 6 more. How many in all?", "12", None),  # 6 stands in that sentence twice
        (SUM.replace("?", "."), "7", "not_a_question"),
        ("How many cups does Anna have in all?", "7", "too_few_numbers"),
        ("Anna has 3 cups. How many more make 7?", "4", None),
        ("Anna has 3 red cups and 3 blue cups. How many in all?", "7", "not_grounded"),  # 3 stands there once
        ("Anna has 3 red cups and 7 blue cups. How many in all?", "7", "not_grounded"),  # so does 7, used twice
        ("Anna has 3 red cups and 6 blue cups. How many in all?", "9", "not_grounded"),
        ("Cleo had 6 nuts and got 6 more. How many in all?", "6", "not_grounded"),  # but not three times
        ("Cups: 4 and 4. How many in all?", "7", "not_grounded"),  # two sentences hold a 4 each
        ("Anna has 3 red cups and Ben had 9 pens. How many things?", "12", "not_grounded"),  # of three sentences
        ("Anna has 3 red cups and Ben had 9 pens. How many things?", "7", "not_grounded"),  # of two
        ("Anna has 4 blue cups and Ben lost 9 pens. How many more?", "5", None),  # any words, one sentence's numbers
        (SUM, "5", "not_grounded"),  # another sentence's result
        (SUM, "12", "not_grounded"),
        (SUM, "99", "not_grounded"),
    ],
)
def test_grounded_only_takes_numbers_of_one_sentence_no_more_often_than_they_stand_there(question, answer, expected):
    assert reason(question, answer, "integer", is_grounded_only=True) == expected
    assert reason(question, answer, "integer", is_grounded_only=False) is None


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("3 and 4 make 7", None),
        ("Some have 3, some 4; that is 7 (or 7.0).", None),
        ("It rained. There were 3 and 4, so 7! It was June.", None),
        ("There were 3. 4 came. Now 7 are here.", "not_grounded"),
        ("There were 3 and 4. They were 7.", "not_grounded"),
        ("There were 3 and 4! They were 7.", "not_grounded"),
        ("Were there 3 and 4? They were 7.", "not_grounded"),
        ("There were 3 and 4.\nThey were 7.", "not_grounded"),
        ("", "not_grounded"),
    ],
)
def test_a_sentence_ends_at_a_full_stop_or_mark_with_a_space_behind(document, expected):
    assert rejection_reason(Proposal("What do 3 and 4 make?", "7", "integer"), document, True) == expected


def test_grounding_asks_nothing_of_other_answer_types():
    for question, answer, answer_type in (
        (OPTIONS, "C", "choice"),
        ("Who wrote it?", "Bach", "string"),
        ("What is half of 55?", "55/2", "expression"),
    ):
        assert reason(question, answer, answer_type, is_grounded_only=True) is None
