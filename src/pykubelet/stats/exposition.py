"""Prometheus text of many series: rendered labels, rows of samples, and chunks of bounded size.

A page is a list of families, sorted by name. A family renders its rows in batches of lines, and `chunks`
joins the batches to chunks of at most `MAX_CHUNK_BYTES`. The caller of `chunks` awaits between two of them,
so a page of any size delays other tasks only for the time of one chunk, and needs memory only for one.

A row is a tuple that begins with rendered labels, without the closing brace. It has samples, and timestamps
with a space before them (empty for series without one), and many families read the same row. Labels are
rendered once per target and cached in its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

from pykubelet.stats.samples import LabelTexts, Record, Target
from pykubelet.util.metrics import escape_label, header

MAX_CHUNK_BYTES = 64 * 1024
_BATCH = 64
"""Rows, or texts of a generator, that are rendered in one step."""

Page = TypeVar("Page")
Row = tuple[Any, ...]
Kind = Literal["counter", "gauge"]
Value = Callable[[Any], float]
"""Returns the value of a sample. An int is written in full, which parses to the same 64-bit float."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Page]):
    """A metric with its type and description; it is omitted from pages on which it has no line."""

    name: str
    kind: Kind
    help: str
    batches: Callable[[Page], Iterator[list[str]]]
    """Returns the lines of this family on a page."""


def plain(
    name: str,
    kind: Kind,
    text: str,
    rows: Callable[[Page], Sequence[Row]],
    value: Value,
    *,
    sample: int = 1,
    time: int = 2,
) -> Family[Page]:
    """Return a family with one series per row; `sample` and `time` are indexes in the row."""

    def batches(page: Page) -> Iterator[list[str]]:
        selected = rows(page)
        for start in range(0, len(selected), _BATCH):
            yield [
                f"{name}{row[0]}}} {value(row[sample])}{row[time]}\n"
                for row in selected[start : start + _BATCH]
            ]

    return Family(name, kind, text, batches)


def multiple(name: str, kind: Kind, text: str, lines: Callable[[str, Page], Iterator[str]]) -> Family[Page]:
    """Return a family whose lines a generator yields, in texts of one or a few lines."""

    def batches(page: Page) -> Iterator[list[str]]:
        source = lines(name, page)
        while batch := list(islice(source, _BATCH)):
            yield batch

    return Family(name, kind, text, batches)


def constant(name: str, text: str, value: Callable[[Page], float]) -> Family[Page]:
    """Return a gauge with one series that has neither labels nor a timestamp."""
    return multiple(name, "gauge", text, lambda name, page: iter((f"{name} {value(page)}\n",)))


def chunks(families: Iterable[Family[Page]], page: Page) -> Iterator[bytes]:
    """Yield the text of the families in chunks of at most `MAX_CHUNK_BYTES`, which may end within a line."""
    buffer = bytearray()
    for family in families:
        head = header(family.name, family.kind, family.help)
        for lines in family.batches(page):
            if not lines:
                continue
            buffer += (head + "".join(lines)).encode()
            head = ""
            while len(buffer) >= MAX_CHUNK_BYTES:
                yield bytes(buffer[:MAX_CHUNK_BYTES])
                del buffer[:MAX_CHUNK_BYTES]
    if buffer:
        yield bytes(buffer)


def stamp(seconds: float) -> str:
    """Return a timestamp for the end of a line: a space and the time in milliseconds."""
    return f" {round(seconds * 1000)}"


def label_texts(record: Record) -> LabelTexts:
    """Return the rendered labels of a record, from its cache if its target is the same."""
    texts = record.labels
    if texts is None or texts.target is not record.target:
        texts = record.labels = render_labels(record.target)
    return texts


def render_labels(target: Target) -> LabelTexts:
    """Return the rendered labels of a target: those of cAdvisor in the kubelet, and of resource metrics."""
    is_container = target.kind == "container"
    container = f'{{container="{escape_label(target.container)}"'
    id_image = f',id="{escape_label(target.path)}",image="{escape_label(target.image)}"'
    namespace = f'namespace="{escape_label(target.namespace)}"'
    name_namespace = f',name="{escape_label(target.runtime_id)}",{namespace}'
    pod = f',pod="{escape_label(target.pod)}"'
    tail = f"{id_image}{name_namespace}{pod}"
    return LabelTexts(
        target=target,
        container=container,
        id_image=id_image,
        name_namespace=name_namespace,
        pod=pod,
        tail=tail,
        series=container + tail,
        resource=f"{container},{namespace}{pod}" if is_container else f"{{{namespace}{pod}",
    )
