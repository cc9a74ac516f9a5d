"""The Merkle tree of RFC 6962 (section 2.1, algorithms of RFC 9162): roots, proofs, and their verification. Pure.

A leaf is the hash of an entry's bytes behind 0x00, a node that of its two children behind 0x01, so that neither can
pose as the other. Hashes are 32 bytes. Verification never raises: what is malformed proves nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
# Far above any log; keeps the work that a hostile proof can ask for small.
SIZE_MAX = 2**48


def leaf_hash(body: bytes) -> bytes:
    """SHA-256(0x00 || body)."""
    return hashlib.sha256(b"\x00" + body).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 || left || right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def split(size: int) -> int:
    """The largest power of two below ``size`` (at least 2): how many leaves the left side of a tree has."""
    return 1 << ((size - 1).bit_length() - 1)


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The root over leaf hashes in order; SHA-256 of nothing for none."""
    level = list(leaves)
    if not level:
        return EMPTY_ROOT
    while len(level) > 1:
        above = [node_hash(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        # A last one without a neighbour goes up as it is: this is RFC 6962's split at a power of two, level by level.
        level = above + level[-1:] if len(level) % 2 else above
    return level[0]


def inclusion_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The siblings from a leaf (index from 0) up to the root; IndexError for an index without a leaf."""
    if not 0 <= index < len(leaves):
        raise IndexError("there is no such leaf")
    path: list[bytes] = []
    start, end = 0, len(leaves)
    while end - start > 1:
        middle = start + split(end - start)
        if index < middle:
            path.append(root_of(leaves[middle:end]))
            end = middle
        else:
            path.append(root_of(leaves[start:middle]))
            start = middle
    path.reverse()
    return path


def consistency_path(leaves: Sequence[bytes], old: int) -> list[bytes]:
    """The proof (RFC 9162, 2.1.4.1) that the tree of ``leaves`` extends its own first ``old`` leaves.

    Empty for ``old`` 0 or the whole; ValueError for a size that the tree never had.
    """
    if not 0 <= old <= len(leaves):
        raise ValueError("the older tree cannot be larger")
    if old in {0, len(leaves)}:
        return []
    path: list[bytes] = []
    start, end, whole = 0, len(leaves), True
    while old != end:
        middle = start + split(end - start)
        if old <= middle:
            path.append(root_of(leaves[middle:end]))
            end = middle
        else:
            path.append(root_of(leaves[start:middle]))
            start, whole = middle, False
    if not whole:
        path.append(root_of(leaves[start:end]))
    path.reverse()
    return path


def verify_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Whether ``leaf`` stands at ``index`` of the tree with this size and root (RFC 9162, 2.1.3.2)."""
    if not (0 <= index < size <= SIZE_MAX) or not _hashes([leaf, root, *path]):
        return False
    at, last, found = index, size - 1, leaf
    for sibling in path:
        if last == 0:
            return False
        if at & 1 or at == last:
            found = node_hash(sibling, found)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            found = node_hash(found, sibling)
        at, last = at >> 1, last >> 1
    return last == 0 and found == root


def verify_consistency(old: int, old_root: bytes, new: int, new_root: bytes, path: Sequence[bytes]) -> bool:
    """Whether the tree of size ``new`` extends that of size ``old`` (RFC 9162, 2.1.4.2).

    Every tree extends the empty one, whose root must then be SHA-256 of nothing; of equal sizes the roots are equal.
    """
    if not (0 <= old <= new <= SIZE_MAX) or not _hashes([old_root, new_root, *path]):
        return False
    if old in {0, new}:
        return not path and old_root == (new_root if old == new else EMPTY_ROOT)
    hashes = [old_root, *path] if old & (old - 1) == 0 else list(path)
    if not hashes or not path:
        return False
    at, last = old - 1, new - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    before = after = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            before, after = node_hash(sibling, before), node_hash(sibling, after)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            after = node_hash(after, sibling)
        at, last = at >> 1, last >> 1
    return last == 0 and before == old_root and after == new_root


def missing_subtrees(indexes: Sequence[int], size: int) -> list[tuple[int, int]]:
    """What a proof for several leaves at once needs beside them: ranges (start, end) of leaves, in order.

    ``indexes`` are sorted and distinct. Each range is a subtree of RFC 6962's tree of ``size`` leaves that holds none
    of them and whose parent holds one. ``combined_root`` takes the roots of these ranges.
    """
    found: list[tuple[int, int]] = []
    stack = [(0, size, 0, len(indexes))] if size else []
    while stack:
        start, end, low, high = stack.pop()
        if low == high:
            found.append((start, end))
        elif end - start > 1 and high - low < end - start:
            middle = start + split(end - start)
            cut = bisect_left(indexes, middle, low, high)
            stack += [(middle, end, cut, high), (start, middle, low, cut)]
    return found


def combined_root(leaves: Mapping[int, bytes], size: int, nodes: Sequence[bytes]) -> bytes | None:
    """The root of a tree of which some leaves are known, and of the rest the subtrees of ``missing_subtrees``.

    ``leaves`` maps indexes to leaf hashes. Each node is hashed once, whatever the number of leaves. None if the number
    of nodes is not exactly the one needed, if an index lies outside, or if something is no hash.
    """
    indexes = sorted(leaves)
    if not 0 < size <= SIZE_MAX or not indexes or indexes[0] < 0 or indexes[-1] >= size:
        return None
    if not _hashes(nodes) or not _hashes(list(leaves.values())):
        return None
    hashes = [leaves[index] for index in indexes]
    given = iter(nodes)

    def subtree(start: int, end: int, low: int, high: int) -> bytes:
        if low == high:
            return next(given)
        if high - low == end - start:
            return root_of(hashes[low:high])
        middle = start + split(end - start)
        cut = bisect_left(indexes, middle, low, high)
        return node_hash(subtree(start, middle, low, cut), subtree(middle, end, cut, high))

    if len(missing_subtrees(indexes, size)) != len(nodes):
        return None
    return subtree(0, size, 0, len(indexes))


def merged_paths(paths: Mapping[int, Sequence[bytes]], size: int) -> list[bytes]:
    """The nodes for ``combined_root`` out of one inclusion path a leaf; ValueError if they do not fit together."""
    indexes = sorted(paths)
    known: dict[tuple[int, int], bytes] = {}
    for index in indexes:
        ranges = _siblings(index, size)
        if len(ranges) != len(paths[index]):
            raise ValueError("an inclusion path has another length than its tree asks for")
        known.update(zip(ranges, paths[index], strict=True))
    return [known[needed] for needed in missing_subtrees(indexes, size)]


def _siblings(index: int, size: int) -> list[tuple[int, int]]:
    """The ranges of leaves whose roots an inclusion path holds, from the leaf up."""
    ranges: list[tuple[int, int]] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + split(end - start)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    ranges.reverse()
    return ranges


def _hashes(values: Sequence[bytes]) -> bool:
    return all(type(value) is bytes and len(value) == HASH_BYTES for value in values)
