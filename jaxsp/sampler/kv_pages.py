"""Which page of the KV cache holds which tokens: references, prefixes that can be found again, eviction (host only).

A page holds the keys and values of `page_tokens` successive tokens of a sequence; a sequence is a list of pages. A full
page can be registered: it is then found again by whoever begins with the same tokens, and stays after its last user
has gone until its place is needed, least recently used first.

A registered page is known by the page before it and its own tokens, so equal keys mean equal beginnings, not equal
hashes. Whoever holds a page found or registered here holds the pages before it, and gives them back last, so a page is
never evicted before one that follows it.
"""

from collections.abc import Sequence

_FIRST = -1  # stands for the page before the first


class KVPages:
    """The pages of one cache.

    Args:
        num_pages: pages there are, numbered from 0.
        page_tokens: tokens of a page.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.num_evicted = 0
        self._references = [0] * num_pages
        self.clear()

    def clear(self) -> None:
        """Forgets every registered page; the weights that made them are gone. ValueError while a page is in use."""
        if any(self._references):
            raise ValueError(f"{sum(map(bool, self._references))} pages are in use")
        self._free = list(range(self.num_pages))[::-1]
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._unused: dict[int, None] = {}  # registered pages without a user, least recently used first

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: free ones, and registered ones that nobody uses."""
        return len(self._free) + len(self._unused)

    def num_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_tokens)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The registered pages with which `tokens` begin, each with one more user. They hold less than all tokens."""
        pages: list[int] = []
        while (page := self._page_of.get(self.next_key(tokens, pages))) is not None:
            if (len(pages) + 1) * self.page_tokens >= len(tokens):
                break  # somebody must compute the last token's hidden state
            pages.append(page)
        self.share(pages)
        return pages

    def next_key(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """What the page after `pages` of a sequence of `tokens` is known by, full or not."""
        start = len(pages) * self.page_tokens
        return (pages[-1] if pages else _FIRST), tuple(tokens[start : start + self.page_tokens])

    def share(self, pages: Sequence[int]) -> None:
        """One more user for each of `pages`."""
        for page in pages:
            self._references[page] += 1
            self._unused.pop(page, None)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one user each, evicting registered ones if needed; None, and no change, if too few."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                self._evict()
            pages.append(self._free.pop())
        for page in pages:
            self._references[page] = 1
        return pages

    def register(self, tokens: Sequence[int], pages: Sequence[int], num_registered: int) -> int:
        """Makes the full pages of a sequence of `tokens` findable, of which the first `num_registered` are already.

        Returns how many are now. It ends before a page whose tokens another sequence has registered: the pages after it
        would be known by a page that this sequence does not hold.
        """
        for index in range(num_registered, len(tokens) // self.page_tokens):
            key = self.next_key(tokens, pages[:index])
            page = self._page_of.setdefault(key, pages[index])
            if page != pages[index]:
                return index
            self._key_of[page] = key
        return max(num_registered, len(tokens) // self.page_tokens)

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each of a sequence's `pages`; those without any are free, or kept while registered."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._unused[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> None:
        page = next(iter(self._unused))
        del self._unused[page], self._page_of[self._key_of.pop(page)]
        self._free.append(page)
        self.num_evicted += 1
