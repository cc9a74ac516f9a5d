"""The plan of a round as a picture: steps by depth from left to right, arrows along the access lists. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.evidence.markup import escaped, tag
from engine.graph import PlanGraph

_WIDTH, _HEIGHT = 172, 64
_GAP_X, _GAP_Y = 64, 20
_MARGIN: Final = 12
_LABEL_CHARS: Final = 24
_ARROW: Final = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


@dataclass(frozen=True, slots=True)
class Node:
    """A step in the picture. ``state`` is its colour."""

    position: int
    worker: str
    model: str
    state: str
    reads: Sequence[int]


def plan_svg(nodes: Sequence[Node], label: str) -> str:
    """The picture; empty for a plan without steps, or one whose access lists make no graph."""
    try:
        levels = PlanGraph.of([node.reads for node in nodes]).levels()
    except ValueError:
        return ""
    if not levels:
        return ""
    places = {
        position: (_MARGIN + column * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y))
        for column, level in enumerate(levels)
        for row, position in enumerate(level)
    }
    width = 2 * _MARGIN + len(levels) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + max(map(len, levels)) * (_HEIGHT + _GAP_Y)
    edges = [_edge(places[source], places[node.position]) for node in nodes for source in sorted(set(node.reads))]
    boxes = [_box(node, places[node.position]) for node in nodes]
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    title = tag("title", escaped(label))
    return tag("div", tag("svg", title, _ARROW, *edges, *boxes, role="img", **size), class_="graph")


def _edge(source: tuple[int, int], target: tuple[int, int]) -> str:
    x1, y1 = source[0] + _WIDTH, source[1] + _HEIGHT // 2
    x2, y2 = target[0], target[1] + _HEIGHT // 2
    bend = max(24, (x2 - x1) // 2)
    # An arrow over several columns goes below the boxes between, so that it does not seem to end at one of them.
    drop = _HEIGHT if x2 - x1 > _GAP_X else 0
    path = f"M{x1} {y1}C{x1 + bend} {y1 + drop} {x2 - bend} {y2 + drop} {x2} {y2}"
    return tag("path", class_="edge", d=path, marker_end="url(#arrow)")


def _box(node: Node, place: tuple[int, int]) -> str:
    x, y = place
    lines = [
        (18, f"step {node.position}: {node.state}", "title"),
        (36, node.worker, None),
        (53, node.model or "the Conductor", "quiet"),
    ]
    texts = [tag("text", escaped(_short(text)), x=str(x + 10), y=str(y + at), class_=name) for at, text, name in lines]
    hint = tag("title", escaped(f"step {node.position}: {node.worker} ({node.model}), {node.state}"))
    frame = {"x": str(x), "y": str(y), "width": str(_WIDTH), "height": str(_HEIGHT), "rx": "6"}
    return tag("g", hint, tag("rect", class_=node.state, **frame), *texts)


def _short(text: str) -> str:
    return text if len(text) <= _LABEL_CHARS else text[: _LABEL_CHARS - 1] + "\u2026"
