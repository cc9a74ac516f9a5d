"""What a model wrote can stand in the page, and cannot become a part of it."""

from __future__ import annotations

import html
import html.parser
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.graph_svg import Node, plan_svg
from engine.evidence.markup import STYLE, escaped, facts, folded, page_start, table, tag, text_block


class Reader(html.parser.HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(st.text())
def test_no_text_becomes_an_element_and_all_of_it_can_be_read(text: str) -> None:
    found = read(text_block(text))
    assert found.tags == ["pre"]
    assert found.text == "\n" + html.unescape(escaped(text))
    assert "<" not in escaped(text)
    assert '"' not in escaped(text)


@given(st.text())
def test_no_text_leaves_its_attribute(text: str) -> None:
    assert read(tag("a", "x", href=text, class_=text)).tags == ["a"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31m", "a\u241b[31m"),
        ("\0", "\u2400"),
        ("left\u202eright", "left[U+202E]right"),
        ("a\u200bb", "a[U+200B]b"),
        ("one\r\ntwo\tthree\n", "one\ntwo\tthree\n"),
        ("\ud800", "?"),
        ("café 😀", "café 😀"),
    ],
)
def test_what_would_lead_a_reader_astray_is_shown(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_page_allows_its_own_style_and_nothing_else() -> None:
    start = page_start("<A title>")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', start)
    assert policy is not None
    assert html.unescape(policy[1]).startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert f"<style>{STYLE}</style>" in start
    assert "script" not in start
    assert "<title>&lt;A title&gt;</title>" in start


def test_tables_and_folds_take_markup_for_cells_and_text_for_names() -> None:
    assert read(facts([("<name>", tag("b", "x"))])).tags == ["table", "tr", "th", "td", "b"]
    assert read(table(["<h>"], [["<i>y</i>"]])).tags == ["table", "tr", "th", "tr", "td", "i"]
    assert folded("s", "t", is_open=True).startswith('<details open="open">')


def test_a_plan_is_drawn_with_a_box_a_step_and_an_arrow_an_access() -> None:
    nodes = [Node(number, f"<w{number}>", "m" * 60, "succeeded", list(range(number))) for number in range(4)]
    picture = read(plan_svg(nodes, "<plan>"))
    assert picture.tags.count("rect") == 4
    # One is the arrow's head.
    assert picture.tags.count("path") == 6 + 1
    assert "script" not in picture.tags
    assert "<w0>" in picture.text
    assert "m" * 24 not in picture.text.replace("m" * 60, "")


@pytest.mark.parametrize("reads", [[[0]], [[1], []], [[-1]]])
def test_what_is_no_graph_is_not_drawn(reads: list[list[int]]) -> None:
    assert plan_svg([Node(number, "w", "m", "pending", own) for number, own in enumerate(reads)], "") == ""


def test_a_plan_without_steps_is_not_drawn() -> None:
    assert plan_svg([], "") == ""
