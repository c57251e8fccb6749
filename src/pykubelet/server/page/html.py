"""HTML that is escaped by construction, and texts for operators.

Every piece of a document is an `Html`, which only `tag`, `join` and this package's constants create; any
other text that becomes a child or an attribute is escaped. Names, messages and log lines of pods are hostile:
control characters are made visible, and long texts are shortened. Styles and scripts are never inline,
because the content security policy of the page forbids them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from pykubelet.util.text import escape_unprintable, readable

LONGEST_TEXT = 2000
"""Characters of a text; the rest is left out."""
_VOID = frozenset({"input", "link", "meta", "br", "rect", "line", "circle", "polyline", "path"})
Attribute = str | int | float | bool | None


class Html(str):
    """A piece of a document that needs no further escaping."""

    __slots__ = ()


Child = Html | str | int | None
Section = Html | tuple[Html, ...]
"""A card of a view, or several that are below one another in a column."""
EMPTY = Html("")
UNKNOWN = "\N{EN DASH}"
"""Text for a value that is not known."""


def text(value: str | int, limit: int = LONGEST_TEXT) -> Html:
    """Return a text as HTML: shortened, with visible control characters, and escaped."""
    shown = readable(str(value))
    if len(shown) > limit:
        shown = f"{shown[:limit]}…"
    return Html(html.escape(escape_unprintable(shown), quote=True))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Return an element; in names of attributes `_` stands for `-`, a trailing one is removed.

    False and None leave an attribute out, True writes it without a value.
    """
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        written.append(shown if value is True else f'{shown}="{text(_attribute(value))}"')
    head = " ".join(written)
    if name in _VOID and not children:
        return Html(f"<{head}/>")
    return Html(f"<{head}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Return the children one after the other."""
    return Html(
        "".join(child if isinstance(child, Html) else text(child) for child in children if child is not None)
    )


def table(headings: Iterable[Child], rows: Iterable[Html], *, label: str, kind: str = "") -> Html:
    """Return a table that scrolls inside its frame, with a name for screen readers."""
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col") for heading in headings)))
    body = tag(
        "table", tag("caption", label, class_="hidden"), head, tag("tbody", *rows), class_=kind or None
    )
    return tag("div", body, class_="frame", tabindex=0, role="region", aria_label=label)


def fields(pairs: Mapping[str, Child]) -> Html:
    """Return a description list; empty values are left out."""
    shown = [tag("dt", name) + tag("dd", value) for name, value in pairs.items() if value not in ("", None)]
    return tag("dl", *(Html(each) for each in shown))


def card(title: str, *children: Child, id: str = "", command: str = "", kind: str = "") -> Html:
    """Return a section with a heading and the equivalent command; one with an id is updated live."""
    return tag(
        "section",
        card_header(title, command),
        *children,
        class_=f"card {kind}".strip(),
        id=id or None,
        data_live=bool(id) or None,
    )


def card_header(title: str, command: str = "") -> Html:
    """Return the heading of a card and the equivalent command."""
    hint = tag("code", command, class_="command", title="The same on the command line") if command else EMPTY
    return tag("header", tag("h2", title), hint)


def badge(value: str, level: str) -> Html:
    """Return a status: `ok`, `busy`, `bad`, `warn` or `off`."""
    return tag("span", value, class_=f"badge {level}")


def _attribute(value: str | int | float) -> str | int:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


# Texts


def count(number: int, noun: str) -> str:
    """Format a number of things: `1 image`, `2 images`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(amount: float | None) -> str:
    """Format bytes: `1.5 GiB`."""
    if amount is None or amount != amount:
        return UNKNOWN
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def cores(amount: float | None) -> str:
    """Format processors: `250m`, `1.25`."""
    if amount is None or amount != amount:
        return UNKNOWN
    return f"{amount * 1000:.0f}m" if amount < 1 else f"{amount:.2f}".rstrip("0").rstrip(".")


def percent(share: float | None) -> str:
    """Format a share of 1: `12 %`."""
    if share is None or share != share:
        return UNKNOWN
    return f"{share * 100:.1f} %" if 0 < share < 0.1 else f"{share * 100:.0f} %"


def seconds(amount: float | None) -> str:
    """Format a short duration: `12 ms`, `1.5 s`."""
    if amount is None or amount != amount:
        return UNKNOWN
    if amount < 0.0995:
        return f"{amount * 1000:.1f} ms" if amount < 0.01 else f"{amount * 1000:.0f} ms"
    return f"{amount:.2f} s" if amount < 10 else f"{amount:.0f} s"
