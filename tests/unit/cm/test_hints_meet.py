"""What sets of nodes have in common, by counting, is what trying each pair finds."""

from hypothesis import given
from hypothesis import strategies as st

from pykubelet.cm.topology.hints import intersections

_SETS = st.integers(0, 2**6 - 1)
_FEW_OR_MANY = st.sets(_SETS) | st.sets(_SETS, min_size=40)
"""With many, pairs are not tried any more."""


@given(_FEW_OR_MANY, _FEW_OR_MANY, st.sampled_from([0, 1, 5, 40]))
def test_intersections_equals_pairwise_intersection(some: set[int], others: set[int], shift: int) -> None:
    some, others = {one << shift for one in some}, {one << shift for one in others}
    assert intersections(some, others) == {one & other for one in some for other in others}


def test_intersections_empty_node_set_returns_empty_node_set() -> None:
    assert intersections({0}, {0}) == {0}
    assert intersections({0}, set()) == intersections(set(), set()) == set()


@given(st.sets(_SETS, max_size=12), st.sets(_SETS, max_size=12))
def test_intersections_sparse_node_numbers_returns_same_sets(some: set[int], others: set[int]) -> None:
    def spread(one: int) -> int:
        return sum(1 << 7 * bit for bit in range(6) if one >> bit & 1)

    everything = set(range(2**6))
    wide = intersections(set(map(spread, some | everything)), set(map(spread, others | everything)))
    assert wide == set(map(spread, everything))
    assert intersections(set(map(spread, some)), set(map(spread, others))) == set(
        map(spread, intersections(some, others))
    )


def test_intersections_all_sets_of_16_nodes_completes_quickly() -> None:
    """Four billion pairs: by trying them this test would not end."""
    all_of_them = range(1, 2**16)
    found = intersections(all_of_them, {one for one in all_of_them if one % 3})
    assert 0 in found
    assert len(found) > 2**15
