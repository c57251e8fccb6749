"""Feature gates: stages, defaults, locks, groups and needs, against the reference's facts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.config.feature_gates import ALIASES, FeatureGates, Gate, known_features, known_gates

DATA = Path(__file__).parent.parent / "data" / "feature-gates-v1.36.tsv"
ROWS = [line.split("\t") for line in DATA.read_text().splitlines()[1:]]


@pytest.mark.parametrize(("name", "history"), ROWS, ids=[row[0] for row in ROWS])
def test_every_gate_of_the_reference_has_its_latest_stage_and_default(name: str, history: str) -> None:
    stage, _, default = history.split()[-1].partition(":")[2].partition("=")
    gate = known_gates()[ALIASES.get(name, name)]
    assert gate.stage == stage
    assert gate.default == (default.rstrip("!") == "true")
    assert FeatureGates().enabled(name) == gate.default
    if default.endswith("!"):
        assert gate.locked


def test_the_defaults_agree_with_themselves() -> None:
    gates = FeatureGates().with_overrides({})
    assert gates.problems == ()
    assert gates.warnings == ()


def test_a_gate_is_set() -> None:
    gates = FeatureGates().with_overrides(
        {"EventedPLEG": True, "GracefulNodeShutdownBasedOnPodPriority": False}
    )
    assert gates.enabled("EventedPLEG")
    assert not gates.enabled("GracefulNodeShutdownBasedOnPodPriority")
    assert gates.problems == ()
    assert not FeatureGates().enabled("EventedPLEG"), "the defaults must not change"


def test_an_unknown_gate_is_named_with_the_nearest_known_one() -> None:
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
def test_a_locked_gate_keeps_its_default(name: str, value: bool, fault: str) -> None:
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
def test_gates_on_their_way_out_warn(name: str, value: bool, word: str) -> None:
    warnings = FeatureGates().with_overrides({name: value}).warnings
    assert [name in line and word in line for line in warnings] == ([True] if word else [])


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_a_gate_may_be_called_by_its_name_in_lists(alias: str, name: str) -> None:
    value = not known_gates()[name].default or known_gates()[name].locked
    gates = FeatureGates().with_overrides({alias: value})
    assert gates.problems == ()
    assert gates.enabled(name) == gates.enabled(alias) == value
    assert alias not in known_gates()


def test_all_alpha_and_all_beta_set_what_is_not_set_by_name() -> None:
    gates = FeatureGates().with_overrides({"AllAlpha": True, "EventedPLEG": False})
    assert gates.enabled("MemoryQoS")
    assert not gates.enabled("EventedPLEG")
    assert not gates.enabled("PodCertificateRequest"), "a beta gate is not touched by AllAlpha"
    off = FeatureGates().with_overrides({"AllBeta": False, "AllAlpha": False})
    for gate in known_gates().values():
        expected = gate.default if gate.stage in ("GA", "Deprecated") else False
        assert off.enabled(gate.name) == expected, gate.name


def test_a_gate_needs_others() -> None:
    (problem,) = (
        FeatureGates().with_overrides({"NodeDeclaredFeatures": True, "WorkloadWithJob": True}).problems
    )
    assert problem.path == "featureGates.WorkloadWithJob"
    assert "needs GenericWorkload" in problem.message
    gates = FeatureGates().with_overrides({"GracefulNodeShutdown": False})
    assert {problem.path for problem in gates.problems} == {"featureGates.GracefulNodeShutdown"}
    assert not FeatureGates().with_overrides({"GenericWorkload": True, "WorkloadWithJob": True}).problems


def test_the_place_of_a_problem_can_be_named() -> None:
    (problem,) = (
        FeatureGates().with_overrides({"Nope": True}, lambda name: f"--feature-gates {name}").problems
    )
    assert problem.path == "--feature-gates Nope"


def test_asking_for_a_gate_that_does_not_exist_is_a_bug() -> None:
    with pytest.raises(KeyError):
        FeatureGates().enabled("NoSuchGate")


def test_the_help_lists_gates_that_are_still_a_choice() -> None:
    lines = known_features()
    assert "AllAlpha=true|false (ALPHA - default=false)" in lines
    assert "ContainerCheckpoint=true|false (BETA - default=true)" in lines
    assert not any(line.startswith(("SidecarContainers=", "GitRepoVolumeDriver=")) for line in lines)


def test_needs_name_gates_that_exist() -> None:
    for gate in known_gates().values():
        assert isinstance(gate, Gate)
        assert set(gate.needs) <= set(known_gates())


@given(
    st.dictionaries(st.sampled_from(sorted(known_gates())) | st.text(max_size=20), st.booleans(), max_size=6)
)
def test_whatever_is_asked_for_each_gate_is_as_asked_or_a_problem(wanted: dict[str, bool]) -> None:
    gates = FeatureGates().with_overrides(wanted)
    for name, value in wanted.items():
        if name not in known_gates() or gates.enabled(name) != value:
            assert any(problem.path.startswith("featureGates") for problem in gates.problems)
