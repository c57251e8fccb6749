"""Conversion of a command line to a configuration file and the flags that must remain.

The file contains only what the flags set, and fields whose default differs with a file (anonymous requests,
for example) or depends on a field that is now in the file. So the file and the remaining flags are
equivalent to the command line, which is verified by decoding the result; a value that a file cannot express
stays a flag.

Settings of a file or of drop-ins that the command line names are in the new file as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pykubelet.config.codec import decode, document_to_yaml, to_document
from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import field_path, get_field, set_field
from pykubelet.config.flags.parser import FlagOccurrence, parse_flags
from pykubelet.config.load import LoadedConfig, load
from pykubelet.config.types import API_VERSION, KIND, KubeletConfiguration, complete

_PATHS = (
    "authentication.x509.client_ca_file",
    "pod_logs_dir",
    "resolv_conf",
    "static_pod_path",
    "tls_cert_file",
    "tls_private_key_file",
    "volume_plugin_dir",
)
"""Paths: relative ones in a file start at its directory, those in flags at the current directory."""
_REPLACED = ("config", "config-dir")
_DROPPED = ("help", "version")


class Converted(NamedTuple):
    """A command line split into a configuration file and flags."""

    yaml: str
    """Configuration file as YAML."""
    flags: list[str]
    """Flags that must stay on the command line; `--config` with the new file must be added."""
    notes: list[str]
    """Remarks for the user."""


def convert_flags(argv: Sequence[str]) -> Converted:
    """Convert a command line (without the command). Raises ConfigError when it is not valid."""
    loaded = load(argv)
    occurrences = parse_flags(argv).occurrences
    notes = _make_paths_absolute(loaded.config)
    document, inexpressible = _document(loaded, [item.flag for item in occurrences])
    flags = []
    for item in occurrences:
        name = item.flag.name
        if item.flag.status == "ignored":
            notes.append(f"--{name} is left out: it has no effect")
        elif name in _REPLACED:
            notes.append(f"--{name}={item.text} is left out: its settings are in the new file")
        elif item.flag.attribute and name not in _DROPPED:
            flags.append(_as_argument(item))
        elif item.flag.field in inexpressible:
            flags.append(_as_argument(item))
            notes.append(f"--{name} stays a flag: in a file, {item.text!r} would mean the default")
    for path in sorted(inexpressible - {item.flag.field for item in occurrences}):
        notes.append(f"{field_path(path)} cannot be written so that it means the same: check it")
    return Converted(document_to_yaml(document), flags, list(dict.fromkeys(notes)))


def _document(loaded: LoadedConfig, flags: list[Flag]) -> tuple[dict[str, Any], set[str]]:
    """Return the smallest document for this configuration, and the fields that it cannot express."""
    config = loaded.config
    written = {flag.field for flag in flags if flag.field}
    inexpressible: set[str] = set()
    while True:
        document = _pick(config, written - inexpressible)
        result, _ = decode(KubeletConfiguration, document)
        complete(result, document, loaded.gates.enabled)
        differing = set(_differences(config, result)) - inexpressible
        if not differing:
            return document, inexpressible
        inexpressible |= differing & written
        written |= differing


def _pick(config: KubeletConfiguration, fields: set[str]) -> dict[str, Any]:
    """Return the document of some fields, in the order of their definition, without nulls."""
    document = to_document(config)
    picked: dict[str, Any] = {}
    for path in fields:
        *parents, last = field_path(path).split(".")
        source, target = document, picked
        for name in parents:
            source, target = source[name], target.setdefault(name, {})
        target[last] = _without_nulls(source[last])
    return {"apiVersion": API_VERSION, "kind": KIND, **_in_order(picked, document)}


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value]
    return value


def _in_order(picked: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _in_order(picked[name], document[name]) if isinstance(picked[name], dict) else picked[name]
        for name in document
        if name in picked
    }


def _differences(config: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the fields that differ; maps and lists are compared as a whole."""
    for field in msgspec.structs.fields(type(config)):
        value, other_value = getattr(config, field.name), getattr(other, field.name)
        if isinstance(value, msgspec.Struct) and isinstance(other_value, msgspec.Struct):
            yield from _differences(value, other_value, f"{prefix}{field.name}.")
        elif value != other_value:
            yield f"{prefix}{field.name}"


def _make_paths_absolute(config: KubeletConfiguration) -> list[str]:
    notes = []
    for path in _PATHS:
        text = get_field(config, path)
        if text and not text.startswith("/"):
            set_field(config, path, str(Path(text).absolute()))
            notes.append(f"{field_path(path)}: {text} was relative to the current folder and is now absolute")
    return notes


def _as_argument(item: FlagOccurrence) -> str:
    if item.text == item.flag.kind.bare:
        return f"--{item.flag.name}"
    return f"--{item.flag.name}={item.text}"
