"""Proofs out of stored subtrees: which complete subtrees of a growing Merkle tree (RFC 6962) a proof is made of. Pure.

A node (level, index) is the root of 2^level leaves from index x 2^level, all of which are there; it never changes. A
range of leaves whose root a proof holds is covered by few of them, so a proof costs the logarithm of the log's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

from engine.verifier.merkle import EMPTY_ROOT, node_hash, split

Node = tuple[int, int]
Range = tuple[int, int]


def inclusion_ranges(index: int, size: int) -> list[Range]:
    """The ranges (start, end) of leaves whose roots are the inclusion path of a leaf, from the leaf up.

    Raises ValueError for an index that the tree has not.
    """
    if not 0 <= index < size:
        raise ValueError("there is no such leaf")
    found: list[Range] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + split(end - start)
        if index < middle:
            found.append((middle, end))
            end = middle
        else:
            found.append((start, middle))
            start = middle
    return found[::-1]


def consistency_ranges(old: int, new: int) -> list[Range]:
    """The ranges whose roots prove that the tree of ``new`` leaves extends that of ``old``; empty for 0 and ``new``.

    Raises ValueError for an older size that is larger.
    """
    if not 0 <= old <= new:
        raise ValueError("the older tree cannot be larger")
    if old in {0, new}:
        return []
    found: list[Range] = []
    start, end, whole = 0, new, True
    while old != end:
        middle = start + split(end - start)
        if old <= middle:
            found.append((middle, end))
            end = middle
        else:
            found.append((start, middle))
            start, whole = middle, False
    if not whole:
        found.append((start, end))
    return found[::-1]


def cover(start: int, end: int) -> list[Node]:
    """The complete subtrees that make up a range of a proof, left to right, largest first."""
    nodes: list[Node] = []
    while start < end:
        level = (end - start).bit_length() - 1
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def root_of_range(start: int, end: int, node: Callable[[Node], bytes]) -> bytes:
    """The root over a range of a proof (or over a whole tree, from 0), out of the nodes of its `cover`."""
    hashes = [node(one) for one in cover(start, end)]
    if not hashes:
        return EMPTY_ROOT
    return reduce(lambda right, left: node_hash(left, right), reversed(hashes[:-1]), hashes[-1])


class GrowingTree:
    """A tree that is fed leaf by leaf and keeps only its right edge: constant memory for a log of any length."""

    def __init__(self) -> None:
        self.size = 0
        # Roots of complete subtrees, largest first: one for each bit of the size.
        self._edge: list[bytes] = []

    def append(self, leaf: bytes) -> Iterable[tuple[Node, bytes]]:
        """Adds a leaf's hash; returns the nodes above it that are complete with it, from level 1 up."""
        completed: list[tuple[Node, bytes]] = []
        found, index, level = leaf, self.size, 0
        while index & 1:
            found = node_hash(self._edge.pop(), found)
            index, level = index >> 1, level + 1
            completed.append(((level, index), found))
        self._edge.append(found)
        self.size += 1
        return completed

    @property
    def root(self) -> bytes:
        """The root over the leaves so far."""
        if not self._edge:
            return EMPTY_ROOT
        return reduce(lambda right, left: node_hash(left, right), reversed(self._edge[:-1]), self._edge[-1])
