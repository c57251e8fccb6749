"""Merged hints equal those of the reference, and depend on nobody's order."""

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.cm.topology.hints import (
    ANYWHERE,
    Hints,
    NumaTopology,
    Policy,
    TopologyHint,
    admits,
    breadth,
    merge,
    node_sets,
)
from tests.unit.cm.numa_machines import GOLDEN, hint, hints

CASES = [json.loads(line) for line in (GOLDEN / "topology-merge.jsonl").read_text().splitlines()]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def test_merge_recorded_cases_equals_upstream() -> None:
    for case in CASES:
        nodes = frozenset(range(len(case["distances"])))
        distances = {one: dict(enumerate(row)) for one, row in enumerate(case["distances"])}
        providers: list[Hints] = [
            {name: None if text is None else hints(text) for name, text in provider.items()}
            for provider in case["providers"]
        ]
        for policy in POLICIES[1:]:
            for suffix, known in (("", {}), (" closest", distances)):
                expected, admitted = case["expected"][policy + suffix]
                found = merge(policy, NumaTopology(nodes, known), providers)
                assert found == hint(expected), (policy + suffix, case)
                assert admits(policy, found) is admitted


def test_merge_recording_covers_policies_and_options() -> None:
    told = {tuple(case["expected"][name][0] for name in case["expected"]) for case in CASES}
    assert any(one[0] != one[1] for one in told), "distances never matter"
    assert any(case["expected"]["restricted"][1] != case["expected"]["single-numa-node"][1] for case in CASES)


@pytest.mark.parametrize(
    ("policy", "providers", "expected"),
    [
        ("none", [{"cpu": hints("0!")}], ANYWHERE),
        ("best-effort", [], hint("0.1!")),
        ("best-effort", [{}, {"gpu": None}], hint("0.1!")),
        ("best-effort", [{"gpu": []}], hint("0.1")),
        ("best-effort", [{"cpu": hints("0! 1! 0.1")}, {"gpu": hints("1!")}], hint("1!")),
        ("restricted", [{"cpu": hints("0!")}, {"gpu": hints("1!")}], hint("0.1")),
        ("single-numa-node", [{"cpu": hints("0! 1! 0.1")}], hint("0!")),
        ("single-numa-node", [{"cpu": hints("0.1!")}], hint("any")),
        ("single-numa-node", [{"cpu": None}], hint("any!")),
    ],
)
def test_merge_documented_examples_match(
    policy: Policy, providers: list[Hints], expected: TopologyHint
) -> None:
    assert merge(policy, NumaTopology(frozenset({0, 1})), providers) == expected


def _some_hints(nodes: int) -> st.SearchStrategy[list[TopologyHint] | None]:
    sets = st.sampled_from([None, *node_sets(range(nodes))])
    return st.none() | st.lists(st.builds(TopologyHint, sets, st.booleans()), max_size=5)


_PROVIDERS = st.lists(st.dictionaries(st.sampled_from("abc"), _some_hints(3), max_size=2), max_size=3)


@given(_PROVIDERS, st.sampled_from(POLICIES))
def test_merge_result_independent_of_order(providers: list[Hints], policy: Policy) -> None:
    machine = NumaTopology(frozenset(range(3)))
    turned: list[Hints] = [
        {name: None if some is None else some[::-1] for name, some in reversed(hints.items())}
        for hints in reversed(providers)
    ]
    assert merge(policy, machine, providers) == merge(policy, machine, turned)


@given(_PROVIDERS)
def test_merge_preferred_result_preferred_by_every_resource(providers: list[Hints]) -> None:
    merged = merge("restricted", NumaTopology(frozenset(range(3))), providers)
    named = [some for hints in providers for some in hints.values() if some is not None]
    agreeing = [
        any(each.preferred and each.nodes in (None, merged.nodes) for each in some) if some else False
        for some in named
    ]
    if merged.preferred:
        assert all(agreeing)


def test_merge_eight_nodes_five_resources_completes_quickly() -> None:
    every: list[TopologyHint] | None = [TopologyHint(nodes, len(nodes) == 2) for nodes in node_sets(range(8))]
    merged = merge("best-effort", NumaTopology(frozenset(range(8))), [dict.fromkeys("abcde", every)])
    assert merged == hint("0.1!")


def test_merge_sixteen_nodes_no_agreement_completes_quickly() -> None:
    """As many as `max-allowable-numa-nodes` may allow; the agent must not stand still for an hour."""
    machine = NumaTopology(frozenset(range(16)))
    some: list[TopologyHint] | None = [
        TopologyHint(nodes, preferred=False) for nodes in node_sets(machine.nodes)
    ]
    high: list[TopologyHint] | None = [
        TopologyHint(nodes, preferred=True) for nodes in node_sets(range(3, 16))
    ]
    assert merge("best-effort", machine, [{"a": some}, {"b": high}]) == hint("3")


def test_node_sets_ordered_by_size() -> None:
    sets = list(node_sets([4, 0, 2]))
    assert [sorted(each) for each in sets] == [[0], [2], [4], [0, 2], [0, 4], [2, 4], [0, 2, 4]]
    assert sorted(sets, key=breadth) == sets
    assert len(set(node_sets(range(8)))) == 255
