"""The system chain of a tenant: ledger entries that belong to no run (keys, persons, holds, sweeps, policies).

Its chain id is the tenant's id. Whoever writes to runs in the same transaction locks them first, the system chain last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from engine.ledger.entry import GENESIS, EntryPlace, Event, entry_bytes, entry_hash
from engine.store import queries
from engine.store.exchange import Connection, Params, exchange

# A lock by name: reading the head FOR UPDATE needs rights on the table that nobody has.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('podium/system/' || %s::text, 0))"
_MAKE_HEAD = "INSERT INTO ledger_heads (run_id, seq, hash) VALUES (%s, 0, %s) ON CONFLICT DO NOTHING"
# A statement of its own behind the lock: it sees what was committed while that waited.
_READ_HEAD = "SELECT seq, hash, clock_timestamp() AS now FROM ledger_heads WHERE run_id = %s"


class Writer(Protocol):
    """Whatever has statements for a transaction's last packet: a run's writer, or a tenant's."""

    async def packet(self) -> list[tuple[str, Params]]:
        """The statements, in order."""
        ...


@dataclass(slots=True)
class ChainWriter:
    """A locked system chain, with what its transaction is going to write."""

    connection: Connection
    tenant_id: UUID
    actor_id: str
    on_behalf_of: str | None
    now: datetime
    seq: int
    head: bytes
    _statements: list[tuple[str, Params]] = field(default_factory=list)
    _bodies: list[bytes] = field(default_factory=list)
    _next_hash: bytes = b""

    def statement(self, sql: str, params: Params) -> None:
        """Adds a statement; it is sent by ``commit``, in order."""
        self._statements.append((sql, params))

    def entry(self, type_: str, **fields: Any) -> None:
        """Adds an entry behind those added before; ``fields`` hold identifiers, codes, integers and hex digests."""
        place = EntryPlace(
            self.tenant_id, self.tenant_id, self.seq + len(self._bodies) + 1, self._next_hash or self.head
        )
        body = entry_bytes(place, Event(type_, self.actor_id, self.on_behalf_of, fields), self.now)
        self._bodies.append(body)
        self._next_hash = entry_hash(body)

    async def packet(self) -> list[tuple[str, Params]]:
        """All statements of this writer, in order; for ``commit`` only."""
        if self._bodies:
            self.statement(queries.APPEND_LEDGER, (self.tenant_id, self.seq, self.head, self._bodies))
        return self._statements

    async def commit(self, *others: Writer) -> None:
        """Sends everything and the COMMIT in one packet; what ``others`` (writers of runs) have goes first."""
        statements = [statement for writer in (*others, self) for statement in await writer.packet()]
        await exchange(self.connection, [*statements, (queries.COMMIT, ())])
        # Now all of it is durable.


async def lock_system(
    connection: Connection, tenant_id: UUID, *, actor_id: str, on_behalf_of: str | None = None, begin: bool = True
) -> ChainWriter:
    """Locks a tenant's system chain until the transaction's end; makes it when it is first needed.

    ``actor_id`` is who acts. With ``begin`` a transaction is begun; without, the caller is in one, whose locks on runs
    it already has. Use it inside `Database.write`.
    """
    *_, head = await exchange(
        connection,
        [
            *([(queries.BEGIN, ())] if begin else []),
            (_LOCK, (str(tenant_id),)),
            (_MAKE_HEAD, (tenant_id, GENESIS)),
            (_READ_HEAD, (tenant_id,)),
        ],
    )
    return ChainWriter(
        connection=connection,
        tenant_id=tenant_id,
        actor_id=actor_id,
        on_behalf_of=on_behalf_of,
        now=head[0]["now"],
        seq=head[0]["seq"],
        head=head[0]["hash"],
    )
