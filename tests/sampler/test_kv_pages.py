"""Pages against a model that knows, for every page, who uses it and which tokens it holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jaxsp.sampler.kv_pages import KVPages

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def pages_with(*sequences: tuple[int, ...], num_pages: int = 8) -> tuple[KVPages, list[list[int]]]:
    """Pages in which the sequences, one after the other, were computed and registered, all of them in use."""
    pages, lists = KVPages(num_pages, PAGE), []
    for tokens in sequences:
        found = pages.find(tokens)
        fresh = pages.take(pages.num_for(len(tokens)) - len(found))
        assert fresh is not None
        pages.register(tokens, found + fresh, len(found))
        lists.append(found + fresh)
    return pages, lists


def test_equal_beginnings_share_their_full_pages_but_never_all_tokens():
    pages, (first, second, third) = pages_with((5, 6, 7, 8, 9), (5, 6, 7, 8), (5, 6, 1, 2, 3))
    assert second[0] == first[0] and second[1] != first[1]  # the last token is left to compute
    assert third[0] == first[0] and third[1] != first[1]
    assert pages.find((5, 6, 7, 8, 9, 9)) == first[:2]
    assert pages.find((6, 7, 7, 8)) == []  # the same tokens after another beginning


def test_pages_stay_until_their_place_is_needed_the_oldest_first_and_the_last_of_a_sequence_before_the_first():
    pages, (first, second) = pages_with((1, 2, 3, 4, 5), (7, 8, 9, 9, 9), num_pages=6)
    pages.release(second)
    pages.release(first)
    assert pages.num_available == 6
    taken = pages.take(3)  # the two that hold part of a page, then the end of the second
    assert taken is not None and set(taken) == {first[2], second[2], second[1]} and pages.num_evicted == 1
    assert pages.find((7, 8, 9, 9, 9)) == second[:1]
    assert pages.find((1, 2, 3, 4, 5)) == first[:2]
    assert pages.take(1) is None and pages.num_available == 0


def test_a_sequence_ends_registering_where_another_holds_the_same_tokens():
    pages, (first,) = pages_with((1, 2, 3, 4, 5, 6, 7))
    own = pages.take(4)
    assert own is not None and pages.register((1, 2, 3, 4, 5, 6, 7), own, 0) == 0
    pages.share(own)  # a second user of the same pages registers no less than the first
    assert pages.register((1, 2, 3, 4, 5, 6, 7), first, 0) == 3
    assert pages.find((1, 2, 3, 4, 5, 6, 7)) == first[:3]


def test_clearing_forgets_all_and_is_refused_while_a_page_is_in_use():
    pages, (first,) = pages_with((1, 2, 3))
    with pytest.raises(ValueError, match="2 pages are in use"):
        pages.clear()
    pages.release(first)
    pages.clear()
    assert pages.find((1, 2, 3)) == [] and pages.num_available == 8


class Sequences(RuleBasedStateMachine):
    """Sequences that begin, grow, are shared and end, in few pages."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pages = KVPages(7, PAGE)
        self.users: dict[int, int] = {}
        self.holds: dict[int, tuple[int, ...]] = {}  # what was computed into each page, all tokens up to its end

    def fill(self, tokens: list[int], own: list[int], begin: int) -> None:
        for index in range(begin, len(own)):
            self.holds[own[index]] = tuple(tokens[: (index + 1) * PAGE])

    @rule(target=held, tokens=TOKENS)
    def begin(self, tokens):
        found = self.pages.find(tokens)
        assert len(found) * PAGE < len(tokens)
        for index, page in enumerate(found):  # what is found was computed from the very same tokens
            assert self.holds[page] == tuple(tokens[: (index + 1) * PAGE])
        before = self.pages.num_available
        fresh = self.pages.take(self.pages.num_for(len(tokens)) - len(found))
        if fresh is None:
            assert self.pages.num_for(len(tokens)) - len(found) > before
            self.pages.release(found)
            return ([], [], 0)
        for page in fresh:
            assert self.users.get(page, 0) == 0
        own = found + fresh
        for page in own:
            self.users[page] = self.users.get(page, 0) + 1
        self.fill(tokens, own, len(found))
        return tokens, own, self.pages.register(tokens, own, len(found))

    @rule(target=held, sequence=consumes(held), more=TOKENS)
    def grow(self, sequence, more):
        tokens, own, num_registered = sequence
        full = len(tokens) // PAGE
        if not own or any(self.users[page] > 1 for page in own[full:]):
            return sequence  # only a page of one's own is written to
        longer = [*tokens, *more]
        fresh = self.pages.take(self.pages.num_for(len(longer)) - len(own))
        if fresh is None:
            return sequence
        for page in fresh:
            assert self.users.get(page, 0) == 0
            self.users[page] = 1
        own = own + fresh
        self.fill(longer, own, full)
        return longer, own, self.pages.register(longer, own, num_registered)

    @rule(target=held, sequence=held)
    def share(self, sequence):
        tokens, own, num_registered = sequence
        full = len(tokens) // PAGE
        self.pages.share(own[:full])
        for page in own[:full]:
            self.users[page] += 1
        return tokens[: full * PAGE], own[:full], min(num_registered, full)

    @rule(sequence=consumes(held))
    def end(self, sequence):
        self.pages.release(sequence[1])
        for page in sequence[1]:
            self.users[page] -= 1

    @invariant()
    def pages_in_use_and_available_add_up(self):
        assert self.pages.num_available == 7 - sum(count > 0 for count in self.users.values())


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
