"""Proofs out of stored subtrees are those of RFC 6962, for every size up to 128."""

from __future__ import annotations

import hashlib
from functools import cache

import pytest

from engine.ledger.tree import GrowingTree, consistency_ranges, cover, inclusion_ranges, root_of_range
from engine.verifier import merkle

LEAVES = [merkle.leaf_hash(b"entry %d" % number) for number in range(128)]
ROOTS = [merkle.root_of(LEAVES[:size]) for size in range(129)]


@cache
def node(place: tuple[int, int]) -> bytes:
    level, index = place
    return merkle.root_of(LEAVES[index << level : (index + 1) << level])


@pytest.mark.parametrize("size", range(129))
def test_roots_and_proofs_are_those_of_the_whole_tree(size: int) -> None:
    assert root_of_range(0, size, node) == ROOTS[size]
    for index in range(size):
        path = [root_of_range(start, end, node) for start, end in inclusion_ranges(index, size)]
        assert merkle.verify_inclusion(LEAVES[index], index, size, path, ROOTS[size])
    for old in range(size + 1):
        path = [root_of_range(start, end, node) for start, end in consistency_ranges(old, size)]
        assert merkle.verify_consistency(old, ROOTS[old], size, ROOTS[size], path)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32, 37])
def test_proofs_are_made_of_the_same_hashes_as_those_made_of_all_leaves(size: int) -> None:
    for index in range(size):
        path = [root_of_range(start, end, node) for start, end in inclusion_ranges(index, size)]
        assert path == merkle.inclusion_path(LEAVES[:size], index)
        path = [root_of_range(start, end, node) for start, end in consistency_ranges(index, size)]
        assert path == merkle.consistency_path(LEAVES[:size], index)


def test_a_range_is_covered_by_subtrees_that_are_complete() -> None:
    for size in range(1, 129):
        for start, end in [(0, size), *inclusion_ranges(size - 1, size)]:
            leaves = [
                leaf for level, index in cover(start, end) for leaf in range(index << level, (index + 1) << level)
            ]
            assert leaves == list(range(start, end))


def test_a_tree_that_grows_keeps_its_edge_only_and_names_each_complete_subtree_once() -> None:
    tree = GrowingTree()
    assert tree.root == hashlib.sha256(b"").digest()
    seen = {}
    for size, leaf in enumerate(LEAVES, start=1):
        seen.update(tree.append(leaf))
        assert tree.size == size
        assert tree.root == merkle.root_of(LEAVES[:size])
    assert set(seen) == {(level, index) for level in range(1, 8) for index in range(128 >> level)}
    assert all(node(place) == found for place, found in seen.items())


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0)])
def test_a_leaf_that_is_not_there_has_no_path(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="no such leaf"):
        inclusion_ranges(index, size)
    with pytest.raises(ValueError, match="larger"):
        consistency_ranges(size + 1, size)
