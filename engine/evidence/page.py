"""The bundle's page for people: readable without tools and without a network; not evidence itself.

Made from the bundle's other members only, so it can show nothing that the bundle does not hold. Every text by people
and models passes `engine.evidence.markup`. The page is written piece by piece and has a limit; what does not fit is
named by its file in the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from engine.evidence.markup import PAGE_END, escaped, facts, folded, page_start, table, tag, text_block
from engine.evidence.page_run import run_section
from engine.evidence.page_view import PageView
from engine.evidence.spool import Spool

# In characters; a page of this size still opens in a browser.
PAGE_CHARS_MAX: Final = 40 * 2**20


def bundle_page(spool: Spool, described: Mapping[str, Any]) -> bytes:
    """index.html, from the other members in the spool; ``described`` is the manifest without its list of files."""
    view = PageView.of(spool, described)
    pieces: list[str] = []
    total = 0
    for piece in _pieces(view):
        total += len(piece)
        if total > PAGE_CHARS_MAX:
            pieces.append(tag("p", "This page ends here: it would be too long. All of it is in the bundle's files."))
            break
        pieces.append(piece)
    pieces.append(PAGE_END)
    return "".join(pieces).encode()


def _pieces(view: PageView) -> Iterator[str]:
    yield page_start("Podium evidence bundle")
    yield _head(view)
    yield _unproven(view)
    if len(view.runs) > 1:
        yield _contents(view)
    for run in view.ordered_runs():
        yield from run_section(view, run)
    yield _pools(view)


def _head(view: PageView) -> str:
    described = view.described
    log = described["log"]
    if log is None:
        anchored = tag("span", "no signed checkpoint: anybody can have written this", class_="warn")
    else:
        anchored = f"the log had {log['size']:,} entries, root {tag('code', escaped(log['root']))}"
    rows = [
        ("Made", f"{escaped(described['created_at'])} by {escaped(described['producer'])}"),
        ("Export", tag("code", escaped(str(described["export"])))),
        ("Tenant", tag("code", escaped(described["tenant"]))),
        ("Runs", str(len(described["runs"]))),
        ("Checkpoint", anchored),
    ]
    how = (
        "This page was made from the files of the bundle. It is for reading and proves nothing: a page can be edited. "
        "What the bundle proves is what this command says of the file that the page was in, with the public key that "
        "you got from the operator by another way:"
    )
    return (
        tag("h1", "Evidence bundle")
        + facts(rows)
        + tag("p", how)
        + tag("pre", "python3 podium-verify.pyz bundle.zip --trust KEYFILE")
    )


def _unproven(view: PageView) -> str:
    points = [
        "Events that were never recorded, and lies at the moment of recording, leave no trace in any log.",
        "What a provider did with a prompt, and which model really answered, is the provider's word.",
        "The time of an entry is the database's clock; it is certain only between the checkpoints around it.",
    ]
    counts = view.counts
    if counts["redacted"]:
        points.append(f"{counts['redacted']} stored texts are withheld by whoever exported this (marked below).")
    if counts["erased"]:
        points.append(f"{counts['erased']} stored texts were erased; who ordered it and when is in the run's events.")
    if view.unanchored:
        points.append(f"{view.unanchored} entries are not covered by a signed checkpoint.")
    if view.described["log"] is None:
        points.append("No checkpoint has been signed, so nothing proves that the whole record was not made up later.")
    return tag(
        "div", tag("h3", "Not proven"), tag("ul", *(tag("li", escaped(point)) for point in points)), class_="note"
    )


def _contents(view: PageView) -> str:
    rows = [
        tag("li", tag("a", escaped(f"run {run}"), href=f"#run-{run}"), escaped(f" \u2014 {view.role_of(run)}"))
        for run in view.ordered_runs()
    ]
    return tag("h3", "Runs in this bundle") + tag("ul", *rows)


def _pools(view: PageView) -> str:
    parts = [tag("h2", "Pools")]
    for digest in view.pools:
        document = view.pool(digest)
        pool = document.get("pool", {}) if isinstance(document, dict) else {}
        models = [("Conductor", pool.get("conductor", {}))]
        models += [(str(number), worker) for number, worker in enumerate(pool.get("workers", []))]
        rows = [
            [
                escaped(number),
                escaped(str(model.get("name", ""))),
                escaped(str(model.get("model", "") or "the Conductor")),
                escaped(str(model.get("base_url") or model.get("adapter", ""))),
                escaped(_price(model.get("price"))),
                tag("code", escaped(json.dumps(model.get("parameters", {}), ensure_ascii=False, sort_keys=True))),
            ]
            for number, model in models
            if isinstance(model, dict)
        ]
        templates = pool.get("templates", {})
        shown = [
            folded(escaped(f"prompt template: {name}"), text_block(str(text)))
            for name, text in templates.items()
            if text
        ]
        policy = json.dumps(pool.get("policy", {}), ensure_ascii=False, indent=2, sort_keys=True)
        parts.append(
            tag(
                "section",
                tag("h3", escaped(f"Pool {pool.get('name', '')}")),
                tag("p", "SHA-256 ", tag("code", escaped(digest))),
                table(["", "name", "model", "where", "price in / out per Mtok", "parameters"], rows),
                folded("policy", text_block(policy)),
                *shown,
                id=f"pool-{digest[:16]}",
            )
        )
    return "".join(parts)


def _price(price: Any) -> str:
    if not isinstance(price, dict):
        return "unknown"
    return f"${price.get('input_usd_per_mtok')} / ${price.get('output_usd_per_mtok')}"
