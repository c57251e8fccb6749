"""Loading of flags, configuration files and feature gates from a command line, with upstream's precedence.

Flags are parsed first. Without `--config` the legacy defaults of the command line apply, with it those of
the file. Drop-ins override the file and flags override both: feature gates name by name, lists and maps as
a whole. The result is validated, and all problems anywhere are raised as one `ConfigError`.

The main file is decoded and completed with defaults before the drop-ins are merged: fields replace fields,
mappings merge key by key, lists are replaced as a whole, and an explicit null resets a field to its
default. So a drop-in that sets one threshold of `evictionHard` keeps the others, also default ones.
Relative paths in the main file start at the file's directory; those in drop-ins are left as they are, as
upstream does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pykubelet.config.codec import decode, explicit_fields, to_document
from pykubelet.config.documents import read_document
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.feature_gates import FeatureGates, gate_path
from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import BY_NAME, field_path, flag_default, set_field
from pykubelet.config.flags.kubelet_flags import KubeletFlags, check_flags, log_options
from pykubelet.config.flags.parser import ParsedFlags, parse_flags
from pykubelet.config.no_effect import flag_reason, no_effect_warnings
from pykubelet.config.types import (
    API_VERSION,
    GATED_FIELDS,
    KIND,
    KubeletConfiguration,
    complete,
    legacy_defaults,
)
from pykubelet.config.validation.validate import validate
from pykubelet.logs.mask import MASK, mask_text
from pykubelet.logs.setup import LogOptions
from pykubelet.util.text import quoted

GatesFor = Callable[[dict[str, bool]], Callable[[str], bool]]
"""Function from the `featureGates` of a file to a function that returns whether a gate is enabled."""
DROP_IN_SUFFIX = ".conf"
_EMPTY: tuple[object, ...] = (None, 0, "", "0", "0s", [], {})
"""Values of fields that are as good as unset: kubeadm writes every field without omitempty."""


class DropIns(NamedTuple):
    """Files of a drop-in directory: those to read, in order, and those without the suffix of drop-ins."""

    used: list[Path]
    skipped: list[Path]


class ConfigFiles(NamedTuple):
    """The merged configuration files."""

    config: KubeletConfiguration
    set_fields: frozenset[str]
    """Dotted paths of JSON names of the fields that the files set to more than an empty value."""


def load_config_files(path: Path | None, drop_in_dir: Path | None, gates_for: GatesFor) -> ConfigFiles:
    """Read and merge all files; without any, return the legacy defaults.

    Raises one ConfigError with the problems of all files, which contain the file's path if there are
    several. The result is not validated, because flags may still change it; but if a file is malformed,
    the error also contains the problems that validation finds.
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
        # Malformed fields, and those compared with them, cannot be validated.
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


def find_drop_ins(directory: Path) -> DropIns:
    """List a drop-in directory and its subdirectories, each sorted by name. Raises ConfigError.

    Only the suffix decides: hidden files are used, too.
    """
    found = DropIns([], [])
    pending = [directory]
    while pending:
        path = pending.pop()
        if path.is_dir() and (path == directory or not path.is_symlink()):
            try:
                entries = sorted(path.iterdir(), key=lambda entry: os.fsencode(entry.name), reverse=True)
            except OSError as err:
                raise ConfigError([Problem(str(path), f"cannot be listed, {err.strerror}")]) from None
            pending += entries
        elif path == directory:
            raise ConfigError(
                [Problem(str(directory), "is not a folder: give the folder of the drop-in files")]
            )
        else:
            (found.used if path.name.endswith(DROP_IN_SUFFIX) else found.skipped).append(path)
    return found


def merge_patch(target: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with a JSON merge patch (RFC 7386) applied; neither argument is changed."""
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
        elif value not in _EMPTY:
            yield f"{prefix}{key}"


class _Source(NamedTuple):
    """One file: its document, the problems of reading it, and those of malformed fields."""

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
    # In a drop-in null resets a field, so only the other values have the field's type.
    _, malformed = decode(KubeletConfiguration, merge_patch({}, document) if patch else document)
    return _Source(path, document, [], malformed)


def _assemble(
    main: _Source | None, patches: list[dict[str, Any]], gates_for: GatesFor
) -> tuple[KubeletConfiguration, Callable[[str], bool]]:
    """Decode, complete and merge the documents; malformed fields count as not set."""
    if main is None:
        config, gate_enabled = legacy_defaults(), gates_for({})
        complete(config, (), gate_enabled)
    else:
        config, gate_enabled = _complete(main.document, gates_for)
        _resolve_paths(config, main.path.absolute().parent)
    if not patches:
        return config, gate_enabled
    # A default that depends on a gate must not count as set if a drop-in disables the gate.
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
    """Return the problems of apiVersion and kind; the fields of another kind are not checked."""
    required = {"apiVersion": API_VERSION, "kind": KIND}
    found = []
    for field, value in required.items():
        actual = document.get(field)
        if actual in (None, ""):
            found.append(Problem(field, f"is missing: write {field}: {value}"))
        elif actual != value:
            shown = quoted(actual) if isinstance(actual, str) else "not text"
            found.append(Problem(field, f"is {shown}, which this agent cannot read: write {field}: {value}"))
    return found


def _resolve_paths(config: KubeletConfiguration, directory: Path) -> None:
    def absolute(text: str) -> str:
        return os.path.normpath(directory / text) if text and not text.startswith("/") else text

    config.static_pod_path = absolute(config.static_pod_path)
    config.tls_cert_file = absolute(config.tls_cert_file)
    config.tls_private_key_file = absolute(config.tls_private_key_file)
    config.resolv_conf = absolute(config.resolv_conf)
    config.volume_plugin_dir = absolute(config.volume_plugin_dir)
    config.pod_logs_dir = absolute(config.pod_logs_dir)
    x509 = config.authentication.x509
    x509.client_ca_file = absolute(x509.client_ca_file)


Action = Literal["run", "help", "version"]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """Complete configuration of a kubelet process."""

    flags: KubeletFlags
    config: KubeletConfiguration
    gates: FeatureGates
    warnings: list[str]
    """Warnings to log: deprecated flags, gates to be removed, settings without effect."""
    flag_values: dict[str, str]
    """Value or default of every flag by name, sorted, with secrets masked."""
    action: Action
    argv: tuple[str, ...] = ()
    """The command line, from which the configuration can be loaded again."""
    files: dict[str, Any] | None = None
    """Document of the merged files without flags; None without files, or if no flag requires it."""
    fallback: str = ""
    """Reason why the last valid configuration is used instead of the files; empty if it is not."""

    def log_options(self) -> LogOptions:
        """Return the settings of the kubelet's own logs."""
        return log_options(self.flags, self.config)


def load(argv: Sequence[str], *, last_good: Path | None = None) -> LoadedConfig:
    """Load a command line (without the command) and the files that it names.

    `last_good` is a file to read instead of those. Raises ConfigError with all problems.
    """
    parsed = parse_flags(argv)
    flags = _kubelet_flags(parsed)
    flag_values = _flag_values(parsed)
    action = _action(flags)
    if action != "run" and not parsed.problems:
        return LoadedConfig(flags, baseline(), FeatureGates(), [], flag_values, action)

    requested_gates = parsed.values.get("feature-gates", {})
    (config, set_fields), unreadable = _from_files(flags, requested_gates, last_good)
    files = to_document(config) if _keeps_last_good(flags) else None
    _overlay(config, parsed)
    gates = FeatureGates().with_overrides(
        config.feature_gates,
        lambda name: "--feature-gates" if name in requested_gates else gate_path(name),
    )
    by_flag = {field_path(BY_NAME[name].field): f"--{name}" for name in parsed.values if BY_NAME[name].field}
    found = _with_flag_names(validate(config, gates.enabled), by_flag, only=bool(unreadable))
    problems = [*parsed.problems, *gates.problems, *unreadable, *check_flags(flags, config), *found]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    warnings = [
        *_warnings(parsed, flags, config),
        *no_effect_warnings(
            () if last_good is not None else set_fields, (BY_NAME[name] for name in parsed.names()), gates
        ),
        *gates.warnings,
    ]
    return LoadedConfig(flags, config, gates, warnings, flag_values, action, tuple(argv), files)


def baseline() -> KubeletConfiguration:
    """Return the configuration of a command line without flags."""
    return load_config_files(None, None, lambda gates: FeatureGates().with_overrides(gates).enabled).config


def _kubelet_flags(parsed: ParsedFlags) -> KubeletFlags:
    values = {BY_NAME[name].attribute: value for name, value in parsed.values.items()}
    values.pop("", None)
    return KubeletFlags(**values)


def _action(flags: KubeletFlags) -> Action:
    if flags.help:
        return "help"
    return "version" if flags.version in ("true", "raw") else "run"


def _keeps_last_good(flags: KubeletFlags) -> bool:
    return (flags.watch_config or flags.use_last_good_config) and bool(flags.config or flags.config_dir)


def _from_files(
    flags: KubeletFlags, requested_gates: Mapping[str, bool], last_good: Path | None
) -> tuple[ConfigFiles, list[Problem]]:
    def gates_for(in_file: dict[str, bool]) -> Callable[[str], bool]:
        return FeatureGates().with_overrides({**in_file, **requested_gates}).enabled

    path = Path(flags.config) if flags.config else None
    drop_ins = Path(flags.config_dir) if flags.config_dir else None
    if last_good is not None:
        path, drop_ins = last_good, None
    try:
        return load_config_files(path, drop_ins, gates_for), []
    except ConfigError as error:
        problems = error.problems
    except OSError as error:
        shown = quoted(str(error.filename or flags.config_dir))
        problems = [Problem(shown, f"cannot be read: {error.strerror}; check the path")]
    return load_config_files(None, None, gates_for), problems


def _overlay(config: KubeletConfiguration, parsed: ParsedFlags) -> None:
    for name, value in parsed.values.items():
        field = BY_NAME[name].field
        if field == "feature_gates":
            config.feature_gates = {**config.feature_gates, **value}
        elif field:
            set_field(config, field, value)


def _with_flag_names(problems: list[Problem], by_flag: Mapping[str, str], *, only: bool) -> list[Problem]:
    """Return the problems with the flags that cause them; `only` drops those of fields that no flag sets.

    If the file could not be read, fields that only the file sets cannot be validated.
    """
    result = []
    for problem in problems:
        flag = next((flag for path, flag in by_flag.items() if _is_below(problem.path, path)), "")
        if flag:
            result.append(Problem(problem.path, f"{problem.message} (set by {flag})"))
        elif not only:
            result.append(problem)
    return result


def _is_below(path: str, field: str) -> bool:
    return path == field or path.startswith((f"{field}.", f"{field}["))


def _warnings(parsed: ParsedFlags, flags: KubeletFlags, config: KubeletConfiguration) -> list[str]:
    flags_set = [BY_NAME[name] for name in parsed.names()]
    warnings = []
    if movable := [flag for flag in flags_set if flag.status == "file" and not flag_reason(flag)]:
        warnings.append(
            f"these flags belong in the configuration file (--config): {_listed(movable)}; "
            "`pykubelet config convert-flags` writes it for you"
        )
    warnings += [
        f"--{flag.name} is deprecated: {flag.note}"
        for flag in flags_set
        if flag.status == "deprecated" and not flag_reason(flag)
    ]
    if flags.bootstrap_kubeconfig and not flags.kubeconfig:
        warnings.append(
            "--bootstrap-kubeconfig has no effect without --kubeconfig, which says where to keep the "
            "credentials: the agent runs standalone"
        )
    for name in ("watch-config", "use-last-good-config"):
        if getattr(flags, name.replace("-", "_")) and not (flags.config or flags.config_dir):
            warnings.append(f"--{name} has no effect without configuration files: set --config")
    reserved = config.kube_reserved_cgroup
    if config.kubelet_cgroups and reserved and not config.kubelet_cgroups.startswith(reserved):
        warnings.append(
            f"kubeletCgroups {config.kubelet_cgroups} is outside kubeReservedCgroup {reserved}: "
            "the agent's own usage will not count against what is reserved for it"
        )
    return warnings


def _listed(flags: list[Flag]) -> str:
    return ", ".join(f"--{flag.name}" for flag in flags)


def _flag_values(parsed: ParsedFlags) -> dict[str, str]:
    """Return the value of every flag as text, sorted by name, as the upstream kubelet logs them."""
    texts: dict[str, list[str]] = {}
    for occurrence in parsed.occurrences:
        texts.setdefault(occurrence.flag.name, []).append(
            MASK if occurrence.flag.secret else mask_text(occurrence.text)
        )
    defaults = baseline()
    return {
        name: ",".join(texts[name]) if name in texts else flag_default(BY_NAME[name], defaults)
        for name in sorted(BY_NAME)
    }
