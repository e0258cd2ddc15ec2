"""A radix tree over tokens: which prefixes are known, nothing about where their states lie.

An edge carries a run of tokens; a node ends where the run ends and may own a cached state (`state`) and the attention
keys of its own tokens (`kv`). A state describes the whole prefix, so a split leaves the upper node without one. Nodes
that neither own a state, nor lead to one, nor are pinned by a running request are removed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Keys(Protocol):
    """Attention keys and values of consecutive tokens; a paged engine cuts its list of pages."""

    def cut(self, start: int, end: int) -> "Keys":
        """Those of the tokens `start` to `end`, counted from the first one held."""
        ...


class Node:
    """End of one edge.

    Attributes:
        id: order of creation, the same on every rank.
        tokens: of the edge, int32 `[n]`.
        depth: tokens from the root to the end of the edge.
        pins: running requests whose prompt ends here.
        state: what the cache keeps for this prefix, None where nothing.
        filled: whether the attention keys of this edge exist.
        kv: those keys, None where the engine does not hand them over.
    """

    __slots__ = (
        "children",
        "depth",
        "filled",
        "id",
        "kv",
        "parent",
        "pins",
        "state",
        "tokens",
    )

    def __init__(self, number: int, tokens: Tokens, parent: "Node | None") -> None:
        self.id = number
        self.tokens = tokens
        self.parent = parent
        self.depth: int = (0 if parent is None else parent.depth) + len(tokens)
        self.children: dict[int, Node] = {}
        self.pins = 0
        self.state: Any = None
        self.filled = False
        self.kv: Keys | None = None

    @property
    def start(self) -> int:
        """Tokens before the edge."""
        return self.depth - len(self.tokens)

    def path(self) -> list["Node"]:
        """Nodes from below the root to this one."""
        found, node = [], self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """How far a sequence is known.

    Attributes:
        tokens: length of the known part, which may end inside an edge.
        hit: deepest node with a state that covers at most `limit` tokens, None if there is none.
    """

    tokens: int
    hit: Node | None


class RadixTree:
    """Prefixes of token sequences.

    Args:
        removed: called with every node that leaves the tree.
    """

    def __init__(self, removed: Callable[[Node], None] = lambda _: None) -> None:
        self._created = 0
        self._removed = removed
        self.root = Node(0, np.empty(0, np.int32), None)
        self.size = 0
        """Nodes below the root."""

    def match(self, tokens: Tokens, limit: int) -> Match:
        """Follow `tokens`; a state deeper than `limit` does not count."""
        node, at, hit = self.root, 0, None
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            common = _common(child.tokens, tokens[at:])
            at += common
            if common < len(child.tokens):
                break
            node = child
            if node.state is not None and node.depth <= limit:
                hit = node
        return Match(at, hit)

    def insert(self, tokens: Tokens, below: Node | None = None) -> Node:
        """The node at the end of `tokens` after `below` (the root by default), made where it is missing."""
        node, at = below or self.root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                return self._add(node, tokens[at:].copy())
            common = _common(child.tokens, tokens[at:])
            at += common
            node = child if common == len(child.tokens) else self._split(child, common)
        return node

    def at(self, leaf: Node, depth: int) -> Node:
        """The node that ends after `depth` tokens on the way to `leaf`; an edge is split for it."""
        node = leaf
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return node if node.depth == depth else self._split(node, depth - node.start)

    def prune(self, node: Node) -> int:
        """Remove `node` and its ancestors as far as nothing needs them; how many went."""
        gone = 0
        while (
            node.parent is not None and not node.children and node.state is None and node.pins == 0
        ):
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            node.parent = None
            self.size -= 1
            self._removed(node)
            node, gone = parent, gone + 1
        return gone

    def __iter__(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _add(self, parent: Node, tokens: Tokens) -> Node:
        self._created += 1
        node = Node(self._created, tokens, parent)
        parent.children[int(tokens[0])] = node
        self.size += 1
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after `at` tokens; `node` keeps the lower part, its state and its identity."""
        parent = node.parent
        assert parent is not None, "the root has no edge"
        assert 0 < at < len(node.tokens), "a split lies inside an edge"
        upper = self._add(parent, node.tokens[:at].copy())
        upper.children[int(node.tokens[at])] = node
        upper.filled = node.filled
        if node.kv is not None:
            upper.kv, node.kv = node.kv.cut(0, at), node.kv.cut(at, len(node.tokens))
        node.tokens = node.tokens[at:].copy()
        node.parent = upper
        return upper


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
