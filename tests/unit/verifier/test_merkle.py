"""The tree: published vectors, and proofs of every kind for all sizes up to 128."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.verifier.merkle import (
    EMPTY_ROOT,
    combined_root,
    consistency_path,
    inclusion_path,
    leaf_hash,
    merged_paths,
    missing_subtrees,
    node_hash,
    root_of,
    verify_consistency,
    verify_inclusion,
)

SIZES = range(129)
# The inputs and roots that the reference implementations of RFC 6962 test with.
INPUTS = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
LEAVES = [leaf_hash(f"leaf {number}".encode()) for number in range(129)]


def recursive_root(leaves: list[bytes]) -> bytes:
    """The root exactly as section 2.1 of RFC 6962 defines it."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while left * 2 < len(leaves):
        left *= 2
    return node_hash(recursive_root(leaves[:left]), recursive_root(leaves[left:]))


def test_the_published_roots() -> None:
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for size, root in enumerate(ROOTS, start=1):
        assert root_of([leaf_hash(data) for data in INPUTS[:size]]).hex() == root


def test_the_published_inclusion_proofs() -> None:
    leaves = [leaf_hash(data) for data in INPUTS]
    path = [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ]
    assert [one.hex() for one in inclusion_path(leaves, 0)] == path
    assert verify_inclusion(leaves[0], 0, 8, [bytes.fromhex(one) for one in path], root_of(leaves))


def test_the_published_consistency_proof() -> None:
    leaves = [leaf_hash(data) for data in INPUTS]
    path = [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert [one.hex() for one in consistency_path(leaves, 6)] == path
    assert verify_consistency(6, bytes.fromhex(ROOTS[5]), 8, root_of(leaves), [bytes.fromhex(one) for one in path])


def test_roots_follow_the_definition_for_all_sizes() -> None:
    for size in SIZES:
        assert root_of(LEAVES[:size]) == recursive_root(LEAVES[:size])


def test_inclusion_proofs_hold_for_all_sizes_and_places_and_for_no_other_place() -> None:
    for size in SIZES[1:]:
        leaves = LEAVES[:size]
        root = root_of(leaves)
        for index in range(size):
            path = inclusion_path(leaves, index)
            assert verify_inclusion(leaves[index], index, size, path, root)
            assert not verify_inclusion(leaves[index], (index + 1) % size, size, path, root) or size == 1
            assert not verify_inclusion(leaves[index], index, size, [*path, root], root)
            assert not verify_inclusion(leaves[index], index, size, path[:-1], root) or not path
            assert not verify_inclusion(LEAVES[(index + 1) % 129], index, size, path, root)


def test_consistency_proofs_hold_for_all_pairs_of_sizes() -> None:
    for new in SIZES:
        leaves = LEAVES[:new]
        root = root_of(leaves)
        for old in range(new + 1):
            path = consistency_path(leaves, old)
            old_root = root_of(leaves[:old])
            assert verify_consistency(old, old_root, new, root, path)
            assert not verify_consistency(old, leaf_hash(b"other"), new, root, path)
            assert not verify_consistency(old, old_root, new, leaf_hash(b"other"), path) or old == 0
            assert not verify_consistency(old, old_root, new, root, [*path, root])
            if path:
                assert not verify_consistency(old, old_root, new, root, path[:-1])
                assert not verify_consistency(old, old_root, new, root, [path[0][::-1], *path[1:]])


def test_a_log_that_was_rewritten_has_no_consistency_proof() -> None:
    forged = [leaf_hash(b"forged"), *LEAVES[1:9]]
    path = consistency_path(forged, 5)
    assert not verify_consistency(5, root_of(LEAVES[:5]), 9, root_of(forged), path)


@pytest.mark.parametrize("index", [-1, 8, 2**60])
def test_places_outside_of_the_tree_prove_nothing(index: int) -> None:
    assert not verify_inclusion(LEAVES[0], index, 8, [], root_of(LEAVES[:8]))
    assert combined_root({index: LEAVES[0]}, 8, []) is None


def test_what_is_no_hash_proves_nothing() -> None:
    root = root_of(LEAVES[:2])
    assert not verify_inclusion(LEAVES[0], 0, 2, [b"short"], root)
    assert not verify_inclusion(LEAVES[0], 0, 2, [LEAVES[1].hex()], root)  # type: ignore[list-item]  # on purpose
    assert not verify_consistency(1, LEAVES[0], 2, root, [b""])
    assert not verify_consistency(0, LEAVES[0], 0, LEAVES[0], [LEAVES[0]])
    assert not verify_consistency(3, root, 2, root, [])


def test_a_node_cannot_pose_as_a_leaf() -> None:
    body = LEAVES[0] + LEAVES[1]
    assert leaf_hash(body) != node_hash(LEAVES[0], LEAVES[1])


def test_indexes_outside_raise() -> None:
    with pytest.raises(IndexError):
        inclusion_path(LEAVES[:2], 2)
    with pytest.raises(ValueError, match="larger"):
        consistency_path(LEAVES[:2], 3)


@given(
    st.integers(1, 128).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1)))
)
def test_several_leaves_at_once_lead_to_the_root_by_as_few_nodes_as_possible(case: tuple[int, set[int]]) -> None:
    size, chosen = case
    leaves = LEAVES[:size]
    indexes = sorted(chosen)
    ranges = missing_subtrees(indexes, size)
    nodes = [root_of(leaves[start:end]) for start, end in ranges]
    known = {index: leaves[index] for index in indexes}
    assert combined_root(known, size, nodes) == root_of(leaves)
    assert merged_paths({index: inclusion_path(leaves, index) for index in indexes}, size) == nodes
    assert combined_root(known, size, [*nodes, leaves[0]]) is None
    assert not nodes or combined_root(known, size, nodes[:-1]) is None
    assert combined_root({**known, indexes[0]: leaf_hash(b"forged")}, size, nodes) != root_of(leaves)
    covered = sorted([*indexes, *(index for start, end in ranges for index in range(start, end))])
    assert covered == list(range(size))


def test_paths_of_the_wrong_length_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="length"):
        merged_paths({0: []}, 2)
