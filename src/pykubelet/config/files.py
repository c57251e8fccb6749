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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pykubelet.api.text import quoted
from pykubelet.config.decode import decode, explicit_fields
from pykubelet.config.defaults import GATED_FIELDS, complete, legacy_defaults
from pykubelet.config.documents import read_document
from pykubelet.config.encode import to_document
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.types import API_VERSION, KIND, KubeletConfiguration

GatesFor = Callable[[dict[str, bool]], Callable[[str], bool]]
"""Given the `featureGates` of a file, tells which gates are on; may raise ConfigError."""

DROP_IN_SUFFIX = ".conf"


class DropIns(NamedTuple):
    """The files of a drop-in folder: those to read, in order, and those that are not drop-ins."""

    used: list[Path]
    skipped: list[Path]


def load_config_files(
    path: Path | None, drop_in_dir: Path | None, gates_for: GatesFor
) -> KubeletConfiguration:
    """Read and merge all files; without any, give the defaults of a node that has none.

    Raises one ConfigError with the problems of all files; they name their file when there are
    several. Values are not validated here, because flags may still change them.
    """
    used = find_drop_ins(drop_in_dir).used if drop_in_dir is not None else []
    problems: list[Problem] = []
    several = len(used) + (path is not None) > 1
    main: dict[str, Any] = {}
    if path is not None:
        main = _checked(path, several, problems)
    patches = [_checked(file, several, problems, patch=True) for file in used]
    if problems:
        raise ConfigError(problems)

    if path is None:
        config = legacy_defaults()
        complete(config, (), gates_for({}))
    else:
        config, _ = decode(KubeletConfiguration, main)
        complete(config, explicit_fields(KubeletConfiguration, main), gates_for(config.feature_gates))
        _resolve_paths(config, path.absolute().parent)
    if not patches:
        return config

    # What a gate gave as default must not look like the operator's wish when a drop-in turns it off.
    merged = {
        field: value
        for field, value in to_document(config).items()
        if field not in GATED_FIELDS or main.get(field) is not None
    }
    for patch in patches:
        merged = merge_patch(merged, patch)
    config, problems = decode(KubeletConfiguration, merged)
    if problems:
        raise ConfigError(problems)
    complete(config, explicit_fields(KubeletConfiguration, merged), gates_for(config.feature_gates))
    return config


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


def _checked(path: Path, several: bool, problems: list[Problem], patch: bool = False) -> dict[str, Any]:
    """Read one file and add what is wrong with it to `problems`."""
    try:
        document = read_document(path)
    except ConfigError as err:
        problems += err.problems
        return {}
    found = _wrong_kind(document)
    if not found:
        # In a drop-in, null takes something back; only the rest has a type.
        _, found = decode(KubeletConfiguration, merge_patch({}, document) if patch else document)
    where = f"{path}: " if several else ""
    problems += [Problem(where + problem.path, problem.message) for problem in found]
    return document


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
