"""Sending several statements to PostgreSQL in one packet and reading all answers: one round trip, few system calls.

psycopg's own pipeline waits for the socket at every statement, which is most of what a short transaction costs. This
is the same protocol (libpq's pipeline mode) with one flush. Must never know what the statements mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.abc import Transformer as TransformerLike
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Params = Sequence[Any] | Mapping[str, Any]
Row = dict[str, Any]

# Parsing and planning is most of what the server does for a short statement, so each is prepared once a session.
# The kinds of statements are few; this bounds what a mistake could pile up in the server.
PREPARED_MAX = 200
# The name is not there, or is there already: somebody else uses or empties this session.
_NOT_OURS = {"26000", "42P05"}
_PLACEHOLDER = re.compile(r"%(?:\((\w+)\))?s")


async def exchange(connection: Connection, statements: Sequence[tuple[str, Params]]) -> list[list[Row]]:
    """Carries out statements in order; returns the rows of each, as mappings by column.

    Placeholders are ``%s`` or ``%(name)s``. Without a BEGIN among them the statements are one transaction of their
    own. The first failure is raised as psycopg's error; nothing behind it was carried out.
    """
    async with connection.lock:
        pgconn = connection.pgconn
        transformer = Transformer(connection)
        # All values are converted before the first is sent: one that cannot be leaves the connection as it was.
        session = _sessions.get(connection)
        try:
            sends = [_sends(session, pgconn, transformer, sql, params) for sql, params in statements]
        except BaseException:
            _forget(session)
            raise
        pgconn.enter_pipeline_mode()
        for messages in sends:
            for send in messages:
                send()
        pgconn.pipeline_sync()
        results = await connection.wait(_answers(pgconn))
        # Not reached by a failed or cancelled wait: `Database` closes such a connection.
        pgconn.exit_pipeline_mode()
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                # What this packet was to prepare may not be there now, or (0A000) no longer fit a changed table.
                _forget(session)
                error = error_from_result(result)
                if error.sqlstate in _NOT_OURS:
                    _sessions.pop(connection, None)
                raise error
        # The answer to a preparation says nothing; the statement's own comes right behind it.
        answers = iter(results)
        return [_rows(transformer, list(islice(answers, len(messages)))[-1]) for messages in sends]


@dataclass(slots=True)
class _Session:
    """What a connection's server process has prepared: names by statement and parameter types."""

    names: dict[tuple[bytes, tuple[int, ...]], bytes] = field(default_factory=dict)
    serial: int = 0


_sessions: WeakKeyDictionary[Connection, _Session] = WeakKeyDictionary()


def allow_preparing(connection: Connection) -> None:
    """Lets statements be prepared on a connection. For one that keeps its server process: no pooler stands between."""
    _sessions[connection] = _Session()


def _forget(session: _Session | None) -> None:
    """Prepares everything anew, under new names: the old ones may or may not exist."""
    if session is not None:
        session.names.clear()


def _sends(
    session: _Session | None, pgconn: PGconn, transformer: TransformerLike, sql: str, params: Params
) -> list[Callable[[], None]]:
    """The messages for one statement; the last one is answered with its result."""
    numbered, names = _numbered(sql)
    values = [params[name] for name in names] if isinstance(params, Mapping) else params
    dumped = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
    types, formats = transformer.types or (), transformer.formats
    if session is None:
        return [partial(pgconn.send_query_params, numbered, dumped, param_types=types, param_formats=formats)]
    known = session.names.get((numbered, types))
    if known is not None:
        return [partial(pgconn.send_query_prepared, known, dumped, param_formats=formats)]
    if len(session.names) >= PREPARED_MAX:
        return [partial(pgconn.send_query_params, numbered, dumped, param_types=types, param_formats=formats)]
    session.serial += 1
    name = b"podium_%d" % session.serial
    session.names[numbered, types] = name
    return [
        partial(pgconn.send_prepare, name, numbered, types),
        partial(pgconn.send_query_prepared, name, dumped, param_formats=formats),
    ]


@lru_cache(maxsize=256)
def _numbered(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """The statement with ``$1`` placeholders, and the names in their order; a name used twice is one parameter."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match[1] or f"{len(names)}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _PLACEHOLDER.sub(number, sql).encode(), tuple(names)


def _answers(pgconn: PGconn) -> Generator[Wait, Ready | int, list[PGresult]]:
    """Flushes, then collects one result a statement up to the answer to the Sync; yields when it has to wait."""
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            # The server may be unable to read on before somebody takes its answers.
            pgconn.consume_input()
    results: list[PGresult] = []
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is not None:
            if result.status == ExecStatus.PIPELINE_SYNC:
                return results
            results.append(result)
        elif pgconn.status == ConnStatus.BAD:
            raise psycopg.OperationalError("the connection was lost")


def _rows(transformer: TransformerLike, result: PGresult) -> list[Row]:
    if not result.ntuples:
        return []
    transformer.set_pgresult(result, set_loaders=True, format=Format.TEXT)
    names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
    return list(transformer.load_rows(0, result.ntuples, lambda values: dict(zip(names, values, strict=True))))
