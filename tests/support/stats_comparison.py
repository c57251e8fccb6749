"""Comparison of a kubelet's statistics with those of the upstream kubelet.

The same pods are measured three times: by the upstream kubelet, by ours, and by the upstream kubelet again.
A value of ours must lie between the two others, extended by a tolerance where the value fluctuates: so a
counter that is read wrongly fails although it changes all the time, and no machine needs other tolerances.

Both expositions and the Summary API become samples by series: a field of the Summary API is a series whose
name is the path (`pods.containers.cpu.usageNanoCores`) and whose labels name the elements of the lists.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: (-?\d+))?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ELEMENTS = {"pods": "pod", "containers": "container", "volume": "volume", "interfaces": "interface"}
_MAX_CHANGED_LABELS = 2
"""Series of one name that differ in more labels are different series, not one with wrong labels."""


class Series(NamedTuple):
    """Identity of a series: its name and its labels in their order."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        labels = ",".join(f'{name}="{value}"' for name, value in self.labels)
        return f"{self.name}{{{labels}}}"


Samples = dict[Series, float | str]


@dataclass(frozen=True, slots=True)
class Exposition:
    """One scrape: the values, the types of the metrics, and the times of samples that have one."""

    samples: Samples
    types: dict[str, str]
    times: dict[Series, float]
    """Seconds since the epoch."""

    def oldest(self) -> float:
        """Return the time of the oldest sample; infinity if none has a time."""
        return min(self.times.values(), default=float("inf"))


def parse_exposition(text: str) -> Exposition:
    """Parse a page in Prometheus' text format. Raises ValueError for a bad line or a repeated series."""
    found = Exposition({}, {}, {})
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if name in found.types:
                raise ValueError(f"metric {name} is there twice")
            found.types[name] = kind
        elif line and not line.startswith("#"):
            parts = _LINE.fullmatch(line)
            if parts is None:
                raise ValueError(f"not a sample: {line!r}")
            series = Series(parts[1], tuple(sorted(_LABEL.findall(parts[2] or ""))))
            if series in found.samples:
                raise ValueError(f"series {series} is there twice")
            found.samples[series] = float(parts[3])
            if parts[4]:
                found.times[series] = int(parts[4]) / 1000
    return found


def parse_summary(document: Mapping[str, Any]) -> Samples:
    """Return the fields of a response of the Summary API; times are seconds since the epoch."""
    return dict(_fields("", (), document))


def _fields(
    path: str, labels: tuple[tuple[str, str], ...], value: Any
) -> Iterator[tuple[Series, float | str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _fields(f"{path}.{name}" if path else name, labels, inner)
    elif isinstance(value, list):
        last = path.rpartition(".")[2]
        for element in value:
            reference = element.get("podRef")
            name = f"{reference['namespace']}/{reference['name']}" if reference else element["name"]
            yield from _fields(path, (*labels, (_ELEMENTS.get(last, last), name)), element)
    elif isinstance(value, str) and path.rpartition(".")[2] in ("time", "startTime"):
        yield Series(path, labels), datetime.fromisoformat(value).timestamp()
    elif value is None:
        yield Series(path, labels), "null"
    else:
        yield Series(path, labels), value if isinstance(value, str) else float(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """Series whose values, or whose existence, need not agree exactly; the reason says why."""

    name: str
    """Regular expression of the whole name."""
    reason: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions of the labels that must match entirely."""
    relative: float = 0.0
    absolute: float = 0.0
    any_value: bool = False
    extra: bool = False
    """Whether ours may have the series although the upstream kubelet does not have it."""
    ignored: bool = False
    """Whether the series are left out on both sides."""

    def applies(self, series: Series) -> bool:
        """Return whether the rule is for this series."""
        if re.fullmatch(self.name, series.name) is None:
            return False
        own = dict(series.labels)
        return all(re.fullmatch(wanted, own.get(label, "")) for label, wanted in self.labels.items())


class Difference(NamedTuple):
    """One disagreement: `missing`, `extra`, `label`, `type` or `value`."""

    kind: str
    series: Series
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.series} {self.detail}".rstrip()


def compare_expositions(
    before: Exposition, ours: Exposition, after: Exposition, rules: Sequence[Rule] = ()
) -> list[Difference]:
    """Return where a scrape of ours disagrees with the upstream kubelet's before and after it."""
    types = [
        Difference("type", Series(name), f"is {kind}, not {before.types[name]}")
        for name, kind in ours.types.items()
        if name in before.types and kind != before.types[name]
    ]
    return types + compare(before.samples, ours.samples, after.samples, rules)


def compare(before: Samples, ours: Samples, after: Samples, rules: Sequence[Rule] = ()) -> list[Difference]:
    """Return where samples of ours disagree with the upstream kubelet's before and after them.

    A series must exist if the upstream kubelet has it both times, and must not if it has it neither time.
    What it has once came or went in between, and has no value to compare with.
    """
    ignoring = [rule for rule in rules if rule.ignored]
    kept = [_without(samples, ignoring) for samples in (before, ours, after)]
    before, ours, after = kept
    missing = [series for series in before if series in after and series not in ours]
    allowed = [rule for rule in rules if rule.extra]
    extra = [
        series
        for series in ours
        if series not in before and series not in after and not _first(allowed, series)
    ]
    found = list(_wrong_labels(missing, extra))
    found += [Difference("missing", series) for series in missing]
    found += [Difference("extra", series) for series in extra]
    judging = [rule for rule in rules if not rule.ignored and not rule.extra]
    for series, value in ours.items():
        if series not in before or series not in after:
            continue
        if problem := _judge(value, (before[series], after[series]), _first(judging, series)):
            found.append(Difference("value", series, problem))
    return found


def _without(samples: Samples, rules: Iterable[Rule]) -> Samples:
    return {series: value for series, value in samples.items() if not _first(rules, series)}


def _first(rules: Iterable[Rule], series: Series) -> Rule | None:
    return next((rule for rule in rules if rule.applies(series)), None)


def _wrong_labels(missing: list[Series], extra: list[Series]) -> Iterator[Difference]:
    """Pair missing and extra series that differ in few labels; the pairs are taken from the lists."""
    for wanted in list(missing):
        candidates = [(len(_changed(wanted, one)), one) for one in extra if one.name == wanted.name]
        count, nearest = min(candidates, default=(_MAX_CHANGED_LABELS + 1, wanted))
        if count <= _MAX_CHANGED_LABELS:
            missing.remove(wanted)
            extra.remove(nearest)
            told, expected = dict(nearest.labels), dict(wanted.labels)
            texts = [
                f'{name}="{told.get(name, "")}", not "{expected.get(name, "")}"'
                for name in _changed(wanted, nearest)
            ]
            yield Difference("label", wanted, "; ".join(texts))


def _changed(one: Series, other: Series) -> list[str]:
    """Return the labels in which two series differ."""
    mine, theirs = dict(one.labels), dict(other.labels)
    return [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]


def _judge(value: float | str, bounds: Sequence[float | str], rule: Rule | None) -> str:
    """Return why a value is wrong; empty if it is right."""
    if rule is not None and rule.any_value:
        return ""
    numbers = [bound for bound in bounds if isinstance(bound, float)]
    if isinstance(value, str) or len(numbers) != len(bounds):
        return "" if value in bounds else f"is {value!r}, not {bounds[0]!r}"
    low, high = min(numbers), max(numbers)
    margin = 0.0
    if rule is not None:
        margin = rule.absolute + rule.relative * max(abs(low), abs(high))
    if low - margin <= value <= high + margin:
        return ""
    allowed = f" ± {margin:.10g}" if margin else ""
    return f"is {value:.15g}, not in {low:.15g} … {high:.15g}{allowed}"
