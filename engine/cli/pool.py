"""`podium pool check`: reads a pool file as a run would, and looks for its keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from worker_pools.pool import Pool, ReviewRule
    from worker_pools.pool_check import PoolFinding

_GATE_WORDS: Final = {
    "plan": "each plan",
    "before": "each step before its call",
    "after": "each output",
    "answer": "the run's answer",
}


@click.group()
def pool() -> None:
    """Check pools."""


@pool.command(short_help="Check a pool: every key of its file, its models, their keys.")
@click.argument("name", metavar="NAME|FILE")
@click.option("--keys", is_flag=True, help="Fail if a key is missing, instead of warning.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as one JSON object.")
def check(name: str, keys: bool, as_json: bool) -> int:
    """Check the pool NAME, or the one in FILE: every key of the file, every model, and whether its keys are set."""
    from worker_pools.pool import load_pool

    found = load_pool(name)

    from engine.service import check_policy

    check_policy(found)
    remarks = findings(found, keys_required=keys)
    missing = [remark for remark in remarks if remark.code == "key-missing"]
    if as_json:
        terminal.out_json(_pool_object(found))
    else:
        _print_pool(found)
    if missing and keys:
        if as_json:
            for remark in missing:
                terminal.err(f"error: {terminal.inert(remark.text)}")
            return ExitCode.BAD_INPUT
        hint = missing[0].hint if len(missing) == 1 else "give each its key, then try again"
        raise InputError("key-missing", "\n".join(remark.text for remark in missing), hint=hint)
    for remark in remarks:
        terminal.err(f"warning: {terminal.inert(remark.text)}")
    return ExitCode.OK


def findings(found: Pool, *, keys_required: bool = False) -> list[PoolFinding]:
    """What is to be said of a pool, keys first; raises InputError for a model that no provider has.

    What is not installed here is a warning only: the calls may be made by workers elsewhere.
    """
    from worker_pools.pool_check import check_pool

    remarks = check_pool(found, os.environ, keys_required=keys_required)
    for finding in remarks:
        if finding.code == "model-unknown":
            raise InputError(finding.code, finding.text, hint=finding.hint)
    return sorted(remarks, key=lambda finding: finding.code != "key-missing")


def _pool_object(found: Pool) -> dict[str, Any]:
    from engine.cli.contract import versioned
    from worker_pools.pool import pool_digest, pool_document, required_secrets
    from worker_pools.secrets import SecretStore

    references = required_secrets(found)
    missing = SecretStore().missing(references)
    return versioned(
        {
            "valid": True,
            "name": found.name,
            "digest": pool_digest(pool_document(found)),
            "conductor": _model_object(found.conductor),
            "workers": [
                {"number": number, **_model_object(worker), "description": worker.description}
                for number, worker in enumerate(found.workers)
            ],
            "keys": [
                {
                    "env": reference.env,
                    "file": reference.file,
                    "found": reference not in missing,
                    "models": [model.name for model in found.models if model.api_key == reference],
                }
                for reference in references
            ],
        }
    )


def _model_object(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.model,
        "adapter": model.adapter,
        "base_url": model.base_url,
        "queue": model.queue,
        "price_known": model.price is not None,
    }


def _print_pool(found: Pool) -> None:
    from engine.cli.render import aligned, columns, counted, preview, show
    from engine.operations.meanings import usual_meaning

    rows = []
    for number, model in [("", found.conductor), *((str(number), own) for number, own in enumerate(found.workers))]:
        price = model.price
        called = model if model.kind == "model" else found.conductor
        cost = "unknown" if price is None else f"${price.input_usd_per_mtok:f} / ${price.output_usd_per_mtok:f}"
        rows.append(
            (
                number,
                preview(model.name, 64),
                # What it costs depends on the plan that it makes.
                *((preview(model.model, 256), cost) if model is called else ("the Conductor", "its plan's")),
                preview(called.base_url or called.adapter, 48),
                called.queue,
                preview(model.description, 48),
            )
        )
    terminal.out(f"pool {found.name}: {counted(len(found.workers), 'worker')}")
    width = columns()
    if width is not None:
        # What a plan may say and what is called is never cut; such a line goes on in the next one.
        width = max(width, 4 + sum(max(len(row[column]) for row in rows) for column in range(3)))
    header = ("", "name", "model", "price in/out per Mtok", "where", "queue", "what for")
    show(*aligned(header, rows, width))
    for rule in found.policy.reviews:
        terminal.out(f"review  {_rule_words(rule)}")
        terminal.out(f"        approving says: {preview(usual_meaning(rule.gate, 'approve', rule.meaning)[1], 1000)}")


def _rule_words(rule: ReviewRule) -> str:
    """A rule for reviews in one line."""
    words = _GATE_WORDS[rule.gate]
    if rule.workers:
        words += f" of {', '.join(rule.workers)}"
    if rule.clearance:
        words += f" with clearance {', '.join(rule.clearance)}"
    if rule.sample_percent < 100:  # noqa: PLR2004  # all of them
        words = f"{rule.sample_percent} % of: {words}"
    words += f", {rule.approvals} approval{'' if rule.approvals == 1 else 's'}"
    if rule.reviewers:
        words += f" by {', '.join(rule.reviewers)}"
    if not rule.four_eyes:
        words += ", also by whose run it is"
    if rule.expires_s is not None:
        words += f", within {rule.expires_s} s, then {rule.on_expiry}"
    return terminal.inert(words)
