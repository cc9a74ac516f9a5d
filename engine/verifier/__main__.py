"""``python -m engine.verifier BUNDLE --trust KEYS``: verifies an evidence bundle; see docs/bundle.md.

Exit codes: 0 valid, 1 invalid, 2 usage, 3 valid but unanchored or redacted, 4 valid with erasures.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.verifier.archive import TOTAL_BYTES_MAX
from engine.verifier.checkpoint import parse
from engine.verifier.faults import InvalidError
from engine.verifier.note import NOTE_BYTES_MAX, NoteError, Verifier, parse_keys, unverified_text
from engine.verifier.questions import answer_text, find_run, who_approved, who_saw
from engine.verifier.report import USAGE, Report
from engine.verifier.verify import verify_bundle

_KEY_HINT = "a file as `podium audit key -o FILE` writes it: one key a line"


class UsageError(Exception):
    """The command cannot be carried out as it was given; the message is one line, ``hint`` another."""

    def __init__(self, message: str, hint: str = "see --help") -> None:
        super().__init__(message)
        self.hint = hint


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        report, answers = run(
            options.bundle,
            trust=options.trust,
            checkpoint=options.checkpoint,
            who_approved=options.who_approved,
            who_saw=options.who_saw,
        )
    except UsageError as error:
        sys.stderr.write(f"error: {error}\nhint: {error.hint}\n")
        return USAGE
    return report.exit_code if _say(written(report, answers, as_json=options.json)) else USAGE


def _say(text: str) -> bool:
    """Writes to standard output in whatever encoding that has; False if it takes nothing, which is then said."""
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"error: the report cannot be written: {error.strerror}\n")
        # What is left in the buffer would be tried again, and fail again, when the interpreter ends.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return False
    return True


def run(
    bundle: Path,
    *,
    trust: Sequence[Path],
    checkpoint: Path | None = None,
    who_approved: Sequence[Sequence[str]] = (),
    who_saw: Sequence[Sequence[str]] = (),
) -> tuple[Report, list[dict[str, Any]]]:
    """Verifies a file and answers questions (run, step) about it. Raises UsageError."""
    keys: list[Verifier] = []
    for file in trust:
        try:
            keys += parse_keys(_read(file, NOTE_BYTES_MAX))
        except NoteError as error:
            raise UsageError(f"{file} is no file with public keys: {error}", _KEY_HINT) from None
    saved = None if checkpoint is None else _checkpoint(checkpoint)
    report = verify_bundle(_read(bundle, TOTAL_BYTES_MAX), keys, saved)
    questions: list[tuple[Callable[..., dict[str, Any]], Sequence[str]]] = [
        *((_approved, question) for question in who_approved),
        *((_saw, question) for question in who_saw),
    ]
    if report.verdict == "invalid":
        # An answer from a bundle that is invalid would be believed by somebody.
        return report, []
    try:
        return report, [ask(report, *question) for ask, question in questions]
    except InvalidError as error:
        raise UsageError(str(error), "the report without questions lists the runs; --json their steps") from None


def written(report: Report, answers: Sequence[dict[str, Any]], *, as_json: bool) -> str:
    """The report with the answers, for people or as one JSON object."""
    if as_json:
        return json.dumps({**report.as_json(), "answers": list(answers)}, indent=2) + "\n"
    return "\n".join([report.as_text(), *map(answer_text, answers)])


def _approved(report: Report, name: str, place: str) -> dict[str, Any]:
    return who_approved(report, find_run(report, name), place)


def _saw(report: Report, name: str, place: str) -> dict[str, Any]:
    return who_saw(report, find_run(report, name), place)


def _checkpoint(file: Path) -> bytes:
    """The bytes of a saved checkpoint. Whether its signature is good is for the verification to say."""
    data = _read(file, NOTE_BYTES_MAX)
    try:
        parse(unverified_text(data))
    except NoteError as error:
        raise UsageError(f"{file} is not a checkpoint: {error}", "keep what `podium audit checkpoint` prints") from None
    return data


def _read(file: Path, bytes_max: int) -> bytes:
    try:
        # A device or a pipe has no end that could be waited for.
        if not stat.S_ISREG(file.stat().st_mode):
            raise UsageError(f"{file} is not a file", "name a file, not a device or a pipe")
        with file.open("rb") as opened:
            content = opened.read(min(bytes_max, file.stat().st_size) + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or error}",
            "name a file that exists and that you may read",
        ) from None
    if len(content) > bytes_max:
        raise UsageError(f"{file} is larger than {bytes_max} bytes", "name another file")
    return content


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="podium-verify",
        description="Verifies an evidence bundle of Podium without its database, without a network, and without "
        "trusting whoever exported it.",
        epilog="Exit codes: 0 valid, 1 invalid, 2 usage, 3 valid but unanchored or redacted, 4 valid with erasures.",
    )
    question = ("RUN", "STEP")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle")
    parser.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        action="append",
        required=True,
        help="public key of the log, as `podium audit key` prints it; get it from somewhere else than the "
        "bundle; one key a line; several --trust add up",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="a checkpoint that you kept: the log must be an extension of it"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--who-approved",
        nargs=2,
        metavar=question,
        action="append",
        default=[],
        help="who reviewed a step (position, or round:position), the `answer` or the `plan` of a run",
    )
    parser.add_argument(
        "--who-saw",
        nargs=2,
        metavar=question,
        action="append",
        default=[],
        help="which models and people were shown a step's output, and which models never were",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
