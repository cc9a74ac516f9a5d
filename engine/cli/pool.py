"""`podium pool check`: reads a pool file as a run would, and looks for its keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from worker_pools.pool import Pool
    from worker_pools.secrets import SecretRef


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

    from engine.service import refuse_unsupported

    refuse_unsupported(found)
    remarks = other_findings(found)
    missing = missing_keys(found)
    if as_json:
        terminal.out_json(_pool_object(found))
    else:
        _print_pool(found)
    warnings = [
        f"{spell(reference)} is not set; {who(found, reference)} {need(found, reference)} it" for reference in missing
    ]
    if missing and keys:
        if as_json:
            for warning in warnings:
                terminal.err(f"error: {warning}")
            return ExitCode.BAD_INPUT
        raise InputError("key-missing", "\n".join(warnings), hint="set it, then try again")
    for warning in [*warnings, *remarks]:
        terminal.err(f"warning: {warning}")
    return ExitCode.OK


def other_findings(found: Pool) -> list[str]:
    """What is to be said of a pool beside its keys; raises InputError for a model that no provider has.

    What is not installed here is a warning only: the calls may be made by workers elsewhere.
    """
    from worker_pools.pool_check import check_pool

    remarks = [finding for finding in check_pool(found, os.environ) if finding.code != "key-missing"]
    for finding in remarks:
        if finding.code == "model-unknown":
            raise InputError(finding.code, finding.text, hint=finding.hint)
    return [finding.text for finding in remarks]


def missing_keys(found: Pool) -> list[SecretRef]:
    """The keys that the pool names and that are not here."""
    from worker_pools.pool import required_secrets
    from worker_pools.secrets import SecretStore

    return SecretStore().missing(required_secrets(found))


def spell(reference: SecretRef) -> str:
    """`$NAME` or `file /path`."""
    return f"${reference.env}" if reference.env is not None else f"file {reference.file}"


def who(found: Pool, reference: SecretRef) -> str:
    """The models that need a key, in words."""
    return ", ".join(
        "the Conductor" if model is found.conductor else model.name
        for model in found.models
        if model.api_key == reference
    )


def need(found: Pool, reference: SecretRef) -> str:
    """`needs`, or `need` for more than one model."""
    return "needs" if sum(model.api_key == reference for model in found.models) == 1 else "need"


def _pool_object(found: Pool) -> dict[str, Any]:
    from engine.cli.contract import versioned
    from worker_pools.pool import pool_digest, pool_document, required_secrets

    missing = missing_keys(found)
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
                for reference in required_secrets(found)
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

    rows = []
    for number, model in [("", found.conductor), *((str(number), own) for number, own in enumerate(found.workers))]:
        price = model.price
        rows.append(
            (
                number,
                preview(model.name, 64),
                preview(model.model, 256),
                "unknown" if price is None else f"${price.input_usd_per_mtok:f} / ${price.output_usd_per_mtok:f}",
                preview(model.base_url or model.adapter, 48),
                model.queue,
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
