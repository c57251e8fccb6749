"""Feature gates: stages, defaults, locks, groups and needs, against the reference's facts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.config.feature_gates import ALIASES, FeatureGates, Gate, known_features, known_gates

DATA = Path(__file__).parents[2] / "data" / "feature-gates-v1.36.tsv"
ROWS = [line.split("\t") for line in DATA.read_text().splitlines()[1:]]


@pytest.mark.parametrize(("name", "history"), ROWS, ids=[row[0] for row in ROWS])
def test_known_gates_stage_and_default_match_upstream(name: str, history: str) -> None:
    stage, _, default = history.split()[-1].partition(":")[2].partition("=")
    gate = known_gates()[ALIASES.get(name, name)]
    assert gate.stage == stage
    assert gate.default == (default.rstrip("!") == "true")
    assert FeatureGates().enabled(name) == gate.default
    if default.endswith("!"):
        assert gate.locked


def test_feature_gates_defaults_without_problems_or_warnings() -> None:
    gates = FeatureGates().with_overrides({})
    assert gates.problems == ()
    assert gates.warnings == ()


def test_feature_gates_override_changes_only_new_instance() -> None:
    gates = FeatureGates().with_overrides(
        {"EventedPLEG": True, "GracefulNodeShutdownBasedOnPodPriority": False}
    )
    assert gates.enabled("EventedPLEG")
    assert not gates.enabled("GracefulNodeShutdownBasedOnPodPriority")
    assert gates.problems == ()
    assert not FeatureGates().enabled("EventedPLEG"), "the defaults must not change"


def test_feature_gates_unknown_gate_problem_suggests_nearest_name() -> None:
    gates = FeatureGates().with_overrides({"NodeSwop": True, "EventedPLEG": True})
    (problem,) = gates.problems
    assert problem.path == "featureGates.NodeSwop"
    assert "did you mean NodeSwap?" in problem.message
    assert gates.enabled("EventedPLEG"), "the rest holds"


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("SidecarContainers", False, "locked to true"),
        ("SidecarContainers", True, ""),
        ("SeparateCacheWatchRPC", True, "locked to false"),
        ("DynamicResourceAllocation", False, "locked to true"),
    ],
)
def test_feature_gates_locked_gate_override_rejected(name: str, value: bool, fault: str) -> None:
    gates = FeatureGates().with_overrides({name: value})
    assert [fault in problem.message for problem in gates.problems] == ([True] if fault else [])
    assert gates.enabled(name) == known_gates()[name].default


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("InPlacePodVerticalScaling", True, "GA"),
        ("GitRepoVolumeDriver", False, "deprecated"),
        ("EventedPLEG", True, ""),
    ],
)
def test_feature_gates_ga_or_deprecated_override_warns(name: str, value: bool, word: str) -> None:
    warnings = FeatureGates().with_overrides({name: value}).warnings
    assert [name in line and word in line for line in warnings] == ([True] if word else [])


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_feature_gates_alias_sets_canonical_gate(alias: str, name: str) -> None:
    value = not known_gates()[name].default or known_gates()[name].locked
    gates = FeatureGates().with_overrides({alias: value})
    assert gates.problems == ()
    assert gates.enabled(name) == gates.enabled(alias) == value
    assert alias not in known_gates()


def test_feature_gates_all_alpha_and_all_beta_apply_to_gates_not_set_by_name() -> None:
    gates = FeatureGates().with_overrides({"AllAlpha": True, "EventedPLEG": False})
    assert gates.enabled("MemoryQoS")
    assert not gates.enabled("EventedPLEG")
    assert not gates.enabled("PodCertificateRequest"), "a beta gate is not touched by AllAlpha"
    off = FeatureGates().with_overrides({"AllBeta": False, "AllAlpha": False})
    for gate in known_gates().values():
        expected = gate.default if gate.stage in ("GA", "Deprecated") else False
        assert off.enabled(gate.name) == expected, gate.name


def test_feature_gates_missing_dependency_reported() -> None:
    (problem,) = (
        FeatureGates().with_overrides({"NodeDeclaredFeatures": True, "WorkloadWithJob": True}).problems
    )
    assert problem.path == "featureGates.WorkloadWithJob"
    assert "needs GenericWorkload" in problem.message
    gates = FeatureGates().with_overrides({"GracefulNodeShutdown": False})
    assert {problem.path for problem in gates.problems} == {"featureGates.GracefulNodeShutdown"}
    assert not FeatureGates().with_overrides({"GenericWorkload": True, "WorkloadWithJob": True}).problems


def test_feature_gates_problem_path_uses_custom_prefix() -> None:
    (problem,) = (
        FeatureGates().with_overrides({"Nope": True}, lambda name: f"--feature-gates {name}").problems
    )
    assert problem.path == "--feature-gates Nope"


def test_feature_gates_enabled_unknown_gate_raises_key_error() -> None:
    with pytest.raises(KeyError):
        FeatureGates().enabled("NoSuchGate")


def test_known_features_lists_only_unlocked_alpha_and_beta_gates() -> None:
    lines = known_features()
    assert "AllAlpha=true|false (ALPHA - default=false)" in lines
    assert "ContainerCheckpoint=true|false (BETA - default=true)" in lines
    assert not any(line.startswith(("SidecarContainers=", "GitRepoVolumeDriver=")) for line in lines)


def test_known_gates_dependencies_exist() -> None:
    for gate in known_gates().values():
        assert isinstance(gate, Gate)
        assert set(gate.needs) <= set(known_gates())


@given(
    st.dictionaries(st.sampled_from(sorted(known_gates())) | st.text(max_size=20), st.booleans(), max_size=6)
)
def test_feature_gates_any_overrides_applied_or_reported(wanted: dict[str, bool]) -> None:
    gates = FeatureGates().with_overrides(wanted)
    for name, value in wanted.items():
        if name not in known_gates() or gates.enabled(name) != value:
            assert any(problem.path.startswith("featureGates") for problem in gates.problems)
