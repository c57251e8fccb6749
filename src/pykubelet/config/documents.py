"""YAML and JSON files as plain data, parsed as Kubernetes parses them.

The result is a mapping of JSON types (string keys, strings, numbers, booleans, None, lists, mappings), at
most `MAX_DEPTH` levels deep; every other input is a ConfigError that names the file, the line if there is
one, and the remedy.

YAML 1.1 booleans (`yes`, `off`) are booleans, `010` is octal, `1:30` and dates are strings, `<<` merges.
The tree is built from the parser's events in a loop without recursion, so that deep nesting cannot exhaust
the stack; aliases count as the values that they expand to, so that a small file cannot expand to a huge
one; and every repeated key is reported with its line.
"""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pykubelet.config.errors import ConfigError, Problem, field_path, key_path

MAX_DEPTH = 100
MAX_VALUES = 250_000
"""Maximum number of values of a document, expanded aliases included."""
_WORDS: dict[str, bool | float | None] = {
    **dict.fromkeys(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"], True),
    **dict.fromkeys(["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"], False),
    **dict.fromkeys(["", "~", "null", "Null", "NULL"]),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], math.nan),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"], math.inf),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], -math.inf),
}

# int() rejects more than a few thousand digits; longer numbers stay strings.
_INTEGER = re.compile(
    r"[-+]?(?:0[bB][01]{1,999}|0[xX][0-9a-fA-F]{1,999}|0[oO]?[0-7]{1,999}|0|[1-9][0-9]{0,999})", re.ASCII
)
_OLD_OCTAL = re.compile(r"^([-+]?0)(?=[0-7])", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_RESOLVED_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "null", "timestamp")}


def yaml_documents(text: str, where: str) -> list[Any]:
    """Return every document of a YAML text. Raises ConfigError with `where` and a line in each problem."""
    tree = _Tree(where)
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            tree.feed(event)
    except yaml.MarkedYAMLError as err:
        raise ConfigError([Problem(where, _syntax(text, err))]) from None
    except (yaml.YAMLError, UnicodeEncodeError):
        message = "holds characters that YAML does not allow: remove control characters"
        raise ConfigError([Problem(where, message)]) from None
    if tree.repeated:
        raise ConfigError(tree.repeated)
    return tree.documents


def plain_value(text: str) -> Any:
    """Return the value of an unquoted YAML scalar."""
    if text in _WORDS:
        return _WORDS[text]
    digits = text.replace("_", "") if text[0] in "+-0123456789" else text
    if _INTEGER.fullmatch(digits):
        return int(_OLD_OCTAL.sub(r"\1o", digits), 0)
    if _FLOAT.fullmatch(digits) and math.isfinite(number := float(digits)):
        return int(number) if number.is_integer() and abs(number) < 1e21 else number
    return text


def depth_of(value: Any) -> int:
    """Return the nesting depth of lists and mappings, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end event has not been seen yet."""

    path: str
    anchor: str | None
    values_before: int
    items: list[Any] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    """Key whose value comes next; None if a key comes next."""
    lines: dict[str, int] = field(default_factory=dict)
    merging: bool = False
    merges: list[dict[str, Any]] = field(default_factory=list)

    def child_path(self) -> str:
        if self.items is not None:
            return key_path(self.path, len(self.items))
        return field_path(self.path, self.key or "")

    def result(self) -> Any:
        if self.items is not None:
            return self.items
        for merged in self.merges:
            self.fields = {**merged, **self.fields}
        return self.fields


class _Tree:
    """Builder of documents from parser events: the complete documents, and a stack of open containers."""

    def __init__(self, where: str) -> None:
        self.documents: list[Any] = []
        self.repeated: list[Problem] = []
        self._where = where
        self._line = 0
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._values = 0

    def feed(self, event: yaml.Event) -> None:
        if event.start_mark is not None:
            self._line = event.start_mark.line + 1
        match event:
            case yaml.DocumentStartEvent():
                self._anchors.clear()
            case yaml.ScalarEvent(value=text, tag=tag, anchor=anchor, implicit=(plain, _)):
                self._count(1)
                value = plain_value(text) if plain or tag in _RESOLVED_TAGS else text
                if anchor:
                    self._anchors[anchor] = value, 1
                self._place(value, merge=plain and text == "<<")
            case yaml.AliasEvent(anchor=anchor):
                if anchor not in self._anchors:
                    # The alias is not shown: it may be an unquoted password that begins with *.
                    self._refuse(
                        "a * refers to no & that ends before it: put text that begins with * in quotes"
                    )
                value, size = self._anchors[anchor]
                self._count(size)
                self._descend(depth_of(value))
                self._place(copy.deepcopy(value))
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._count(1)
                self._descend(1)
                opened = _Open(
                    path=self._stack[-1].child_path() if self._stack else "",
                    anchor=event.anchor,
                    values_before=self._values,
                    items=[] if isinstance(event, yaml.SequenceStartEvent) else None,
                )
                self._stack.append(opened)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = self._stack.pop()
                value = done.result()
                if done.anchor:
                    self._anchors[done.anchor] = value, self._values - done.values_before + 1
                self._place(value)

    def _place(self, value: Any, merge: bool = False) -> None:
        """Add a complete value as a document, a list item, a key, or the value of a key."""
        if not self._stack:
            self.documents.append(value)
            return
        top = self._stack[-1]
        if top.items is not None:
            top.items.append(value)
        elif top.key is None:
            self._take_key(top, value)
            top.merging = merge
        else:
            if top.merging:
                merged = value if isinstance(value, list) else [value]
                if not all(isinstance(item, dict) for item in merged):
                    self._refuse("<< takes a mapping or a list of mappings")
                top.merges += merged
            else:
                top.fields[top.key] = value
            top.key = None

    def _take_key(self, top: _Open, value: Any) -> None:
        if isinstance(value, dict | list):
            self._refuse("a key must be text, not a list or a mapping")
        key = value if isinstance(value, str) else json.dumps(value)
        if key in top.lines:
            what = f"{field_path(top.path, key)} is repeated, first on line {top.lines[key]}"
            self.repeated.append(Problem(self._where, f"line {self._line}: {what}: keep one of them"))
        top.lines.setdefault(key, self._line)
        top.key = key

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            self._refuse(f"unfolds to more than {MAX_VALUES} values: make it smaller")

    def _descend(self, levels: int) -> None:
        if len(self._stack) + levels > MAX_DEPTH:
            self._refuse(f"is nested more than {MAX_DEPTH} levels deep: flatten it")

    def _refuse(self, message: str) -> NoReturn:
        raise ConfigError([Problem(self._where, f"line {self._line}: {message}")])


def _syntax(text: str, err: yaml.MarkedYAMLError) -> str:
    reason = f"is neither YAML nor JSON: {(err.problem or 'something is missing').strip()}"
    if err.context and err.context_mark:
        reason += f" {err.context} from line {err.context_mark.line + 1}"
    if err.problem_mark is None:
        return reason
    number = err.problem_mark.line
    lines = text.splitlines()
    tab = number < len(lines) and "\t" in lines[number]
    return f"line {number + 1}: {reason}{'; indent with spaces, not tabs' if tab else ''}"


MAX_BYTES = 10 * 1024 * 1024


def read_document(path: Path) -> dict[str, Any]:
    """Return the one YAML or JSON mapping of a file. Raises ConfigError."""
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        _refuse(where, "does not exist: check the path")
    except IsADirectoryError:
        _refuse(where, "is a folder: give the path of a file")
    except PermissionError:
        _refuse(where, "cannot be read, permission denied: make it readable for the agent's user")
    except OSError as err:
        _refuse(where, f"cannot be read, {err.strerror}: check the path")
    except ValueError:
        _refuse(where, "is not a path, it holds a NUL character: check the path")
    if len(data) > MAX_BYTES:
        _refuse(where, f"is larger than {MAX_BYTES // 1024**2} MiB: give a configuration file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse_binary(where)
    return read_text_document(text, where)


def read_text_document(text: str, where: str) -> dict[str, Any]:
    """Return the one YAML or JSON mapping of a text. Raises ConfigError, with `where` as the location."""
    if "\0" in text:
        _refuse_binary(where)
    # JSON needs its own parser, because YAML supports neither surrogate pairs nor long keys.
    # Invalid JSON goes through the YAML parser, which reports the line.
    if text.lstrip().startswith("{") and (document := _strict_json(text)) is not None:
        return document
    documents = [document for document in yaml_documents(text, where) if document is not None]
    if not documents:
        _refuse(where, "is empty: write a configuration into it")
    if len(documents) > 1:
        _refuse(where, f"has {len(documents)} documents: keep one of them, without --- lines between")
    if not isinstance(documents[0], dict):
        _refuse(where, "is not a mapping of fields: write lines such as kind: KubeletConfiguration")
    return documents[0]


def _strict_json(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a valid text without repeated keys, else None."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(mapping := dict(pairs)) != len(pairs):
            raise ValueError("repeated key")
        return mapping

    def finite(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(text, object_pairs_hook=without_repeats, parse_constant=finite)
        # A lone surrogate cannot be encoded again.
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and depth_of(document) <= MAX_DEPTH else None


def _refuse_binary(where: str) -> NoReturn:
    _refuse(where, "is binary, not text: give a YAML or JSON file in UTF-8")


def _refuse(where: str, message: str) -> NoReturn:
    raise ConfigError([Problem(where, message)])
