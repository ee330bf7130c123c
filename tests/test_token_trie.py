import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsp.token_trie import make_trie


def test_the_worked_example_of_the_docstring():
    trie = make_trie(((5, 6), (5, 7)))
    assert trie.edges == ((0, 5, 1), (1, 6, 2), (1, 7, 3))
    assert [trie.is_leaf(node) for node in range(4)] == [False, False, True, True]
    assert trie.allowed_along((5, 7)) == [(5,), (6, 7)]


@pytest.mark.parametrize(
    ("choices", "named"), [(((5,), (5, 6)), r"\[5\] begins another one"), (((5, 6), ()), "a choice is empty")]
)
def test_choices_of_which_one_begins_another_are_refused_with_the_fix(choices, named):
    with pytest.raises(ValueError, match=f"{named}: end each with"):
        make_trie(choices)


def test_tokens_outside_the_trie_are_an_error():
    with pytest.raises(ValueError, match=r"\[6\] begins none"):
        make_trie(((5,),)).walk((6,))


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=8))
def test_the_allowed_tokens_are_those_with_which_some_choice_goes_on(drawn):
    choices = tuple((*choice, 9) for choice in drawn)  # 9 ends each, so none begins another
    trie = make_trie(choices)
    for choice in choices:
        assert trie.is_leaf(trie.walk(choice))
        for place, allowed in enumerate(trie.allowed_along(choice)):
            expected = {other[place] for other in choices if other[:place] == choice[:place] and len(other) > place}
            assert set(allowed) == expected and len(allowed) == len(expected)
