"""Escaping by construction, whatever a pod is called and writes."""

import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.server.page.html import (
    LONGEST_TEXT,
    UNKNOWN,
    Html,
    cores,
    fields,
    join,
    percent,
    seconds,
    size,
    table,
    tag,
)
from pykubelet.server.page.log_tail import MAX_BYTES, MAX_LINE, MAX_LINES, tail_of


class Reader(HTMLParser):
    """The elements and texts of a document, as a browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(max_size=300), st.text(max_size=300))
def test_tag_any_text_and_attribute_stay_text(child: str, attribute: str) -> None:
    reader = Reader(tag("p", child, title=attribute))
    (element,) = reader.tags
    assert element[0] == "p"
    assert [name for name, _ in element[1]] == ["title"]
    assert all(character.isprintable() or character in "\n\t" for character in reader.text)


def test_tag_hostile_text_is_visible_and_inert() -> None:
    shown = tag("td", "<script>alert(1)</script>\x1b[31m\u202e\x00", title='"><img src=x onerror=alert(1)>')
    assert "<script" not in shown
    assert "<img" not in shown
    assert Reader(shown).text.startswith("<script>alert(1)</script>\\x1b[31m\\u202e\\x00")


def test_tag_long_text_is_shortened() -> None:
    assert len(tag("p", "a" * 1_000_000)) < LONGEST_TEXT + 20
    assert len(tag("p", "<" * 1_000_000)) < 4 * LONGEST_TEXT + 20


def test_join_only_html_is_not_escaped() -> None:
    assert join(["<b>", Html("<b>"), 1, None]) == "&lt;b&gt;<b>1"
    assert fields({"a<": "b<", "empty": ""}) == "<dl><dt>a&lt;</dt><dd>b&lt;</dd></dl>"
    assert "<caption" in table(("a",), [], label="x")


def test_texts_of_amounts() -> None:
    assert [size(n) for n in (None, 0, 1023, 1536, 300 * 1024**2)] == [
        UNKNOWN,
        "0 B",
        "1023 B",
        "1.5 KiB",
        "300 MiB",
    ]
    assert [cores(n) for n in (0.25, 2.0, 1.25)] == ["250m", "2", "1.25"]
    assert [percent(n) for n in (0.0, 0.05, 0.5, None)] == ["0 %", "5.0 %", "50 %", UNKNOWN]
    assert [seconds(n) for n in (0.0012, 0.012, 0.5, 12.0)] == ["1.2 ms", "12 ms", "0.50 s", "12 s"]


def entry(text: bytes, flag: bytes = b"F", stream: bytes = b"stdout") -> bytes:
    return b"2026-01-02T03:04:05.123456789Z " + stream + b" " + flag + b" " + text + b"\n"


def test_tail_of_log_has_last_lines_without_escape_sequences() -> None:
    data = b"".join(entry(f"line {n}".encode()) for n in range(150)) + entry(
        b"\x1b[31mred\x1b[0m \x1b]0;title\x07end"
    )
    tail = tail_of("main", data, is_whole=True)
    assert len(tail.lines) == MAX_LINES
    assert tail.lines[-1] == "03:04:05 red end"
    assert str(MAX_LINES) in tail.note


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_tail_of_log_has_times_of_the_node_whatever_the_zone_of_the_runtime(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        tail = tail_of("main", b"2026-01-02T03:04:05.5+02:00 stdout F x\n", is_whole=True)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert tail.lines == ({"UTC": "01:04:05 x", "Asia/Kolkata": "06:34:05 x"}[zone],)


def test_tail_of_line_of_a_megabyte_is_bounded() -> None:
    parts = [entry(b"a" * 16_000, b"P")] * 60
    tail = tail_of("main", b"".join(parts)[-MAX_BYTES:], is_whole=False)
    assert all(len(line) < MAX_LINE + 100 for line in tail.lines)
    assert tail_of("main", b"x" * MAX_BYTES, is_whole=False).lines == ()
    assert "too long" in tail_of("main", b"x" * MAX_BYTES, is_whole=False).note


@given(st.binary(max_size=2000), st.booleans())
def test_tail_of_any_bytes_is_bounded(data: bytes, is_whole: bool) -> None:
    tail = tail_of("main", data, is_whole=is_whole)
    assert all(len(line) < MAX_LINE + 100 for line in tail.lines)
