"""HTML and SVG as text: everything that is not a tag is escaped here, and nowhere else. Pure.

A page made of these pieces holds no script, no link to another place and no style but its own; its content security
policy says so to the browser, whatever a model wrote.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import Final

_TAB, _LINE_FEED = 0x09, 0x0A
# Controls are shown as their pictures, marks that turn the direction of writing by their names: a reader is to see what
# a model wrote, not to be led by it.
_VISIBLE: Final = (
    {code: chr(0x2400 + code) for code in range(0x20) if code not in (_TAB, _LINE_FEED)}
    | {0x7F: "\u2421"}
    | {code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), 0x061C, 0x200B, 0x200E, 0x200F)}
    | {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF, 0xFFFE, 0xFFFF)}
)
STYLE: Final = """
:root{color-scheme:light dark;--line:#8886;--soft:#8881;--ok:#1a7f37;--bad:#cf222e;--warn:#9a6700}
@media (prefers-color-scheme:dark){:root{--ok:#3fb950;--bad:#f85149;--warn:#d29922}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:0 auto;padding:1rem 1.5rem 6rem}
h1{font-size:1.6rem}h2{font-size:1.3rem;margin-top:3rem;border-top:2px solid var(--line);padding-top:1rem}
h3{font-size:1.1rem;margin-top:2rem}h4{font-size:1rem;margin:1.2rem 0 .3rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--soft);border:1px solid var(--line);border-radius:4px;
padding:.6rem .8rem;margin:.3rem 0;max-height:32rem;overflow:auto;font:13px/1.45 ui-monospace,monospace}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
table{border-collapse:collapse;margin:.5rem 0;width:100%}
td,th{border-bottom:1px solid var(--line);padding:.25rem .6rem .25rem 0;text-align:left;vertical-align:top}
th{font-weight:600}table.facts th{width:14rem}
details{margin:.3rem 0}summary{cursor:pointer}
.ok{color:var(--ok)}.bad{color:var(--bad);font-weight:600}.warn{color:var(--warn)}
.box{border:1px solid var(--line);border-radius:6px;padding:.2rem 1rem 1rem;margin:1rem 0}
.note{border-left:4px solid var(--warn);padding:.1rem 1rem;margin:1rem 0}
.quiet{opacity:.75}
.graph{overflow-x:auto}
svg{display:block}svg text{fill:currentColor;font:12px system-ui,sans-serif}svg .title{font-weight:600}
svg rect{fill:var(--soft);stroke:currentColor;stroke-width:1}svg .edge{fill:none;stroke:currentColor;stroke-width:1.2}
svg .succeeded,svg .reused{stroke:var(--ok);stroke-width:2}svg .failed{stroke:var(--bad);stroke-width:2}
svg .skipped,svg .cancelled{stroke-dasharray:4 3}
svg .waiting,svg .pending,svg .running{stroke:var(--warn);stroke-width:2}
@media print{pre{max-height:none}details{display:block}}
"""


def escaped(text: str) -> str:
    """Text as it may stand between tags and in a quoted attribute; controls are made visible."""
    clean = text.replace("\r\n", "\n").translate(_VISIBLE)
    return html.escape(clean.encode("utf-8", "replace").decode(), quote=True)


def tag(name: str, *children: str, **attributes: str | None) -> str:
    """An element. Children are markup already; attributes are text. ``class_`` is written ``class``."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>"


def text_block(text: str) -> str:
    """Text by people or models, as it is."""
    # A line feed directly behind <pre> would not be shown.
    return f"<pre>\n{escaped(text)}</pre>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values under each other; the values are markup already."""
    cells = (tag("tr", tag("th", escaped(name)), tag("td", value)) for name, value in rows)
    return tag("table", *cells, class_="facts")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells are markup already."""
    head = tag("tr", *(tag("th", escaped(name)) for name in header))
    return tag("table", head, *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))


def folded(summary: str, *children: str, is_open: bool = False) -> str:
    """What is shown when it is asked for."""
    return tag("details", tag("summary", summary), *children, open="open" if is_open else None)


def page_start(title: str) -> str:
    """Everything up to the body."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">'
        '<meta name="referrer" content="no-referrer">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head><body>\n"
    )


PAGE_END: Final = "</body></html>\n"
