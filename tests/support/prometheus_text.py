"""Prometheus text as a scraper reads it, strictly, and the comparison of two pages.

differences = compare(parse(reference), parse(ours), tolerance=lambda series: 0.05)
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: (-?[0-9]+))?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\["\\n])*)"(,|$)')
_ESCAPE = re.compile(r"\\(.)")
_SUFFIXES = ("_bucket", "_sum", "_count")


class Series(NamedTuple):
    """A metric name with labels, sorted by name."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def get(self, label: str) -> str:
        """Return the value of a label; empty if the series does not have it."""
        return dict(self.labels).get(label, "")

    def without(self, *names: str) -> "Series":
        """Return the series without some labels."""
        return Series(self.name, tuple(pair for pair in self.labels if pair[0] not in names))

    def __str__(self) -> str:
        return f"{self.name}{{{','.join(f'{name}={value!r}' for name, value in self.labels)}}}"


class Sample(NamedTuple):
    """Value of a series, and its timestamp in milliseconds."""

    value: float
    time: int | None


@dataclass
class Family:
    """A metric with its samples, in the order of the page."""

    name: str
    kind: str
    help: str
    samples: dict[Series, Sample] = field(default_factory=dict)
    label_order: set[tuple[str, ...]] = field(default_factory=set)
    """Label names of the series, as they are ordered on the page."""


def parse_families(text: str) -> dict[str, Family]:
    """Return the families of a page by name. Raises ValueError if the text is malformed."""
    if text and not text.endswith("\n"):
        raise ValueError("the last line does not end")
    families: dict[str, Family] = {}
    family: Family | None = None
    help_text = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            help_text = line
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if name in families or not help_text.startswith(f"# HELP {name} "):
                raise ValueError(f"{name} has no HELP or is repeated")
            family = families[name] = Family(name, kind, help_text.split(" ", 3)[3])
        elif line and not line.startswith("#"):
            series, sample = parse_line(line)
            if family is None or not _belongs(series.name, family):
                raise ValueError(f"a line does not belong to its family: {line[:200]}")
            if series in family.samples:
                raise ValueError(f"a series is repeated: {series}")
            family.label_order.add(tuple(name for name, _ in series.labels))
            family.samples[Series(series.name, tuple(sorted(series.labels)))] = sample
    return families


def parse_line(line: str) -> tuple[Series, Sample]:
    """Return the series of a line, with its labels in the order of the line, and its sample."""
    found = _SAMPLE.fullmatch(line)
    if found is None:
        raise ValueError(f"a line is malformed: {line[:200]}")
    labels = tuple(_labels(found[2])) if found[2] else ()
    if len(dict(labels)) != len(labels):
        raise ValueError(f"a label is repeated: {line[:200]}")
    return Series(found[1], labels), Sample(float(found[3]), int(found[4]) if found[4] else None)


def parse(text: str) -> dict[Series, float]:
    """Return the values of a page by series. Raises ValueError if the text is malformed."""
    families = parse_families(text).values()
    return {series: sample.value for family in families for series, sample in family.samples.items()}


class Differences(NamedTuple):
    """Differences of two pages."""

    missing: list[Series]
    extra: list[Series]
    values: list[tuple[Series, float, float]]
    """Series whose values differ by more than the tolerance: expected and found."""

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        lines = [f"missing {series}" for series in self.missing]
        lines += [f"extra {series}" for series in self.extra]
        lines += [f"{series} is {found}, not {expected}" for series, expected, found in self.values]
        return "\n".join(lines)


def compare(
    expected: Mapping[Series, float],
    found: Mapping[Series, float],
    tolerance: Callable[[Series], float | None] = lambda _: 0.0,
) -> Differences:
    """Return the differences; `tolerance` is relative, None for values that are not compared."""
    values = []
    for series in expected.keys() & found.keys():
        allowed, left, right = tolerance(series), expected[series], found[series]
        if allowed is not None and abs(left - right) > allowed * max(abs(left), abs(right)):
            values.append((series, left, right))
    return Differences(
        sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys()), sorted(values)
    )


def _labels(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            raise ValueError(f"labels are malformed: {text[:200]}")
        yield found[1], _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], found[2])
        at = found.end()


def _belongs(name: str, family: Family) -> bool:
    if family.kind not in ("histogram", "summary"):
        return name == family.name
    return name == family.name or any(name == family.name + suffix for suffix in _SUFFIXES)
