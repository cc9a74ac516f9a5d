"""The part of a bundle that ties it to the log: checkpoint, places of the entries, nodes, earlier checkpoints, keys.

Forms are those of docs/bundle.md. Must only read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from engine.ledger.tree import consistency_ranges
from engine.store.exchange import Connection
from engine.store.log import Checkpoint, subtree_roots
from engine.verifier.canonical import canonical
from engine.verifier.merkle import missing_subtrees

HISTORY_MAX: Final = 256


async def proof_member(
    connection: Connection, tenant: UUID, leaves: Mapping[str, Sequence[int]], checkpoint: Checkpoint
) -> bytes:
    """``log/proof.json``: where the entries stand, and the subtrees between them."""
    indexes = sorted(index for chain in leaves.values() for index in chain)
    ranges = missing_subtrees(indexes, checkpoint.size) if indexes else []
    roots = await subtree_roots(connection, tenant, ranges)
    return canonical(
        {
            "leaves": {chain: list(places) for chain, places in leaves.items()},
            "nodes": [roots[needed].hex() for needed in ranges],
            "root": checkpoint.root.hex(),
            "size": checkpoint.size,
        }
    )


async def history_member(
    connection: Connection,
    tenant: UUID,
    checkpoints: Sequence[Checkpoint],
    current: Checkpoint,
    named: Collection[int],
) -> bytes:
    """``log/history.json``: the checkpoints of the sizes that are ``named``, and the newest of the others."""
    earlier = [one for one in checkpoints if one.size < current.size]
    newest = [one.size for one in earlier if one.size not in named][-HISTORY_MAX:]
    chosen = [one for one in earlier if one.size in {*newest, *named}]
    paths = {one.size: consistency_ranges(one.size, current.size) for one in chosen}
    roots = await subtree_roots(connection, tenant, sorted({range_ for path in paths.values() for range_ in path}))
    rows: list[dict[str, Any]] = []
    for one in chosen:
        path = [roots[range_].hex() for range_ in paths[one.size]]
        rows.append({"consistency": path, "note": one.note.decode()})
    return canonical({"checkpoints": rows})
