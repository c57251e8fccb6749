"""Feature gates with the rules of upstream v1.36.

Every gate's stages, defaults, locks and dependencies are in `feature_gates.tsv`; the effective entry is the
newest one that is not newer than v1.36. Gates of other components are known too, because one `featureGates`
map is often shared by a whole cluster.

A `FeatureGates` is immutable. `with_overrides` returns a new one that also contains the problems of the
request, so that the caller can report them together with all others.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pykubelet import KUBERNETES_VERSION
from pykubelet.config.errors import Problem
from pykubelet.util.text import quoted

Stage = Literal["Alpha", "Beta", "GA", "Deprecated"]
ALL_ALPHA = "AllAlpha"
ALL_BETA = "AllBeta"
ALIASES = {
    "CPUCFSQuotaPeriod": "CustomCPUCFSQuotaPeriod",
    "RuntimeClassInImageCriAPI": "RuntimeClassInImageCriApi",
}
"""Names of two gates in upstream's lists of gates, to the names that upstream's flag accepts."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Effective entry of one gate at KUBERNETES_VERSION."""

    name: str
    stage: Stage
    default: bool
    locked: bool = False
    """Whether the gate is locked to its default."""
    needs: tuple[str, ...] = ()
    """Gates that must be enabled when this one is."""


def gate_path(name: str) -> str:
    """Return the path of a gate in the configuration file, for a Problem."""
    return (
        f"featureGates.{name}" if name.isidentifier() and len(name) < 80 else f"featureGates[{quoted(name)}]"
    )


@dataclass(frozen=True)
class FeatureGates:
    """State of all gates; `FeatureGates()` has the defaults."""

    overrides: Mapping[str, bool] = field(default_factory=dict)
    """Requested values by gate name; valid requests only."""
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    def enabled(self, name: str) -> bool:
        """Return whether a gate is enabled. Raises KeyError for an unknown gate, a bug of the caller."""
        gate = known_gates()[ALIASES.get(name, name)]
        if gate.name in self.overrides:
            return self.overrides[gate.name]
        group = {"Alpha": ALL_ALPHA, "Beta": ALL_BETA}.get(gate.stage, "")
        return self.overrides.get(group, gate.default)

    def with_overrides(
        self, requested: Mapping[str, bool], where: Callable[[str], str] = gate_path
    ) -> FeatureGates:
        """Return the gates with `requested` set in addition to the present overrides.

        `where` maps a gate to the location of its setting, for the problems. An invalid request becomes a
        problem and is not applied; the others are.
        """
        problems = list(self.problems)
        warnings = list(self.warnings)
        accepted = dict(self.overrides)
        for name, value in requested.items():
            gate = known_gates().get(ALIASES.get(name, name))
            if gate is None:
                problems.append(Problem(where(name), _unknown(name)))
            elif gate.locked and value != gate.default:
                problems.append(Problem(where(name), _locked(gate, value)))
            else:
                accepted[gate.name] = value
                if gate.stage in ("GA", "Deprecated"):
                    warnings.append(
                        f"feature gate {name} is {'deprecated' if gate.stage == 'Deprecated' else 'GA'}: "
                        f"{name}={_text(value)} works now, and the gate will be removed in a future release"
                    )
        gates = FeatureGates(accepted, tuple(problems), tuple(warnings))
        if len(problems) > len(self.problems):
            # The value of a rejected gate is unknown, so dependencies cannot be checked.
            return gates
        return FeatureGates(accepted, (*problems, *gates._unmet(requested, where)), gates.warnings)

    def _unmet(self, requested: Mapping[str, bool], where: Callable[[str], str]) -> list[Problem]:
        problems = []
        for gate in known_gates().values():
            off = [need for need in gate.needs if not self.enabled(need)]
            if off and self.enabled(gate.name):
                culprit = (
                    gate.name
                    if gate.name in requested
                    else next((n for n in off if n in requested), gate.name)
                )
                problems.append(
                    Problem(
                        where(culprit),
                        f"{gate.name} is on but needs {' and '.join(off)}, which is off: "
                        f"turn {gate.name} off, or what it needs on",
                    )
                )
        return problems


@functools.cache
def known_gates() -> Mapping[str, Gate]:
    """Return every gate of v1.36 by name, `AllAlpha` and `AllBeta` included."""
    gates = {
        ALL_ALPHA: Gate(ALL_ALPHA, "Alpha", default=False),
        ALL_BETA: Gate(ALL_BETA, "Beta", default=False),
    }
    table = importlib.resources.files("pykubelet.config").joinpath("feature_gates.tsv").read_text("utf-8")
    for line in table.splitlines()[1:]:
        name, history, *needs = line.split("\t")
        stage, default, locked = _current_stage(history)
        gates[name] = Gate(name, stage, default, locked, tuple(needs[0].split()) if needs else ())
    return gates


def known_features() -> list[str]:
    """Return the alpha and beta gates as `--help` lists them: `Name=true|false (STAGE - default=…)`."""
    return [
        f"{gate.name}=true|false ({gate.stage.upper()} - default={_text(gate.default)})"
        for gate in sorted(known_gates().values(), key=lambda gate: gate.name)
        if gate.stage in ("Alpha", "Beta")
    ]


def _current_stage(history: str) -> tuple[Stage, bool, bool]:
    """Return stage, default and lock of the newest entry that is not newer than KUBERNETES_VERSION."""
    chosen, best = "", (-1, -1)
    for entry in history.split():
        version, _, rest = entry.partition(":")
        if best <= _version(version) <= _version(KUBERNETES_VERSION.removeprefix("v")):
            chosen, best = rest, _version(version)
    name, _, default = chosen.partition("=")
    stage = next(stage for stage in get_args(Stage) if stage == name)
    return stage, default.rstrip("!") == "true", default.endswith("!")


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name[:80], known_gates(), n=1)
    hint = f"did you mean {close[0]}?" if close else "remove it; it may be from another release"
    return f"there is no feature gate {quoted(name)} in Kubernetes {KUBERNETES_VERSION}: {hint}"


def _locked(gate: Gate, value: bool) -> str:
    return f"{gate.name} cannot be set to {_text(value)}: it is locked to {_text(gate.default)}; remove it"


def _text(value: bool) -> str:
    return "true" if value else "false"
