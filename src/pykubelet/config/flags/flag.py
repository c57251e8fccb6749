"""Types of flag values, and rows of the flag table.

A `FlagType` parses one occurrence as upstream's command line does, combines repeated occurrences and
formats a value. Parsers raise ValueError with a one-line message that contains an example; the caller
prepends the flag.

A `Flag` sets exactly one target: a field of KubeletConfiguration, an attribute of `KubeletFlags`, or
nothing if it is accepted only for compatibility with old command lines.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.duration import Duration
from pykubelet.api.ip import parse_ip
from pykubelet.api.names import label_value_problem, qualified_name_problem
from pykubelet.api.quantity import Quantity
from pykubelet.config.types import MemoryReservation, Taint, VModuleItem
from pykubelet.util.text import quoted


@dataclass(frozen=True, slots=True)
class FlagType:
    """Type of a flag's value."""

    name: str
    """Name of the type in upstream's help."""
    parse: Callable[[str], Any]
    """Parser of one occurrence; None means that the flag counts as not set."""
    show: Callable[[Any], str] = str
    """Formatter of a value for help and logs."""
    join: Callable[[Any, Any], Any] | None = None
    """Function that combines the value so far with a later occurrence; None if the last one wins."""
    bare: str = ""
    """Value of `--flag` alone; such flags never consume the next argument."""


_TRUE = {"1", "t", "T", "TRUE", "true", "True"}
_FALSE = {"0", "f", "F", "FALSE", "false", "False"}
_INTEGER = re.compile(
    r"(?P<sign>[+-]?)(?:0[xX](?P<hex>(?:_?[0-9a-fA-F])+)|0[bB](?P<bin>(?:_?[01])+)"
    r"|0[oO]?(?P<oct>(?:_?[0-7])+)|(?P<dec>0|[1-9](?:_?[0-9])*))",
    re.ASCII,
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_SEVERITIES = ("INFO", "WARNING", "ERROR", "FATAL")


def _bool(text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{quoted(text)} is neither true nor false: write true or false")


def _show_bool(value: bool) -> str:
    return "true" if value else "false"


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        form = _INTEGER.fullmatch(text)
        if form is None or (low >= 0 and form["sign"]):
            raise ValueError(f"{quoted(text)} is not a whole number: write one such as 10")
        base = next(name for name in _BASES if form[name] is not None)
        value = _digits(form[base], _BASES[base]) * (-1 if form["sign"] == "-" else 1)
        if not low <= value <= high:
            raise ValueError(f"{quoted(text)} is out of range: it must be from {low} to {high}")
        return value

    return parse


def _digits(text: str, base: int) -> int:
    # int() rejects thousands of digits; 80 digits are already out of every range.
    return int(text.replace("_", "").lstrip("0")[:80] or "0", base)


def _decimal(text: str) -> int:
    """Parse a verbosity: decimal digits only, as in klog."""
    if not re.fullmatch(r"[0-9]{1,20}", text, re.ASCII) or int(text) > 2**31 - 1:
        raise ValueError(
            f"{quoted(text)} is not a verbosity: write a number from 0 to {2**31 - 1}, such as 4"
        )
    return int(text)


def _ip(text: str) -> str | None:
    if not text:
        return None
    parse_ip(text)
    return text


def _strings(text: str) -> list[str]:
    if not text:
        return []
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as fault:
        raise ValueError(f"{quoted(text)} is not a comma-separated list ({fault}): write a,b,c") from None


def _show_strings(value: list[str]) -> str:
    return ",".join(
        f'"{item.replace(chr(34), chr(34) * 2)}"' if re.search(r'[",\r\n]', item) else item for item in value
    )


def _pairs(
    text: str, separator: str, example: str, *, split: bool = True, lone: bool = False
) -> list[tuple[str, str]]:
    pairs = []
    for part in text.split(",") if split else [text]:
        key, found, value = part.partition(separator)
        if split and not part:
            continue
        if not found and not lone:
            raise ValueError(f"{quoted(part)} is not a pair: write key{separator}value, such as {example}")
        pairs.append((key.strip(), value.strip()))
    return pairs


def _show_pairs(separator: str) -> Callable[[dict[str, str]], str]:
    return lambda value: ",".join(f"{key}{separator}{value[key]}" for key in sorted(value))


def _booleans(text: str) -> dict[str, bool]:
    result = {}
    for key, value in _pairs(text, "=", "EventedPLEG=true"):
        if value not in _TRUE | _FALSE:
            raise ValueError(
                f"{quoted(value)} for {key} is neither true nor false: write {key}=true or {key}=false"
            )
        result[key] = value in _TRUE
    return result


def _headers(text: str) -> dict[str, list[str]]:
    try:
        return _add_headers({}, _pairs(text, ":", ""))
    except ValueError:
        # Headers may contain credentials, which an error message must not show.
        raise ValueError("a header has no colon: write name:value, such as X-Role:node") from None


def _join_headers(first: dict[str, list[str]], later: dict[str, list[str]]) -> dict[str, list[str]]:
    return _add_headers(first, [(key, value) for key, values in later.items() for value in values])


def _add_headers(known: dict[str, list[str]], pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    result = {key: list(values) for key, values in known.items()}
    for key, value in pairs:
        result.setdefault(key, []).append(value)
    return result


def _show_headers(value: dict[str, list[str]]) -> str:
    return ",".join(f"{key}:{item}" for key in sorted(value) for item in value[key])


def _taints(text: str) -> list[Taint]:
    example = "write key=value:NoSchedule"
    taints: list[Taint] = []
    for part in text.split(",") if text else []:
        pair, colon, effect = part.partition(":")
        key, _, value = pair.partition("=")
        if effect not in _EFFECTS:
            why = f"the effect {quoted(effect)} is unknown" if colon else "it has no effect"
            raise ValueError(f"{quoted(part)} is not a taint, {why}: {example} ({', '.join(_EFFECTS)})")
        if fault := qualified_name_problem(key):
            raise ValueError(f"{quoted(part)} is not a taint, its key {fault}")
        if fault := label_value_problem(value):
            raise ValueError(f"{quoted(part)} is not a taint, its value {fault}")
        if any((taint.key, taint.effect) == (key, effect) for taint in taints):
            raise ValueError(f"the taint {key}:{effect} is given twice: give it once")
        taints.append(Taint(key=key, value=value, effect=effect))
    return taints


def _show_taints(value: list[Taint]) -> str:
    return ",".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in value)


def _reserved_memory(text: str) -> list[MemoryReservation] | None:
    if not text:
        return None
    example = "write node:type=quantity, such as 0:memory=1Gi,hugepages-1Gi=2Gi;1:memory=1Gi"
    reservations = []
    for part in text.split(";"):
        node, colon, rest = part.partition(":")
        if not colon or not re.fullmatch(r"[+-]?[0-9]{1,10}", node, re.ASCII) or abs(int(node)) >= 2**31:
            raise ValueError(f"{quoted(part)} does not start with a NUMA node: {example}")
        limits = {}
        for limit in rest.split(","):
            name, equals, amount = limit.partition("=")
            if not equals or not (name == "memory" or name.startswith("hugepages-")):
                raise ValueError(f"{quoted(limit)} is neither memory nor hugepages: {example}")
            limits[name] = str(Quantity.parse(amount))
        reservations.append(MemoryReservation(numa_node=int(node), limits=limits))
    return reservations


def _show_reserved_memory(value: list[MemoryReservation]) -> str:
    return ";".join(f"{entry.numa_node}:" + _show_pairs("=")(entry.limits) for entry in value)


def _vmodule(text: str) -> list[VModuleItem]:
    items = []
    for part in filter(None, text.split(",")):
        pattern, _, level = part.partition("=")
        if not pattern or not level:
            raise ValueError(f"{quoted(part)} is not pattern=N: write one such as loop=4,cgroup*=6")
        items.append(VModuleItem(file_pattern=pattern, verbosity=_decimal(level)))
    return items


def _show_vmodule(value: list[VModuleItem]) -> str:
    return ",".join(f"{item.file_pattern}={item.verbosity}" for item in value)


def _severity(text: str) -> int:
    if text.upper() in _SEVERITIES:
        return _SEVERITIES.index(text.upper())
    if text in ("0", "1", "2", "3"):
        return int(text)
    raise ValueError(f"{quoted(text)} is not a severity: write {', '.join(_SEVERITIES)} or 0 to 3")


def _trace_location(text: str) -> str:
    if text not in ("", ":0") and not re.fullmatch(r"[^:]+\.[^:]+:0*[1-9][0-9]*", text, re.ASCII):
        raise ValueError(f"{quoted(text)} is not a place in the source: write file:line, such as loop.py:64")
    return text


def _version(text: str) -> str:
    if text == "raw":
        return text
    if text.startswith("v"):
        if not re.fullmatch(re.escape(KUBERNETES_VERSION) + r"([-+][0-9A-Za-z.+-]+)?", text, re.ASCII):
            raise ValueError(
                f"{quoted(text)} cannot be reported: only the part after {KUBERNETES_VERSION} can change, "
                f"such as {KUBERNETES_VERSION}-mine"
            )
        return text
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{quoted(text)} is no form of the version: write --version or --version=raw")
    return _show_bool(text in _TRUE)


def _union(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    return {**first, **later}


def _extend(first: list[Any], later: list[Any]) -> list[Any]:
    return [*first, *later]


BOOL = FlagType("bool", _bool, _show_bool, bare="true")
INT32 = FlagType("int32", _integer(-(2**31), 2**31 - 1))
INT = FlagType("int", _integer(-(2**63), 2**63 - 1))
UINT = FlagType("uint", _integer(0, 2**64 - 1))
DURATION = FlagType("duration", Duration.parse)
IP = FlagType("ip", _ip)
STRING = FlagType("string", str)
STRINGS = FlagType("strings", _strings, _show_strings, _extend)
MAP = FlagType(
    "mapStringString", lambda text: dict(_pairs(text, "=", "memory=500Mi")), _show_pairs("="), _union
)
LABELS = FlagType(
    "mapStringString", lambda text: dict(_pairs(text, "=", "role=web", lone=True)), _show_pairs("="), _union
)
OPTION = FlagType(
    "mapStringString",
    lambda text: dict(_pairs(text, "=", "full-pcpus-only=true", split=False)),
    _show_pairs("="),
    _union,
)
THRESHOLDS = FlagType(
    "mapStringString",
    lambda text: dict(_pairs(text, "<", "memory.available<100Mi")),
    _show_pairs("<"),
    _union,
)
GATES = FlagType(
    "mapStringBool",
    _booleans,
    lambda value: ",".join(f"{key}={_show_bool(value[key])}" for key in sorted(value)),
    _union,
)
HEADERS = FlagType("colonSeparatedMultimapStringString", _headers, _show_headers, _join_headers)
TAINTS = FlagType("[]v1.Taint", _taints, _show_taints)
RESERVED_MEMORY = FlagType("reserved-memory", _reserved_memory, _show_reserved_memory, _extend)
QUANTITY = FlagType("quantity", lambda text: str(Quantity.parse(text)))
LEVEL = FlagType("Level", _decimal)
VMODULE = FlagType("pattern=N,...", _vmodule, _show_vmodule, _extend)
SEVERITY = FlagType("severity", _severity)
TRACE_LOCATION = FlagType("traceLocation", _trace_location)
VERSION = FlagType("version", _version, bare="true")
Status = Literal["current", "file", "deprecated", "ignored"]
"""`file`: supported, but belongs in the configuration file; `ignored`: accepted without effect."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Row of the flag table."""

    name: str
    kind: FlagType
    help: str
    status: Status
    field: str = ""
    """Path of Python names in KubeletConfiguration, such as `authentication.anonymous.enabled`."""
    attribute: str = ""
    """Attribute of KubeletFlags."""
    default: str = ""
    """Default of a flag without target, as text; all others have the default of their target."""
    note: str = ""
    """Reason and replacement of a deprecated or ignored flag."""
    short: str = ""
    secret: bool = False
    """Whether the value must never be shown."""
    group: str = ""


def group(title: str, *rows: Flag) -> tuple[Flag, ...]:
    """Return the rows with a heading of the help."""
    return tuple(replace(row, group=title) for row in rows)


def in_file(name: str, kind: FlagType, field: str, text: str, *, secret: bool = False) -> Flag:
    """Return a row for a flag that sets a field which belongs in the configuration file."""
    return Flag(name, kind, text, "file", field=field, secret=secret)


def in_both(name: str, kind: FlagType, field: str, text: str, *, short: str = "") -> Flag:
    """Return a row for a flag that sets a field of the configuration file and is not discouraged."""
    return Flag(name, kind, text, "current", field=field, short=short)


def flag_only(name: str, kind: FlagType, text: str, *, short: str = "") -> Flag:
    """Return a row for a flag that exists only on the command line."""
    return Flag(name, kind, text, "current", attribute=name.replace("-", "_"), short=short)


def deprecated(name: str, kind: FlagType, text: str, note: str) -> Flag:
    """Return a row for a deprecated flag that still works."""
    return Flag(name, kind, text, "deprecated", attribute=name.replace("-", "_"), note=note)


def without_effect(name: str, kind: FlagType, default: str, note: str, *, secret: bool = False) -> Flag:
    """Return a row for a flag that is accepted without effect."""
    return Flag(name, kind, "No effect.", "ignored", default=default, note=note, secret=secret)
