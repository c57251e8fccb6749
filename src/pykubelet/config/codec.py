"""Strict decoding of plain data into configuration structs, and encoding of the configuration.

The structs' type hints are the schema. An invalid field keeps its default and decoding continues, so that
all mistakes are found; the caller must not use the result if there are problems. Any input that JSON can
express results in a struct and a list of problems, never in an exception.

The encoded document is used for `/configz`, `config print` and files. It contains every field, also empty
ones, so that a reader sees what can be set and what is in effect, and decodes to the same configuration.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from pykubelet.api.duration import Duration
from pykubelet.api.quantity import Quantity
from pykubelet.config.documents import plain_value
from pykubelet.config.errors import Problem, field_path, key_path
from pykubelet.config.types import (
    Int64,
    IntRange,
    KubeletConfiguration,
    NanosecondsMark,
    PointerMark,
    QuantityMark,
)
from pykubelet.util.text import quoted

S = TypeVar("S", bound=msgspec.Struct)
_ABSENT = object()
_MAX_HINTS = 50


def decode(cls: type[S], data: Any, path: str = "") -> tuple[S, list[Problem]]:
    """Return the decoded struct and the problems; `path` is the prefix of the problems' paths.

    None means that a field is not set, and so does a zero value in a field that is not a `Pointer`.
    """
    problems: list[Problem] = []
    return _struct(cls, data, path, problems), problems


def explicit_fields(cls: type[msgspec.Struct], data: Mapping[str, Any]) -> set[str]:
    """Return the JSON names of the fields that the data sets, by the rules of `decode`."""
    fields = _fields(cls)
    return {
        key
        for key, value in data.items()
        if key in fields
        and value is not None
        and _counts(fields[key].hint, _value(fields[key].hint, value, key, []))
    }


def kind_of(value: object) -> str:
    """Describe a value for an error message; scalars are shown."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value!r}" if abs(value) < 1e100 else "a huge number"
        case str():
            return f"the text {quoted(value)}"
        case list():
            return "a list"
    return "a mapping"


class _Hint(NamedTuple):
    """A type hint without Annotated and Optional: `Annotated[int | None, X()]` is `int` and `(X(),)`."""

    type: Any
    marks: tuple[Any, ...]

    def has(self, kind: type) -> bool:
        return any(isinstance(mark, kind) for mark in self.marks)


class _Field(NamedTuple):
    name: str
    hint: _Hint


@functools.cache
def _fields(cls: type[msgspec.Struct]) -> dict[str, _Field]:
    """Return the fields of a struct by their JSON names."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        info.encode_name: _Field(info.name, _unwrap(hints[info.name])) for info in msgspec.structs.fields(cls)
    }


@functools.cache
def _unwrap(hint: Any, marks: tuple[Any, ...] = ()) -> _Hint:
    if get_origin(hint) is Annotated:
        return _unwrap(hint.__origin__, (*marks, *hint.__metadata__))
    if get_origin(hint) in (Union, UnionType):
        [inner] = (part for part in get_args(hint) if part is not NoneType)
        return _unwrap(inner, marks)
    return _Hint(hint, marks)


def _struct(cls: type[S], data: Any, path: str, problems: list[Problem]) -> S:
    if not isinstance(data, dict):
        problems.append(Problem(path or "document", f"must be a mapping of fields, not {kind_of(data)}"))
        return cls()
    fields = _fields(cls)
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in data.items():
        if key not in fields:
            unknown.append(str(key))
        elif value is not None:
            field = fields[key]
            result = _value(field.hint, value, field_path(path, key), problems)
            if _counts(field.hint, result):
                values[field.name] = result
    problems += _unknown(unknown, list(fields), path)
    return cls(**values)


def _value(hint: _Hint, data: Any, path: str, problems: list[Problem]) -> Any:
    """Return one decoded value, or _ABSENT after adding its problem to `problems`."""
    if isinstance(hint.type, type) and issubclass(hint.type, msgspec.Struct):
        return _struct(hint.type, data, path, problems)
    if get_origin(hint.type) is list:
        if not isinstance(data, list):
            problems.append(Problem(path, f"must be a list, not {kind_of(data)}"))
            return _ABSENT
        inner = _unwrap(get_args(hint.type)[0])
        items = (_value(inner, item, key_path(path, index), problems) for index, item in enumerate(data))
        return [item for item in items if item is not _ABSENT]
    if get_origin(hint.type) is dict:
        if not isinstance(data, dict):
            problems.append(Problem(path, f"must be a mapping, not {kind_of(data)}"))
            return _ABSENT
        inner = _unwrap(get_args(hint.type)[1])
        entries = {
            str(key): _value(inner, item, key_path(path, str(key)), problems) for key, item in data.items()
        }
        return {key: item for key, item in entries.items() if item is not _ABSENT}
    try:
        return _SCALARS[hint.type](hint, data)
    except ValueError as err:
        problems.append(Problem(path, str(err)))
        return _ABSENT


def _counts(hint: _Hint, result: Any) -> bool:
    """Return whether a decoded value counts as set: valid, and no zero value unless in a `Pointer`."""
    is_zero = isinstance(result, bool | int | float | str) and not result
    return result is not _ABSENT and (not is_zero or hint.has(PointerMark))


def _bool(_hint: _Hint, data: Any) -> bool:
    if not isinstance(data, bool):
        raise ValueError(f"must be true or false, not {kind_of(data)}")
    return data


def _int(hint: _Hint, data: Any) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise ValueError(f"must be a whole number, not {kind_of(data)}{_unquote(data)}")
    for mark in hint.marks:
        if isinstance(mark, IntRange) and not mark.low <= data <= mark.high:
            raise ValueError(f"must be from {mark.low} to {mark.high}, not {kind_of(data)}")
    return data


def _float(_hint: _Hint, data: Any) -> float:
    if not isinstance(data, int | float) or isinstance(data, bool):
        raise ValueError(f"must be a number, not {kind_of(data)}{_unquote(data)}")
    if not abs(data) < 1e100 or math.isnan(data):
        raise ValueError(f"must be a usual number, not {kind_of(data)}")
    return float(data)


def _str(hint: _Hint, data: Any) -> str:
    if hint.has(QuantityMark):
        return _quantity(data)
    if not isinstance(data, str):
        quote = ": put it in quotes" if isinstance(data, bool | int | float) else ""
        raise ValueError(f"must be text, not {kind_of(data)}{quote}")
    if "\0" in data:
        raise ValueError("holds a NUL character: remove it")
    return data


def _quantity(data: Any) -> str:
    if isinstance(data, bool) or not isinstance(data, str | int | float):
        raise ValueError(f"must be a quantity such as 64Mi, not {kind_of(data)}")
    quantity = Quantity.parse(data.strip() if isinstance(data, str) else _digits(data))
    # Twice: a binary amount whose text has no binary suffix (2000) is decimal when parsed again (2k).
    return str(Quantity.parse(str(quantity)))


def _digits(number: float) -> str:
    return repr(number) if abs(number) < 1e100 else "a huge number"


def _duration(hint: _Hint, data: Any) -> Duration:
    if isinstance(data, str):
        return Duration.parse(data)
    if isinstance(data, int) and not isinstance(data, bool) and hint.has(NanosecondsMark):
        return Duration(_int(_unwrap(Int64), data))
    unit = f", such as {data}s" if isinstance(data, int) and 0 <= data < 10**9 and data is not True else ""
    raise ValueError(f"must be text with a unit{unit or ', such as 10s'}, not {kind_of(data)}")


_SCALARS: dict[type, Callable[[_Hint, Any], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    Duration: _duration,
}


def _unquote(data: Any) -> str:
    return ": remove the quotes" if isinstance(data, str) and data.strip().lstrip("-").isdecimal() else ""


def _unknown(keys: list[str], known: Iterable[str], path: str) -> Iterable[Problem]:
    by_lower = {name.lower(): name for name in known}
    for index, key in enumerate(keys):
        # A file with so many unknown fields is not a KubeletConfiguration, and the comparison is slow.
        close = difflib.get_close_matches(key[:99].lower(), by_lower, n=1) if index < _MAX_HINTS else []
        hint = f"did you mean {by_lower[close[0]]}?" if close else "remove it"
        yield Problem(field_path(path, key), f"there is no such field: {hint}")


def to_document(config: KubeletConfiguration) -> dict[str, Any]:
    """Return the complete configuration as JSON types, with the fields in the order of their definition."""
    document = to_plain(config)
    assert isinstance(document, dict)
    return document


def to_yaml(config: KubeletConfiguration) -> str:
    """Return the complete configuration as YAML."""
    return document_to_yaml(to_document(config))


def document_to_yaml(document: dict[str, Any]) -> str:
    """Return a document as YAML, with its fields in order."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_plain(value: Any) -> Any:
    """Return a value of the configuration as JSON types."""
    match value:
        case msgspec.Struct():
            return {
                field.encode_name: to_plain(getattr(value, field.name))
                for field in msgspec.structs.fields(type(value))
            }
        case Duration():
            return str(value)
        case list():
            return [to_plain(item) for item in value]
        case dict():
            return {key: to_plain(item) for key, item in value.items()}
    return value


class _Dumper(yaml.CSafeDumper):
    """YAML dumper that quotes strings which Kubernetes' parser reads as another type (`y`, `1e3`)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if plain_value(text) is text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
