"""From a command line to everything the agent was told: flags, configuration, gates.

The order is the reference's: flags are read; without `--config` the old defaults of the command line
hold, with it those of the file; drop-ins go over the file; flags go over everything, feature gates
name by name, lists and maps as a whole. Then all of it is checked.

Whatever is wrong anywhere is raised as one `ConfigError` that lists every problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pykubelet.api.text import quoted
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.files import ConfigFiles, load_config_files
from pykubelet.config.flag_rows import Flag
from pykubelet.config.flag_table import BY_NAME, field_path, flag_default, set_field
from pykubelet.config.flags import ParsedFlags, parse_flags
from pykubelet.config.gates import FeatureGates, gate_path
from pykubelet.config.kubelet_flags import KubeletFlags, check_flags, log_options
from pykubelet.config.no_effect import flag_reason, no_effect_warnings
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate import validate
from pykubelet.logs.mask import MASK, mask_text
from pykubelet.logs.setup import LogOptions

Action = Literal["run", "help", "version"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the operator asked for."""

    flags: KubeletFlags
    config: KubeletConfiguration
    gates: FeatureGates
    warnings: list[str]
    """Sentences for the log: deprecated flags, gates that will go."""
    flag_values: dict[str, str]
    """Every flag by name, in order: its value on the command line or its default, secrets masked."""
    action: Action

    def log_options(self) -> LogOptions:
        """Give the settings of the agent's own logs."""
        return log_options(self.flags, self.config)


def load(argv: Sequence[str]) -> Loaded:
    """Read a command line (without the command) and the files it names.

    Raises ConfigError with everything that is wrong.
    """
    parsed = parse_flags(argv)
    flags = _kubelet_flags(parsed)
    flag_values = _flag_values(parsed)
    action = _action(flags)
    if action != "run" and not parsed.problems:
        return Loaded(flags, baseline(), FeatureGates(), [], flag_values, action)

    asked = parsed.values.get("feature-gates", {})
    (config, set_fields), unreadable = _from_files(flags, asked)
    _overlay(config, parsed)
    gates = FeatureGates().with_overrides(
        config.feature_gates,
        lambda name: "--feature-gates" if name in asked else gate_path(name),
    )
    by_flag = {field_path(BY_NAME[name].field): f"--{name}" for name in parsed.values if BY_NAME[name].field}
    found = _name_flags(validate(config, gates.enabled), by_flag, only=bool(unreadable))
    problems = [*parsed.problems, *gates.problems, *unreadable, *check_flags(flags, config), *found]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    warnings = [
        *_warnings(parsed, flags, config),
        *no_effect_warnings(set_fields, (BY_NAME[name] for name in parsed.names()), gates),
        *gates.warnings,
    ]
    return Loaded(flags, config, gates, warnings, flag_values, action)


def baseline() -> KubeletConfiguration:
    """Give the configuration of a command line without flags."""
    return load_config_files(None, None, lambda gates: FeatureGates().with_overrides(gates).enabled).config


def _kubelet_flags(parsed: ParsedFlags) -> KubeletFlags:
    values = {BY_NAME[name].attribute: value for name, value in parsed.values.items()}
    values.pop("", None)
    return KubeletFlags(**values)


def _action(flags: KubeletFlags) -> Action:
    if flags.help:
        return "help"
    return "version" if flags.version in ("true", "raw") else "run"


def _from_files(flags: KubeletFlags, asked: Mapping[str, bool]) -> tuple[ConfigFiles, list[Problem]]:
    def gates_for(in_file: dict[str, bool]) -> Callable[[str], bool]:
        return FeatureGates().with_overrides({**in_file, **asked}).enabled

    path = Path(flags.config) if flags.config else None
    drop_ins = Path(flags.config_dir) if flags.config_dir else None
    try:
        return load_config_files(path, drop_ins, gates_for), []
    except ConfigError as error:
        problems = error.problems
    except OSError as error:
        place = quoted(str(error.filename or flags.config_dir))
        problems = [Problem(place, f"cannot be read: {error.strerror}; check the path")]
    return load_config_files(None, None, gates_for), problems


def _overlay(config: KubeletConfiguration, parsed: ParsedFlags) -> None:
    for name, value in parsed.values.items():
        field = BY_NAME[name].field
        if field == "feature_gates":
            config.feature_gates = {**config.feature_gates, **value}
        elif field:
            set_field(config, field, value)


def _name_flags(problems: list[Problem], by_flag: Mapping[str, str], *, only: bool) -> list[Problem]:
    """Say which flag a problem comes from; `only` drops those that come from no flag.

    When the file could not be read, nothing can be said about fields that only the file would set.
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
    given = [BY_NAME[name] for name in parsed.names()]
    warnings = []
    if movable := [flag for flag in given if flag.status == "file" and not flag_reason(flag)]:
        warnings.append(
            f"these flags belong in the configuration file (--config): {_listed(movable)}; "
            "`pykubelet config convert-flags` writes it for you"
        )
    warnings += [
        f"--{flag.name} is deprecated: {flag.note}"
        for flag in given
        if flag.status == "deprecated" and not flag_reason(flag)
    ]
    if flags.bootstrap_kubeconfig and not flags.kubeconfig:
        warnings.append(
            "--bootstrap-kubeconfig has no effect without --kubeconfig, which says where to keep the "
            "credentials: the agent runs standalone"
        )
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
    for given in parsed.given:
        texts.setdefault(given.flag.name, []).append(MASK if given.flag.secret else mask_text(given.text))
    defaults = baseline()
    return {
        name: ",".join(texts[name]) if name in texts else flag_default(BY_NAME[name], defaults)
        for name in sorted(BY_NAME)
    }
