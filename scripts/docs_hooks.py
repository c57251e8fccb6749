"""Hooks of MkDocs for `mkdocs.yml`: the navigation follows the pages that exist.

A link to a page that the navigation names and that does not exist becomes text; any other link without a
target fails the build.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([a-z/-]+\.md)(?:#[a-z0-9-]+)?\)")
_absent: set[str] = set()
"""Pages of the navigation that do not exist."""


def on_config(config: Any) -> Any:
    """Leave out entries without a page, expand `directory/*`, and append pages that are in no entry."""
    docs = Path(config["docs_dir"])
    existing = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    _absent.update(page for page in _pages(config["nav"]) if page not in existing and "*" not in page)
    nav = [_existing(entry, existing) for entry in config["nav"]]
    listed = set(_pages(nav))
    rest = [page for page in existing if page not in listed]
    if rest:
        next(iter(nav[-1].values())).extend(rest)
    config["nav"] = [entry for entry in nav if entry]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links of top-level pages to absent ones by their text."""
    if "/" in page.file.src_path:
        return markdown
    return _LINK.sub(lambda match: match[1] if match[2] in _absent else match[0], markdown)


def _existing(entry: Any, existing: list[str]) -> Any:
    """Return an entry with the pages that exist; empty if there is none."""
    if isinstance(entry, str):
        return entry if entry in existing else ""
    ((title, pages),) = entry.items()
    found: list[str] = []
    for page in pages:
        directory = page.removesuffix("*")
        found += [path for path in existing if path.startswith(directory)] if page.endswith("*") else [page]
    return {title: [page for page in found if page in existing]}


def _pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        yield from [entry] if isinstance(entry, str) else next(iter(entry.values()))
