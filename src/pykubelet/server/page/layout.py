"""Frame of every view: head, navigation, theme, and the addresses of the static files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Literal

from pykubelet.server.page.facts import PageSettings
from pykubelet.server.page.html import Html, Section, tag

STATIC = Path(__file__).parent / "static"
FILES = {
    "page.js": "text/javascript",
    "page.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot.css": "text/css",
    "uplot.LICENSE.txt": "text/plain",
    "icon.svg": "image/svg+xml",
}
Theme = Literal["", "light", "dark"]
_VIEWS = (("/", "Node", "1"), ("/pods", "Pods", "2"), ("/images", "Images", "3"), ("/agent", "Kubelet", "4"))


@cache
def static_version() -> str:
    """Return a hash of the static files, which changes their addresses when they change."""
    digest = hashlib.sha256()
    for name in sorted(FILES):
        digest.update((STATIC / name).read_bytes())
    return digest.hexdigest()[:12]


def theme_of(cookie: str | None) -> Theme:
    """Return the theme of a cookie; empty for the one of the system."""
    return "light" if cookie == "light" else "dark" if cookie == "dark" else ""


def document(
    settings: PageSettings, title: str, path: str, events: str, sections: Sequence[Section], theme: Theme
) -> bytes:
    """Return a whole document; `events` is the query of its live updates, empty for none."""
    now = datetime.now(UTC).astimezone()
    links = [
        tag(
            "a",
            name,
            href=address,
            data_key=key,
            aria_current="page"
            if address == path or (address == "/pods" and path.startswith("/pod/"))
            else None,
        )
        for address, name, key in _VIEWS
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content=theme or "light dark"),
        tag("title", f"{title} · {settings.node_name}"),
        tag("link", rel="icon", href=_static("icon.svg"), type="image/svg+xml"),
        tag("link", rel="stylesheet", href=_static("uplot.css")),
        tag("link", rel="stylesheet", href=_static("page.css")),
        tag("script", src=_static("uplot.js"), defer=True),
        tag("script", src=_static("page.js"), type="module"),
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag(
            "header",
            tag("a", settings.node_name, href="/", class_="node"),
            tag("nav", *links, aria_label="Views"),
            tag("span", "static", id="live", class_="live", role="status", title="Live updates"),
            tag("button", "Theme", id="theme", type="button", title="Light or dark (key t)", hidden=True),
            class_="top",
        ),
        tag("main", *map(_placed, sections), id="content", tabindex=-1),
        tag(
            "footer",
            tag("span", f"pykubelet {settings.version}, read-only"),
            tag("span", f"Times are {now:%Z} (UTC{now:%z}), the time zone of the node"),
            tag("span", "Keys: ", *_keys(), class_="keys"),
        ),
        data_events=events or None,
        data_zone=int((now.utcoffset() or timedelta()).total_seconds()),
    )
    page = tag("html", head, body, lang="en", data_theme=theme or None)
    return f"<!doctype html>{page}".encode()


def _placed(section: Section) -> Html:
    return tag("div", *section, class_="column") if isinstance(section, tuple) else section


def _keys() -> list[Html]:
    found: list[Html] = []
    for address, name, key in _VIEWS:
        found += [tag("kbd", key), tag("a", f" {name.lower()} ", href=address)]
    return [
        *found,
        tag("kbd", "/"),
        Html(" filter "),
        tag("kbd", "j"),
        tag("kbd", "k"),
        Html(" pods "),
        tag("kbd", "t"),
        Html(" theme"),
    ]


def _static(name: str) -> str:
    return f"/static/{name}?v={static_version()}"
