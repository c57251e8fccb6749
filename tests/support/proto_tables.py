"""Tables of protobuf messages and services, and field types spelled as in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

DATA = Path(__file__).parents[1] / "data"
Fields = dict[str, tuple[int, str]]
Rpcs = dict[str, tuple[str, bool, str]]


class Table(NamedTuple):
    """What a file of facts says: full names to contents."""

    messages: dict[str, Fields]
    enums: dict[str, dict[str, int]]
    services: dict[str, Rpcs]


def read_table(path: Path) -> Table:
    table, package = Table({}, {}, {}), ""
    body: dict[str, Any] = {}
    for line in filter(str.strip, path.read_text().splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "package":
            package = rest
        elif word == "service":
            body = table.services[rest] = {}
        elif word == "enum":
            name, *values = rest.split()
            table.enums[f"{package}.{name}"] = {
                key: int(number) for key, number in (value.split("=") for value in values)
            }
        elif word == "message":
            body = table.messages[f"{package}.{rest}"] = {}
        elif word.isdecimal():
            name, kind = rest.split(None, 1)
            body[name] = (int(word), kind.strip())
        else:
            rpc = re.fullmatch(r"\((\S+)\) -> (stream )?(\S+)", rest)
            assert rpc, line
            body[word] = (rpc[1], bool(rpc[2]), rpc[3])
    return table


def kind_of(field: FieldDescriptor) -> str:
    """Spell a field's type as the tables do, with full names."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map<{kind_of(key)},{kind_of(value)}>"
    if field.message_type is not None:
        name = field.message_type.full_name
    elif field.enum_type is not None:
        name = field.enum_type.full_name
    else:
        scalars = {
            getattr(FieldDescriptor, f"TYPE_{n.upper()}"): n
            for n in [
                "string",
                "bool",
                "bytes",
                "int32",
                "int64",
                "uint32",
                "uint64",
                "double",
                "fixed32",
                "fixed64",
            ]
        }
        name = scalars[field.type]
    return f"repeated {name}" if field.is_repeated else name
