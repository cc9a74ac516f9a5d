"""Checking the whole log of a database, in constant memory: every entry, chain, leaf, node and checkpoint.

Everything is read at one moment (one snapshot), in the order of the chains first, then in the order of the log. What
the database says about itself is compared with itself; only keys and checkpoints from elsewhere prove more, because
whoever owns the server could have changed all of it. Must never stop at the first fault, and never raise for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from engine.ledger.tree import GrowingTree, Node
from engine.store import log
from engine.store.chain_check import ChainChecker
from engine.store.database import Database
from engine.store.exchange import Connection, Row, exchange
from engine.store.review_rows import READ_ALL_ROWS
from engine.store.row_stream import Rows, open_rows
from engine.verifier import checkpoint as formats
from engine.verifier.note import NoteError, Verifier, parse_key

FAULTS_MAX: Final = 100
TELL_EVERY: Final = 2000
_MOMENT: Final = "%Y-%m-%d %H:%M:%SZ"
# An entry gets its leaf within seconds. One that says it is older than what was signed before it came is back-dated.
LATE: Final = timedelta(minutes=10)
_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_ENTRIES: Final = """
    SELECT e.run_id, e.seq, e.tenant_id, e.prev, e.hash, e.body, e.type, e.at,
           l.index AS leaf, l.leaf_hash, l.tenant_id AS leaf_tenant, p.seq IS NOT NULL AS waiting
    FROM ledger_entries e LEFT JOIN log_leaves l USING (run_id, seq)
    LEFT JOIN ledger_pending p ON p.tenant_id = e.tenant_id AND p.run_id = e.run_id AND p.seq = e.seq
    ORDER BY e.run_id, e.seq
"""
_HEADS: Final = "SELECT run_id, seq, hash FROM ledger_heads ORDER BY run_id"
_RUNS: Final = """
    SELECT id AS run_id, tenant_id, state, attempts_count, input_tokens, output_tokens, cost_usd FROM runs ORDER BY id
"""
_ATTEMPTS: Final = "SELECT run_id, id, state, accepted FROM attempts ORDER BY run_id"
_LEAVES: Final = """
    SELECT l.index, l.leaf_hash, l.run_id, l.seq, e.at FROM log_leaves l LEFT JOIN ledger_entries e USING (run_id, seq)
    WHERE l.tenant_id = %s ORDER BY l.index
"""
# In the order in which leaves complete them.
_NODES: Final = """
    SELECT level, index, hash FROM log_nodes WHERE tenant_id = %s ORDER BY (index + 1) << level, level
"""
_CHECKPOINTS: Final = """
    SELECT size, root, note, key_id FROM log_checkpoints WHERE tenant_id = %s ORDER BY size
"""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that somebody kept outside: the note, and where it is from, for messages."""

    note: bytes
    source: str


@dataclass(slots=True)
class LogReport:
    """What was found. ``faults`` are (code, one line), the first hundred; ``faults_count`` counts all.

    ``size`` is the number of leaves of all logs, ``waiting`` that of entries without one yet, ``uncovered`` that of
    leaves which no signed checkpoint covers, ``pinned`` whether the keys came from outside.
    """

    entries: int = 0
    chains: int = 0
    size: int = 0
    waiting: int = 0
    uncovered: int = 0
    checkpoints: int = 0
    pinned: bool = False
    saved_sizes: list[int] = field(default_factory=list)
    # Where each of them is from.
    saved_sources: list[str] = field(default_factory=list)
    faults_count: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)

    def fault(self, code: str, text: str) -> None:
        """Adds a fault."""
        self.faults_count += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append((code, text))


async def check_log(
    database: Database,
    *,
    trusted: Sequence[Verifier] = (),
    saved: Sequence[Saved] = (),
    on_progress: Callable[[int], None] | None = None,
) -> LogReport:
    """Checks everything; ``on_progress`` hears how many entries and leaves were looked at so far.

    ``trusted`` are keys from outside; without any the keys that the log itself names are taken, and ``pinned`` is
    False. Raises UnavailableError like every reader, never for what it finds.
    """
    report = LogReport(pinned=bool(trusted))
    tell = _Progress(on_progress)
    async with database.read() as pooled:
        connection = await log.raw_connection(pooled)
        await exchange(connection, [(_SNAPSHOT, ())])
        await _check_chains(connection, report, tell)
        tenants = await _tenants(connection, saved)
        for tenant_id in tenants:
            await _LogChecker(connection, tenant_id, report, tell).run(trusted, saved)
        await connection.rollback()
    return report


@dataclass(slots=True)
class _Progress:
    say: Callable[[int], None] | None
    done: int = 0

    def step(self) -> None:
        self.done += 1
        if self.say is not None and self.done % TELL_EVERY == 0:
            self.say(self.done)


async def _check_chains(connection: Connection, report: LogReport, tell: _Progress) -> None:
    """Every chain with its head and the rows of the run, its attempts and reviews, which all come in that order."""
    async with AsyncExitStack() as stack:
        entries = await open_rows(stack, connection, _ENTRIES)
        heads = await open_rows(stack, connection, _HEADS)
        runs = await open_rows(stack, connection, _RUNS)
        beside = (
            await open_rows(stack, connection, _ATTEMPTS),
            await open_rows(stack, connection, READ_ALL_ROWS),
        )
        chain: ChainChecker | None = None
        while True:
            row = await entries.next()
            if chain is not None and (row is None or row["run_id"] != chain.run_id):
                await _finish(chain, report, heads, runs, beside)
                chain = None
            if row is None:
                break
            if chain is None:
                chain = ChainChecker(row["run_id"], row["tenant_id"], report.fault)
                report.chains += 1
            chain.add(row)
            report.entries += 1
            report.waiting += row["waiting"]
            tell.step()
        await _finish(None, report, heads, runs, beside)


async def _finish(
    chain: ChainChecker | None, report: LogReport, heads: Rows, runs: Rows, beside: tuple[Rows, Rows]
) -> None:
    """Compares a chain with what the other tables say of it; None is the end, behind the last chain.

    ``beside`` are the rows of attempts and of reviews.
    """
    run_id = None if chain is None else chain.run_id
    (own_heads, lost_heads), (own_runs, lost_runs) = await heads.of_run(run_id), await runs.of_run(run_id)
    (own_attempts, _), (own_reviews, _) = [await rows.of_run(run_id) for rows in beside]
    lost = {row["run_id"] for row in lost_heads if row["seq"] > 0} | {row["run_id"] for row in lost_runs}
    for missing in sorted(lost):
        report.fault("chain-missing", f"chain {missing} has no entries any more")
    if chain is not None:
        for head in own_heads:
            chain.check_head(head)
        chain.finish(own_runs[0] if own_runs else None, own_attempts, own_reviews)


async def _tenants(connection: Connection, saved: Sequence[Saved]) -> list[UUID]:
    """Whoever has leaves or checkpoints, or had some when a saved checkpoint was made."""
    (rows,) = await exchange(connection, [(log.TENANTS, ())])
    found = {row["tenant_id"] for row in rows}
    (rows,) = await exchange(connection, [("SELECT DISTINCT tenant_id FROM log_checkpoints", ())])
    found |= {row["tenant_id"] for row in rows}
    for one in saved:
        name = one.note.split(b"\n", 1)[0].decode(errors="replace").partition("/")[2]
        try:
            found.add(UUID(name))
        except ValueError:
            continue
    return sorted(found)


class _LogChecker:
    """One tenant's log: leaves without gaps, their nodes, and the roots that checkpoints sign."""

    def __init__(self, connection: Connection, tenant_id: UUID, report: LogReport, tell: _Progress) -> None:
        self._connection = connection
        self._tenant_id = tenant_id
        self._report = report
        self._tell = tell
        self._origin = formats.origin_of(str(tenant_id))
        self._tree = GrowingTree()
        # The latest time that an entry under a checkpoint says.
        self._latest: datetime | None = None
        self._covered_until: datetime | None = None

    async def run(self, trusted: Sequence[Verifier], saved: Sequence[Saved]) -> None:
        """Checks it and adds to the report."""
        keys = await self._keys(trusted)
        due = self._saved(saved, keys)
        async with AsyncExitStack() as stack:
            leaves = await open_rows(stack, self._connection, _LEAVES, self._tenant_id)
            nodes = await open_rows(stack, self._connection, _NODES, self._tenant_id)
            points = await open_rows(stack, self._connection, _CHECKPOINTS, self._tenant_id)
            covered = 0
            while (leaf := await leaves.next()) is not None:
                self._tell.step()
                if leaf["index"] != self._tree.size:
                    # Behind a gap no root can be right; one fault says it.
                    text = f"the log goes from leaf {self._tree.size - 1} to leaf {leaf['index']}: some are gone"
                    self._report.fault("leaf-gap", text)
                    return
                self._check_leaf(leaf)
                for node, value in self._tree.append(leaf["leaf_hash"]):
                    await self._check_node(nodes, node, value)
                while (point := await points.peek()) is not None and point["size"] <= self._tree.size:
                    await points.next()
                    covered = self._check_checkpoint(point, keys) or covered
                self._check_saved(due)
            while (extra := await nodes.next()) is not None:
                self._report_extra(extra)
            while (point := await points.next()) is not None:
                text = f"a checkpoint says {point['size']} leaves, and there are {self._tree.size}"
                self._report.fault("checkpoint-ahead", text)
        for size, _, source in due:
            if size > self._tree.size:
                text = f"{source} says {size} leaves, and there are {self._tree.size}: the last ones are gone"
                self._report.fault("saved-checkpoint", text)
        self._report.size += self._tree.size
        self._report.uncovered += self._tree.size - covered

    def _check_saved(self, due: Sequence[tuple[int, bytes, str]]) -> None:
        for size, root, source in due:
            if size == self._tree.size and root != self._tree.root:
                text = f"the log is not the one of {source} (size {size}): its past was changed"
                self._report.fault("saved-checkpoint", text)

    async def _check_node(self, nodes: Rows, node: Node, value: bytes) -> None:
        """Compares the stored nodes with the one that the leaves complete now."""
        level, index = node
        while (row := await nodes.peek()) is not None and _order(row) <= ((index + 1) << level, level):
            await nodes.next()
            if (row["level"], row["index"]) != node:
                self._report_extra(row)
                continue
            if row["hash"] != value:
                self._report.fault("node-altered", f"node {index} of level {level} is not made of its leaves")
            return
        self._report.fault("node-missing", f"node {index} of level {level} of the log is gone")

    def _report_extra(self, row: Row) -> None:
        self._report.fault("node-extra", f"node {row['index']} of level {row['level']} belongs to leaves that are gone")

    def _check_leaf(self, leaf: Row) -> None:
        if leaf["at"] is None:
            self._report.fault(
                "entry-missing", f"entry {leaf['seq']} of chain {leaf['run_id']} is gone: leaf {leaf['index']} is its"
            )
            return
        self._latest = leaf["at"] if self._latest is None else max(self._latest, leaf["at"])
        if self._covered_until is not None and leaf["at"] < self._covered_until - LATE:
            text = f"entry {leaf['seq']} of chain {leaf['run_id']} says {leaf['at']:{_MOMENT}}, but came into the log"
            text += f" behind a checkpoint of entries up to {self._covered_until:{_MOMENT}}"
            self._report.fault("entry-back-dated", text)

    def _check_checkpoint(self, row: Row, keys: Sequence[Verifier]) -> int | None:
        """Whether a stored checkpoint is signed and right; its size if so."""
        self._report.checkpoints += 1
        what = f"the checkpoint of size {row['size']}"
        try:
            signed = formats.open_checkpoint(row["note"], keys, origin=self._origin).checkpoint
        except NoteError as error:
            self._report.fault("checkpoint-signature", f"{what}: {error}")
            return None
        if (signed.size, signed.root) != (row["size"], row["root"]):
            self._report.fault("checkpoint-altered", f"{what} does not say what its note says")
            return None
        if signed.root != self._tree.root:
            self._report.fault("root-mismatch", f"{what} has another root than the log: its past was changed")
            return None
        self._covered_until = self._latest
        return signed.size

    async def _keys(self, trusted: Sequence[Verifier]) -> list[Verifier]:
        """The keys that may have signed: the trusted ones of this log, and those that they vouch for.

        A key vouches for what a log says whose checkpoint it signed: the keys before and after it included.
        """
        named: list[tuple[Verifier, int]] = []
        for key in await log.signer_keys(self._connection, self._tenant_id):
            try:
                named.append((parse_key(key.key), -1 if key.index is None else key.index))
            except NoteError as error:
                self._report.fault("key-entry", f"the log names a key that is none: {error}")
        own = [key for key in trusted if key.name == self._origin]
        if not trusted:
            return [key for key, _ in named]
        while True:
            attested = await self._attested(own)
            more = [key for key, index in named if 0 <= index < attested and key not in own]
            if not more:
                return own
            own += more

    async def _attested(self, keys: Sequence[Verifier]) -> int:
        """The size of the newest checkpoint that one of the keys signed."""
        async with AsyncExitStack() as stack:
            points = await open_rows(stack, self._connection, f"{_CHECKPOINTS} DESC", self._tenant_id)
            while (row := await points.next()) is not None:
                try:
                    return formats.open_checkpoint(row["note"], keys, origin=self._origin).checkpoint.size
                except NoteError:
                    continue
        return 0

    def _saved(self, saved: Sequence[Saved], keys: Sequence[Verifier]) -> list[tuple[int, bytes, str]]:
        found = []
        for one in saved:
            if not one.note.startswith(f"{self._origin}\n".encode()):
                continue
            try:
                opened = formats.open_checkpoint(one.note, keys, origin=self._origin).checkpoint
            except NoteError as error:
                self._report.fault("saved-checkpoint", f"{one.source}: {error}")
                continue
            self._report.saved_sizes.append(opened.size)
            self._report.saved_sources.append(one.source)
            found.append((opened.size, opened.root, one.source))
        return found


def _order(row: Row) -> tuple[int, int]:
    return ((row["index"] + 1) << row["level"], row["level"])
