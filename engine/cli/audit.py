"""`podium audit`: evidence for people who need not trust us: bundles, their verification, a run's history in words.

Must never decide what is proven: that is the verifier's, which knows nothing of this program.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.evidence.export import Exported
    from engine.evidence.record import SaidText, Told
    from engine.settings import Settings

# name: (module, attribute, one line): commands that live elsewhere, imported only when they are called.
_ELSEWHERE: Final[dict[str, tuple[str, str, str]]] = {
    "checkpoint": ("engine.cli.audit_log", "checkpoint", "Bring the log up to date, sign it, print the checkpoint."),
    "key": ("engine.cli.audit_log", "key", "Print the public key that `verify --trust` takes."),
}
_CHECKPOINT_BYTES_MAX: Final = 64 * 1024
# How much of a reason stands in `audit log`; --json has all of it.
_SAID_CHARS_MAX: Final = 400


class _AuditGroup(click.Group):
    """The group with the commands of another module, which its overview does not import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Its own commands, then the others."""
        return [*super().list_commands(ctx), *_ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command; imports it if it lives elsewhere."""
        if cmd_name in _ELSEWHERE:
            module, attribute, _ = _ELSEWHERE[cmd_name]
            return cast("click.Command", getattr(import_module(module), attribute))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the overview without importing what it lists."""
        own = [(name, self.commands[name].get_short_help_str(90)) for name in super().list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([*own, *((name, summary) for name, (_, _, summary) in _ELSEWHERE.items())])


@click.group(cls=_AuditGroup)
def audit() -> None:
    """Export, verify and read evidence."""


@audit.command(short_help="Write an evidence bundle that anybody can verify.")
@click.argument("references", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write.",
)
@click.option(
    "--redact",
    "redact",
    multiple=True,
    metavar="WHAT",
    help="Withhold stored texts: a kind (task, subtask, output, reasoning, ...) or all, of one step with @ (output@0), "
    "or an artifact by its id. Repeatable.",
)
@click.option("--with-sources", is_flag=True, help="Disclose all of the runs that a fork takes outputs over from.")
@click.option(
    "--with-tenant", is_flag=True, help="Disclose texts that belong to no run: reasons of holds and the like."
)
@click.option(
    "--since",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A checkpoint that an auditor kept: the bundle proves that the log only grew since. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
def export(  # noqa: PLR0917  # click passes them by name
    references: tuple[str, ...],
    target: Path,
    redact: tuple[str, ...],
    with_sources: bool,
    with_tenant: bool,
    since: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Write RUN... (ids, beginnings of one, or 'last') with everything below them to one file.

    The export is recorded in each run's ledger first, so the bundle holds its own making.
    """
    from engine.cli.contract import versioned
    from engine.cli.session import run_async, settings_for_run
    from engine.cli.targets import checked_target
    from engine.evidence.redaction import read_rules

    checked_target(target)
    rules = read_rules(redact)
    sizes = [_saved_size(path) for path in since]
    settings = settings_for_run()
    options = {"rules": rules, "since": sizes, "with_sources": with_sources, "with_tenant": with_tenant}
    done = run_async(_export(settings, references, target, options))
    if as_json:
        terminal.out_json(versioned(_export_object(done)))
    else:
        _say_exported(done)
    return ExitCode.OK


@audit.command(short_help="Check a bundle, or the whole log of this installation.")
@click.argument("bundle", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--trust",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="The file with the operator's public key, as `podium audit key` prints it. From another way than the bundle. "
    "One key a line; several --trust add up.",
)
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A checkpoint that you kept from an earlier day.",
)
@click.option("--database", "of_database", is_flag=True, help="Check the log of this installation instead of a file.")
@click.option(
    "--who-approved",
    nargs=2,
    metavar="RUN STEP",
    multiple=True,
    help="Who reviewed a step (or its round:position), the `answer` or the `plan`.",
)
@click.option(
    "--who-saw",
    nargs=2,
    metavar="RUN STEP",
    multiple=True,
    help="Which models and people were shown a step's output, and which models never were.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def verify(  # noqa: PLR0917  # click passes them by name
    bundle: Path | None,
    trust: tuple[Path, ...],
    checkpoint: Path | None,
    of_database: bool,
    who_approved: tuple[tuple[str, str], ...],
    who_saw: tuple[tuple[str, str], ...],
    as_json: bool,
) -> int:
    """Check BUNDLE, without a database and without a network.

    Exit codes: 0 valid; 1 invalid; 2 usage; 3 valid, but some entries are not anchored or texts are withheld; 4 valid,
    and some texts were erased by an order on record.
    """
    if of_database == (bundle is not None):
        raise InputError("usage", "give a bundle, or --database", hint="podium audit verify bundle.zip --trust KEYFILE")
    if bundle is None:
        if who_approved or who_saw:
            raise InputError(
                "usage", "--who-approved and --who-saw ask a bundle", hint="podium audit export RUN -o bundle.zip"
            )
        from engine.cli.audit_log import verify_database

        return int(verify_database(trust, checkpoint, as_json=as_json))
    if not trust:
        raise InputError(
            "trust-missing", "--trust is missing", hint="the operator's public key, which `podium audit key` prints"
        )
    from engine.verifier.__main__ import UsageError, run, written

    try:
        report, answers = run(bundle, trust=trust, checkpoint=checkpoint, who_approved=who_approved, who_saw=who_saw)
    except UsageError as error:
        raise InputError("usage", str(error), hint=error.hint) from None
    if as_json:
        from engine.cli.contract import versioned

        terminal.out_json(versioned({**report.as_json(), "answers": answers}))
    else:
        terminal.out(terminal.inert(written(report, answers, as_json=False)).rstrip("\n"))
    return report.exit_code


@audit.command(name="log", short_help="Show what happened to a run, in words.")
@click.argument("run_reference", metavar="RUN")
@click.option("--below", is_flag=True, help="Also what happened to the runs below it.")
@click.option("--json", "as_json", is_flag=True, help="Print the entries as one JSON object.")
def log_command(run_reference: str, below: bool, as_json: bool) -> int:
    """Show who did what to RUN (an id, the beginning of one, or 'last') and when, from its ledger.

    Under an entry stands what a person wrote to say why: the basis of an erasure, reasons, comments.
    """
    from engine.cli.contract import versioned
    from engine.cli.session import run_async, settings_for_run

    settings = settings_for_run()
    run_id, found = run_async(_timeline(settings, run_reference, below=below))
    if as_json:
        terminal.out_json(versioned({"run": run_id, "entries": [_entry_object(each) for each in found]}))
        return ExitCode.OK
    from engine.cli.render import aligned, columns, show

    rows = [
        row
        for told in found
        for row in (
            (
                "" if told.line.run == run_id else told.line.run[:13],
                f"{told.line.at[:10]} {told.line.at[11:19]}Z",
                told.line.who,
                told.line.text,
            ),
            *(("", "", "", f"  {_said_words(said)}") for said in told.said),
        )
    ]
    header = ("run", "when", "who", "what")
    shown = rows if below else [row[1:] for row in rows]
    show(*aligned(header if below else header[1:], shown, None if columns() is None else 4096))
    return ExitCode.OK


def _saved_size(path: Path) -> int:
    """The size of a saved checkpoint. Who signed it is for the verifier to say."""
    from engine.verifier import checkpoint
    from engine.verifier.note import NoteError

    try:
        # A device or a pipe has no end that could be waited for.
        raw = b""
        if path.is_file():
            with path.open("rb") as file:
                raw = file.read(_CHECKPOINT_BYTES_MAX)
        text, _, _ = raw.decode().rpartition("\n\n")
        return checkpoint.parse(text + "\n").size
    except (OSError, UnicodeDecodeError, NoteError):
        raise InputError(
            "checkpoint-unreadable", f"{path} is not a checkpoint", hint="keep what `podium audit checkpoint` prints"
        ) from None


async def _export(
    settings: Settings,
    references: tuple[str, ...],
    target: Path,
    options: dict[str, Any],
) -> Exported:
    from engine.cli.session import open_session
    from engine.evidence.export import ExportRequest, export_bundle
    from engine.keeper.client import Needs
    from engine.service import TENANT, resolve_run
    from engine.signing import AuditSettings, log_keeper

    async with open_session(settings, Needs()) as session:
        database = session.database
        runs = dict.fromkeys([await resolve_run(database, reference) for reference in references])

        keeper = log_keeper(database, AuditSettings.of(settings))

        async def seal() -> None:
            await keeper.seal(TENANT)

        request = ExportRequest(
            tenant=TENANT,
            runs=tuple(runs),
            target=target,
            actor_id=settings.actor_id,
            on_behalf_of=settings.on_behalf_of,
            seal=seal,
            **options,
        )
        return await export_bundle(database, request)


def _export_object(done: Exported) -> dict[str, Any]:
    return {
        "export": str(done.id),
        "path": str(done.path),
        "bytes": done.byte_count,
        "sha256": done.sha256,
        "runs": [str(run) for run in done.runs.family],
        "taken_from": [str(run) for run in done.runs.taken_from],
        "entries": done.entries,
        "unanchored": done.unanchored,
        "checkpoint_size": done.size,
        "texts": dict(done.artifacts),
    }


def _say_exported(done: Exported) -> None:
    from engine.cli.render import counted

    texts = done.artifacts
    withheld = f", {counted(texts['redacted'], 'text')} withheld" if texts["redacted"] else ""
    erased = f", {counted(texts['erased'], 'text')} erased" if texts["erased"] else ""
    terminal.out(
        f"{terminal.inert(str(done.path))}: {done.byte_count:,} bytes, {counted(len(done.runs.runs), 'run')}, "
        f"{counted(done.entries, 'ledger entry')}, {counted(texts['disclosed'], 'text')}{withheld}{erased}".replace(
            "entrys", "entries"
        )
    )
    if done.tenant_withheld:
        terminal.out(
            f"{counted(done.tenant_withheld, 'text')} withheld because the tenant's own chain holds it, not a run "
            "(reasons of holds and the like): --with-tenant discloses such texts"
        )
    if done.unsigned:
        terminal.err(
            "warning: no signed checkpoint covers any entry of its runs yet: nobody will find it valid. Export it "
            "again once `podium audit checkpoint` has signed the log"
        )
    elif done.unanchored:
        terminal.err(f"warning: {done.unanchored:,} of its entries are not covered by a signed checkpoint")
    terminal.out(f"check it: podium audit verify {terminal.inert(str(done.path))} --trust KEYFILE")


def _said_words(said: SaidText) -> str:
    from engine.cli.render import preview

    name = {"basis_reason": "reason"}.get(said.kind, said.kind.replace("_", " "))
    if said.text is None:
        return f"{name}: ({'erased' if said.erased else 'cannot be read'})"
    return f"{name}: {preview(said.text, _SAID_CHARS_MAX)}"


async def _timeline(settings: Settings, reference: str, *, below: bool) -> tuple[str, list[Told]]:
    from engine.cli.reads import note_log_read
    from engine.cli.session import open_session
    from engine.evidence.record import read_timeline
    from engine.keeper.client import Needs
    from engine.service import resolve_run

    async with open_session(settings, Needs()) as session:
        run_id = await resolve_run(session.database, reference)
        told = await read_timeline(session.database, run_id, below=below)
        # What people wrote stands in it: whoever reads that is on record like any reader.
        await note_log_read(session, told)
        return str(run_id), told


def _entry_object(told: Told) -> dict[str, Any]:
    line = told.line
    return {
        "run": line.run,
        "seq": line.seq,
        "at": line.at,
        "type": line.type,
        "actor": line.actor,
        "on_behalf_of": line.on_behalf_of,
        "round": line.round,
        "step": line.step,
        "text": line.text,
        "artifacts": told.artifacts,
        "said": [
            {"artifact": one.artifact, "kind": one.kind, "text": one.text, "erased": one.erased} for one in told.said
        ],
    }
