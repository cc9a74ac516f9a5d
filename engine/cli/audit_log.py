"""`podium audit checkpoint | key | verify --database`: the log, its signer, and the check of all of it.

Must never decide what is wrong with a log: that is the store's and the verifier's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.log import Checkpoint
    from engine.store.log_check import LogReport, Saved
    from engine.verifier.note import Verifier

OVERLAP_DAYS: Final = 30
OVERLAP_DAYS_MAX: Final = 3650
FILE_BYTES_MAX: Final = 64 * 1024
_FILE: Final = click.Path(dir_okay=False, path_type=Path)
_MEMORY: Final = "the signer's memory"
_NOT_HERE: Final = "PODIUM_AUDIT_DIR is not set, so nothing is signed here"


@click.command(short_help="Bring the log up to date, sign it, print the checkpoint.")
@click.option("-o", "--output", "target", type=_FILE, help="Write it to this file.")
@click.option("--after-restore", is_flag=True, help="Accept that the database is an older one, restored on purpose.")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
def checkpoint(target: Path | None, after_restore: bool, as_json: bool) -> int:
    """Give every entry its place in the log, sign how large the log is and what its root is, and print that.

    Keep what it prints where nobody who runs Podium can change it: later it proves that nothing before it was altered.
    The signer refuses a log that contradicts what it signed before; --after-restore records that this is meant.
    """
    from engine.cli.contract import time_text, versioned
    from engine.cli.session import run_async
    from engine.cli.targets import checked_target

    checked_target(target)
    found = run_async(_checkpoint(_settings(), after_restore=after_restore))
    if target is not None:
        _write(target, found.note)
    if as_json:
        terminal.out_json(
            versioned(
                {
                    "size": found.size,
                    "root": found.root.hex(),
                    "key": found.key_id,
                    "signed_at": time_text(found.signed_at),
                    "note": found.note.decode(),
                }
            )
        )
    elif target is not None:
        terminal.out(f"{terminal.inert(str(target))}: {found.size:,} entries, signed by key {found.key_id}")
    else:
        terminal.out_bytes(found.note)
    return ExitCode.OK


@click.command(short_help="Print the public key that `verify --trust` takes.")
@click.option("-o", "--output", "target", type=_FILE, help="Write it to this file.")
@click.option("--rotate", is_flag=True, help="Replace the key first; the old one and the new one sign that together.")
@click.option(
    "--overlap-days",
    type=click.IntRange(0, OVERLAP_DAYS_MAX),
    default=OVERLAP_DAYS,
    show_default=True,
    help="With --rotate: how long the old key goes on signing beside the new one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the history of keys as one JSON object.")
def key(target: Path | None, rotate: bool, overlap_days: int, as_json: bool) -> int:
    """Print the public key that signs the log, one line. Give it to auditors by a way of its own, not with a bundle."""
    from engine.cli.contract import time_text, versioned
    from engine.cli.session import run_async
    from engine.cli.targets import checked_target

    checked_target(target)
    history, current = run_async(_keys(_settings(), rotate=rotate, overlap_days=overlap_days))
    text = f"# The public key of a Podium log, for `podium audit verify --trust`.\n{current}\n"
    if target is not None:
        _write(target, text.encode())
    if as_json:
        rows = [
            {"key": one.key, "replaces": one.replaces, "overlap_s": one.overlap_s, "since": time_text(one.at)}
            for one in history
        ]
        terminal.out_json(versioned({"key": current, "history": rows}))
    elif target is not None:
        terminal.out(f"{terminal.inert(str(target))}: {current}")
    else:
        terminal.out(text.rstrip("\n"))
    return ExitCode.OK


def verify_database(trust: Sequence[Path], saved: Path | None, *, as_json: bool) -> int:
    """Checks the whole log of this installation and prints what was found; returns the exit code.

    Exit codes: 0 valid; 1 invalid; 3 valid, but entries are not covered by a signed checkpoint yet, or no key came
    from outside the database.
    """
    from engine.cli.contract import versioned
    from engine.cli.session import run_async

    settings = _settings()
    keys = _trusted(settings, trust)
    report = run_async(_check(settings, keys, _saved(settings, saved)))
    code = _verdict(report)
    if as_json:
        terminal.out_json(versioned(_report_object(report, code)))
    else:
        _say_report(
            report,
            own_key=not trust and settings.audit_dir is not None,
            kept=saved is not None and str(saved) in report.saved_sources,
        )
    return int(code)


def _settings() -> Settings:
    from engine.cli.session import settings_for_reading
    from engine.settings import load_settings

    settings = settings_for_reading()
    if settings is None:
        raise InputError(
            "nothing-on-record",
            f"there is no record yet: {load_settings().home} does not exist",
            hint="`podium run` makes it; PODIUM_HOME names another one",
        )
    return settings


async def _checkpoint(settings: Settings, *, after_restore: bool) -> Checkpoint:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.signing import AuditSettings, log_keeper

    async with open_session(settings, Needs()) as session:
        keeper = log_keeper(session.database, AuditSettings.of(settings))
        if keeper.signer is None:
            if after_restore:
                raise _needs_signer()
            terminal.err(f"warning: {_NOT_HERE}; this is the newest checkpoint on record")
        elif after_restore:
            await keeper.signer.accept_restored(
                session.database, TENANT, actor_id=settings.actor_id, on_behalf_of=settings.on_behalf_of
            )
        found = await keeper.seal(TENANT)
    if found is None:
        raise RefusedError(
            "nothing-to-sign",
            "there are no entries yet" if keeper.signer else "no checkpoint is on record yet",
            hint="the first run makes some" if keeper.signer else "a worker with PODIUM_AUDIT_DIR signs the log",
        )
    return found


async def _keys(settings: Settings, *, rotate: bool, overlap_days: int) -> tuple[list[Any], str]:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.signing import AuditSettings, log_keeper
    from engine.store import log

    async with open_session(settings, Needs()) as session:
        signer = log_keeper(session.database, AuditSettings.of(settings)).signer
        if signer is None and rotate:
            raise _needs_signer()
        if signer is not None:
            if rotate:
                await signer.rotate(
                    session.database,
                    TENANT,
                    actor_id=settings.actor_id,
                    on_behalf_of=settings.on_behalf_of,
                    overlap_days=overlap_days,
                )
            current = await signer.public_key(session.database, TENANT)
        history = await session.database.write(lambda connection: log.signer_keys(connection, TENANT))
    if not history:
        raise RefusedError("no-key", "no key signs this log yet", hint="a worker with PODIUM_AUDIT_DIR makes it")
    if signer is None:
        terminal.err("warning: this is the key that the database names; ask whoever has the audit directory")
        current = history[-1].key
    return history, current


async def _check(settings: Settings, keys: list[Verifier], saved: list[Saved]) -> LogReport:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.store.log_check import check_log

    shown = terminal.err_is_terminal()

    def tell(done: int) -> None:
        terminal.err(f"checked {done:,} entries and leaves")

    async with open_session(settings, Needs()) as session:
        return await check_log(session.database, trusted=keys, saved=saved, on_progress=tell if shown else None)


def _trusted(settings: Settings, trust: Sequence[Path]) -> list[Verifier]:
    """The keys of the trust files; without one, those of the own audit directory, which is outside of the database."""
    from engine.service import TENANT
    from engine.signing import AuditFolder
    from engine.verifier.checkpoint import origin_of
    from engine.verifier.note import NoteError, parse_keys, verifier_of

    found: dict[Verifier, None] = {}
    for path in trust:
        try:
            found.update(dict.fromkeys(parse_keys(_read(path))))
        except NoteError as error:
            raise InputError(
                "trust-unreadable", f"{path}: {error}", hint="a file as `podium audit key -o FILE` writes it"
            ) from None
    if found:
        return list(found)
    if settings.audit_dir is None:
        return []
    return [verifier_of(one, origin_of(str(TENANT))) for one in AuditFolder(settings.audit_dir).keys(TENANT)]


def _saved(settings: Settings, path: Path | None) -> list[Saved]:
    """The checkpoint file of the user, and what the signer of this place remembers."""
    from engine.service import TENANT
    from engine.signing import AuditFolder
    from engine.store.log_check import Saved

    found = [] if path is None else [Saved(_kept(path), str(path))]
    remembered = None if settings.audit_dir is None else AuditFolder(settings.audit_dir).memory(TENANT)
    return found if remembered is None else [*found, Saved(remembered, _MEMORY)]


def _kept(path: Path) -> bytes:
    """A checkpoint file of the user; whether it fits and who signed it is for the check to say."""
    from engine.verifier.checkpoint import parse
    from engine.verifier.note import NoteError, unverified_text

    note = _read(path)
    try:
        parse(unverified_text(note))
    except NoteError as error:
        raise InputError(
            "usage", f"{path} is not a checkpoint: {error}", hint="keep what `podium audit checkpoint` prints"
        ) from None
    return note


def _verdict(report: LogReport) -> ExitCode:
    if report.faults_count:
        return ExitCode.FAILED
    if report.waiting or report.uncovered or not report.pinned:
        return ExitCode.WAITING
    return ExitCode.OK


def _report_object(report: LogReport, code: ExitCode) -> dict[str, Any]:
    return {
        "valid": code is not ExitCode.FAILED,
        "entries": report.entries,
        "chains": report.chains,
        "leaves": report.size,
        "checkpoints": report.checkpoints,
        "waiting": report.waiting,
        "uncovered": report.uncovered,
        "pinned": report.pinned,
        "saved": report.saved_sizes,
        "faults_count": report.faults_count,
        "faults": [{"code": fault, "text": text} for fault, text in report.faults],
    }


def _say_report(report: LogReport, *, own_key: bool, kept: bool) -> None:
    """``own_key``: the keys come from this place's audit directory; ``kept``: the user's checkpoint was compared."""
    from engine.cli.render import counted

    for fault, text in report.faults:
        terminal.out(f"{fault}: {terminal.inert(text)}")
    if report.faults_count > len(report.faults):
        terminal.out(f"and {report.faults_count - len(report.faults):,} faults more")
    looked = f"{report.entries:,} entries of {counted(report.chains, 'chain')}, {report.size:,} leaves, "
    looked += counted(report.checkpoints, "checkpoint")
    terminal.out(f"{'INVALID' if report.faults_count else 'valid'}: {looked}")
    if report.pinned:
        terminal.out(f"keys: {'those of the signer here, from the audit directory' if own_key else 'yours (--trust)'}")
    for source, size in zip(report.saved_sources, report.saved_sizes, strict=True):
        whose = "the signer's own memory, in the audit directory" if source == _MEMORY else "yours (--checkpoint)"
        terminal.out(f"compared with a checkpoint from outside the database, {whose}: {size:,} leaves")
    if report.waiting or report.uncovered:
        open_ends = report.waiting + report.uncovered
        terminal.out(f"not covered by a signed checkpoint yet: {open_ends:,} (`podium audit checkpoint` signs them)")
    _say_unproven(report, own_key=own_key, kept=kept)


def _say_unproven(report: LogReport, *, own_key: bool, kept: bool) -> None:
    if own_key and report.pinned:
        terminal.out(
            "not proven: that whoever has the audit directory did not write the log anew; a key that you kept "
            "elsewhere does not depend on it (--trust)"
        )
    if not report.pinned:
        terminal.out("not proven: that the keys are the operator's; they are those that the database names (--trust)")
    if not kept:
        terminal.out(
            "not proven: that nothing was cut off or signed anew by whoever has the signer's key; compare it with a "
            "checkpoint that you kept elsewhere (--checkpoint)"
        )
    terminal.out(
        "not proven: that the stored texts are those that the entries commit to, nor which of them were erased; a "
        "bundle shows both (`podium audit export`)"
    )
    terminal.out("not proven: events that were never recorded, and whether what was recorded was true")


def _needs_signer() -> UnavailableError:
    return UnavailableError("signer-not-here", _NOT_HERE, hint="set it to the folder that the workers sign with")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as source:
            return source.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InputError(
            "file-unreadable",
            f"{path} cannot be read: {(error.strerror or 'unknown error').lower()}",
            hint="name a file that exists and that you may read",
        ) from None


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        from engine.cli.targets import unwritable

        raise unwritable(path, (error.strerror or "unknown error").lower()) from None
