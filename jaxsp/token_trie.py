"""Sets of allowed continuations as tries of tokens: an environment's commands, the letters of a multiple choice.

A sample that is held to choices walks from the root, node 0, along the edges; at each node only the tokens of its edges
are possible, and at a leaf the sample ends.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

Choices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TokenTrie:
    """The edges of a trie, `(node, token, child)`; nodes are numbered from the root, 0.

    Example: the choices `[5, 6]` and `[5, 7]` are `((0, 5, 1), (1, 6, 2), (1, 7, 3))`.
    """

    edges: tuple[tuple[int, int, int], ...]

    @functools.cached_property
    def children(self) -> dict[int, dict[int, int]]:
        """Of each node that is no leaf, its children by token, in the order of the choices."""
        children: dict[int, dict[int, int]] = {}
        for node, token, child in self.edges:
            children.setdefault(node, {})[token] = child
        return children

    def is_leaf(self, node: int) -> bool:
        return node not in self.children

    def walk(self, tokens: Sequence[int]) -> int:
        """The node that `tokens` lead to from the root. Raises ValueError if they leave the trie."""
        node = 0
        for token in tokens:
            if token not in self.children.get(node, {}):
                raise ValueError(f"{list(tokens)} begins none of the choices")
            node = self.children[node][token]
        return node

    def allowed_along(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """For each of `tokens`, the tokens that were possible in its place. Raises ValueError as `walk` does."""
        return [tuple(self.children.get(self.walk(tokens[:place]), {})) for place in range(len(tokens))]


@functools.lru_cache(maxsize=1024)
def make_trie(choices: Choices) -> TokenTrie:
    """The trie of `choices`; equal ones count once.

    Raises ValueError if one is empty or begins another: nothing would say whether a sample that has come so far ends.
    """
    children: dict[tuple[int, int], int] = {}
    num_nodes = 1
    ends: dict[int, tuple[int, ...]] = {}
    for choice in choices:
        node = 0
        for token in choice:
            if (node, token) not in children:
                children[node, token] = num_nodes
                num_nodes += 1
            node = children[node, token]
        ends[node] = choice
    inner = {node for node, _ in children}
    for node, choice in ends.items():
        if node in inner or not choice:
            what = f"the choice {list(choice)} begins another one" if choice else "a choice is empty"
            raise ValueError(f"{what}: end each with a token that ends it, such as a stop id")
    return TokenTrie(tuple((node, token, child) for (node, token), child in children.items()))
