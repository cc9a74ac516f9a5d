"""`podium erase`: texts of a run go for good; the record that they were there, and who had them erased, stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from engine.cli import terminal
from engine.cli.orders import run_argument
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.settings import Settings
    from engine.store.erasing import ErasureOrder
    from engine.store.erasure_scope import Reach, ReachedText, Target


@click.command()
@run_argument
@click.option(
    "--step", type=click.IntRange(0), metavar="N", help="The texts of step N (from 0), and all made of or with them."
)
@click.option("--round", "round_number", type=click.IntRange(0), metavar="N", help="Of this round; the last if absent.")
@click.option(
    "--artifact", metavar="ID", help="This artifact, and all made of it; `podium audit log RUN --json` names them."
)
@click.option("--basis", required=True, metavar="TEXT", help="The legal basis, for example 'GDPR Art. 17(1)(b)'.")
@click.option("--reason", metavar="TEXT", help="More words on why; kept beside the basis.")
@click.option(
    "--copies",
    type=click.Choice(("refuse", "erase", "keep")),
    default="refuse",
    show_default=True,
    help="Other texts (of forks, for example) that quote what is erased.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be erased, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as one JSON object.")
def erase(
    *,
    run_reference: str,
    step: int | None,
    round_number: int | None,
    artifact: str | None,
    basis: str,
    reason: str | None,
    copies: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Erase the texts of RUN (an id, the beginning of one, or 'last') and of all runs below it.

    Keys, salts and contents are destroyed, in restored backups of the database too; entries, numbers and proofs stay.
    What was made of an erased text goes with it: with a step also its round's plan, which quotes the step's subtask,
    all subtasks, which the plan quotes, the run that the step was given to, and the manifests of prompts that showed
    any of it. Other steps keep their output. --dry-run lists it all. Refused while the run has not ended, and while it
    is under hold.
    """
    from engine.cli.orders import order_of, settings_for_order
    from engine.cli.session import run_async

    if step is not None and artifact is not None:
        raise InputError("usage", "--step and --artifact exclude each other", hint="name one of them")
    if round_number is not None and step is None:
        raise InputError("step-missing", "--round needs --step", hint="a run as a whole has all its rounds")
    if not basis.strip():
        raise InputError("basis-missing", "the basis is empty", hint="--basis 'GDPR Art. 17(1)(b), ticket 4711'")
    settings = settings_for_order(reason)
    order_of(settings, UUID(int=0), basis)
    place = (step, round_number, _artifact(artifact))
    words = {"basis": basis, "reason": reason, "copies": copies}
    return run_async(_erase(settings, run_reference, place, words, dry_run=dry_run, as_json=as_json))


def _artifact(text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise InputError(
            "artifact-unknown", "--artifact takes the id of an artifact", hint="podium audit log RUN --json names them"
        ) from None


async def _erase(
    settings: Settings,
    reference: str,
    place: tuple[int | None, int | None, UUID | None],
    words: dict[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.store import erasing

    async with open_session(settings, Needs()) as session:
        target = await _target(session, reference, place)
        order = erasing.ErasureOrder(target, settings.actor_id, settings.on_behalf_of, **words)
        if dry_run:
            reach = await erasing.preview(session.database, order)
        else:
            reach = (await erasing.erase(session.database, order)).reach
    if as_json:
        terminal.out_json(_object(order, reach, dry_run=dry_run))
    else:
        _print(order, reach, dry_run=dry_run)
    return ExitCode.OK


async def _target(session: Session, reference: str, place: tuple[int | None, int | None, UUID | None]) -> Target:
    from engine.cli.tables import step_of
    from engine.service import find_run, resolve_run
    from engine.store.erasure_scope import Target

    step, round_number, artifact = place
    if step is None:
        return Target(await resolve_run(session.database, reference), artifact_id=artifact)
    run = await find_run(session.database, reference)
    found = step_of(run, step, round_number)
    if found is None:
        raise InputError("step-unknown", f"run {run.id} has no step {step}", hint=f"podium show {run.id}")
    return Target(run.id, found.round, step)


def _object(order: ErasureOrder, reach: Reach, *, dry_run: bool) -> dict[str, Any]:
    from engine.cli.contract import versioned

    def counts(texts: Any) -> list[dict[str, Any]]:
        return [{"run": str(run), "artifacts": sorted(map(str, ids))} for run, ids in texts.items()]

    return versioned(
        {
            "erasure": None if dry_run else str(order.id),
            "run": str(order.target.run_id),
            "scope": order.target.scope,
            "round": order.target.round,
            "step": order.target.position,
            "erased": counts(reach.artifacts),
            "texts": [
                {
                    "run": str(one.run_id),
                    "artifact": str(one.id),
                    "kind": one.kind,
                    "round": one.round,
                    "step": one.position,
                }
                for one in reach.texts
            ],
            "copies": counts(reach.copies),
            "copies_left": bool(reach.copies),
            "runs_that_reuse": [str(run) for run in reach.readers],
            "in_the_clear": [str(run) for run, sealed in reach.sealed.items() if not sealed],
            "live": [str(run) for run in reach.live],
        }
    )


def _print(order: ErasureOrder, reach: Reach, *, dry_run: bool) -> None:
    from engine.cli.render import counted

    verb = "would be" if dry_run else "were"
    for run, ids in reach.artifacts.items():
        kinds = _kinds([one for one in reach.texts if one.run_id == run])
        terminal.out(f"{counted(len(ids), 'text')} of run {run} {verb} erased: {kinds}")
    for run, ids in reach.copies.items():
        terminal.out(f"{counted(len(ids), 'other text')} of run {run} quote them{'' if dry_run else ' and were left'}")
    if dry_run and reach.copies and order.copies == "refuse":
        terminal.out("note: so this would be refused; --copies erase takes those along, --copies keep leaves them")
    for run in reach.readers:
        terminal.out(f"run {run} reuses an output that {'would be' if dry_run else 'is'} gone")
    for run, sealed in reach.sealed.items():
        if not sealed:
            terminal.out(
                f"note: texts of run {run} were never sealed, so older backups of the database still hold them"
            )
    for run in reach.live:
        terminal.out(f"note: run {run} has not ended, so this would be refused")
    if dry_run:
        return
    if order.target.scope != "run":
        terminal.out("note: models that read these texts may have used them in other words; only you can tell")
    terminal.err(f"hint: podium audit log {order.target.run_id}")


def _kinds(texts: Sequence[ReachedText]) -> str:
    """What one run's texts are: `task, plan, subtask of steps 0-2, output of step 0, 3 prompt manifests`."""
    rounds = {one.round for one in texts} - {None}
    grouped: dict[tuple[int | None, str, bool], list[ReachedText]] = {}
    for one in texts:
        # Manifests hold no words of anybody; how many there are is enough.
        is_placed = one.position is not None and not one.kind.endswith("_manifest")
        grouped.setdefault((one.round if len(rounds) > 1 else None, one.kind, is_placed), []).append(one)
    words = []
    for (round_number, kind, is_placed), found in grouped.items():
        name = kind.replace("_", " ")
        if is_placed:
            steps = sorted({one.position for one in found if one.position is not None})
            name += f" of step{'' if len(steps) == 1 else 's'} {_spans(steps)}"
        elif len(found) > 1:
            name = f"{len(found)} {name}s"
        words.append(name if round_number is None else f"{name} (round {round_number})")
    return ", ".join(words)


def _spans(steps: Sequence[int]) -> str:
    """`0-2, 5` as `0-2 and 5`, so that the comma stays between kinds."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1].append(step)
        else:
            spans.append([step])
    return " and ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
