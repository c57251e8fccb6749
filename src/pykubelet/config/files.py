"""The configuration file and its drop-ins, as one configuration.

The main file is read and completed with its defaults first; then each drop-in is laid over the
result: fields replace fields, mappings merge key by key, lists are replaced whole, and an explicit
null takes a field back to its default. So a drop-in that sets one threshold of `evictionHard` keeps
the others, also those that were defaults.

Relative paths in the main file start at the file's folder. Those in drop-ins are left as they are,
as in the reference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pykubelet.api.text import quoted
from pykubelet.config.decode import decode, explicit_fields
from pykubelet.config.defaults import GATED_FIELDS, complete, legacy_defaults
from pykubelet.config.documents import read_document
from pykubelet.config.encode import to_document
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.types import API_VERSION, KIND, KubeletConfiguration
from pykubelet.config.validate import validate

GatesFor = Callable[[dict[str, bool]], Callable[[str], bool]]
"""Given the `featureGates` of a file, tells which gates are on."""

DROP_IN_SUFFIX = ".conf"


class DropIns(NamedTuple):
    """The files of a drop-in folder: those to read, in order, and those that are not drop-ins."""

    used: list[Path]
    skipped: list[Path]


class ConfigFiles(NamedTuple):
    """The merged configuration files."""

    config: KubeletConfiguration
    set_fields: frozenset[str]
    """Dotted paths of JSON names of the fields that the files set."""


def load_config_files(path: Path | None, drop_in_dir: Path | None, gates_for: GatesFor) -> ConfigFiles:
    """Read and merge all files; without any, return the defaults of a node that has none.

    Raises one ConfigError with the problems of all files; they name their file when there are
    several. The result is not validated, because flags may still change it; but when a file is
    malformed, the error also tells what else would be wrong.
    """
    unreadable: list[Problem] = []
    drop_ins: list[Path] = []
    try:
        drop_ins = find_drop_ins(drop_in_dir).used if drop_in_dir is not None else []
    except ConfigError as err:
        unreadable += err.problems
    main = _read(path) if path is not None else None
    patches = [_read(file, patch=True) for file in drop_ins]
    sources = [source for source in (main, *patches) if source is not None]
    problems = [
        Problem(f"{source.path}: {found.path}" if len(sources) > 1 else found.path, found.message)
        for source in sources
        for found in source.malformed
    ]
    unreadable += (problem for source in sources for problem in source.unreadable)
    if unreadable:
        raise ConfigError([*unreadable, *problems])
    config, gate_enabled = _assemble(main, [patch.document for patch in patches], gates_for)
    if problems:
        names = {re.split(r"[.\[]", found.path)[0] for source in sources for found in source.malformed}
        malformed = names & to_document(config).keys()
        # Nothing can be said about a malformed field, nor about those that are compared with it.
        problems += (
            problem
            for problem in validate(config, gate_enabled)
            if not any(field in str(problem) for field in malformed)
        )
        raise ConfigError(problems)
    merged: dict[str, Any] = {}
    for source in sources:
        merged = merge_patch(merged, source.document)
    return ConfigFiles(config, frozenset(_leaf_paths(merged)))


def find_drop_ins(folder: Path) -> DropIns:
    """List a drop-in folder and its subfolders, each sorted by name; raises ConfigError.

    Hidden files count too; only the suffix decides.
    """
    found = DropIns([], [])
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        if place.is_dir() and (place == folder or not place.is_symlink()):
            try:
                entries = sorted(place.iterdir(), key=lambda entry: os.fsencode(entry.name), reverse=True)
            except OSError as err:
                raise ConfigError([Problem(str(place), f"cannot be listed, {err.strerror}")]) from None
            waiting += entries
        elif place == folder:
            raise ConfigError([Problem(str(folder), "is not a folder: give the folder of the drop-in files")])
        else:
            (found.used if place.name.endswith(DROP_IN_SUFFIX) else found.skipped).append(place)
    return found


def merge_patch(target: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one document over another: a JSON merge patch (RFC 7386); neither is changed."""
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = merge_patch(merged.get(key), value)
        else:
            merged[key] = value
    return merged


def _leaf_paths(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from _leaf_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


class _Source(NamedTuple):
    """One file: what is in it, or why that cannot be told, and the fields that are not as they should be."""

    path: Path
    document: dict[str, Any]
    unreadable: list[Problem]
    malformed: list[Problem]


def _read(path: Path, patch: bool = False) -> _Source:
    try:
        document = read_document(path)
    except ConfigError as err:
        return _Source(path, {}, err.problems, [])
    if wrong := _wrong_kind(document):
        return _Source(path, {}, [Problem(f"{path}: {found.path}", found.message) for found in wrong], [])
    # In a drop-in, null takes something back; only the rest has a type.
    _, malformed = decode(KubeletConfiguration, merge_patch({}, document) if patch else document)
    return _Source(path, document, [], malformed)


def _assemble(
    main: _Source | None, patches: list[dict[str, Any]], gates_for: GatesFor
) -> tuple[KubeletConfiguration, Callable[[str], bool]]:
    """Decode, complete and merge; malformed fields count as not set."""
    if main is None:
        config, gate_enabled = legacy_defaults(), gates_for({})
        complete(config, (), gate_enabled)
    else:
        config, gate_enabled = _complete(main.document, gates_for)
        _resolve_paths(config, main.path.absolute().parent)
    if not patches:
        return config, gate_enabled
    # What a gate gave as default must not look like the operator's wish when a drop-in turns it off.
    chosen = main.document if main else {}
    merged = {
        field: value
        for field, value in to_document(config).items()
        if field not in GATED_FIELDS or chosen.get(field) is not None
    }
    for patch in patches:
        merged = merge_patch(merged, patch)
    return _complete(merged, gates_for)


def _complete(
    document: dict[str, Any], gates_for: GatesFor
) -> tuple[KubeletConfiguration, Callable[[str], bool]]:
    config, _ = decode(KubeletConfiguration, document)
    gate_enabled = gates_for(config.feature_gates)
    complete(config, explicit_fields(KubeletConfiguration, document), gate_enabled)
    return config, gate_enabled


def _wrong_kind(document: dict[str, Any]) -> list[Problem]:
    """Say when a document is something else: its fields are then not worth looking at."""
    wanted = {"apiVersion": API_VERSION, "kind": KIND}
    found = []
    for field, value in wanted.items():
        given = document.get(field)
        if given in (None, ""):
            found.append(Problem(field, f"is missing: write {field}: {value}"))
        elif given != value:
            shown = quoted(given) if isinstance(given, str) else "not text"
            found.append(Problem(field, f"is {shown}, which this agent cannot read: write {field}: {value}"))
    return found


def _resolve_paths(config: KubeletConfiguration, folder: Path) -> None:
    def absolute(text: str) -> str:
        return os.path.normpath(folder / text) if text and not text.startswith("/") else text

    config.static_pod_path = absolute(config.static_pod_path)
    config.tls_cert_file = absolute(config.tls_cert_file)
    config.tls_private_key_file = absolute(config.tls_private_key_file)
    config.resolv_conf = absolute(config.resolv_conf)
    config.volume_plugin_dir = absolute(config.volume_plugin_dir)
    config.pod_logs_dir = absolute(config.pod_logs_dir)
    x509 = config.authentication.x509
    x509.client_ca_file = absolute(x509.client_ca_file)
