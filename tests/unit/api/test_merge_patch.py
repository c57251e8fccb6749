import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.merge_patch import REPLACE, merge_patch
from tests.support.node_status import apply_patch

KEYS = {"status.conditions": "type", "status.addresses": REPLACE}
API_KEYS = {"status.conditions": "type", "status.addresses": "type"}

words = st.text("ab", min_size=1, max_size=2)
values = st.recursive(
    st.integers(0, 2) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=6,
)
items = st.dictionaries(st.sampled_from(["status", "reason", "more"]), values, max_size=3)


@st.composite
def conditions(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = draw(st.lists(st.sampled_from("ABCDE"), unique=True))
    return [{"type": kind, **draw(items)} for kind in kinds]


addresses = st.lists(st.fixed_dictionaries({"type": st.sampled_from("IE"), "address": words}), max_size=3)
documents = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(words, st.dictionaries(words, words, max_size=2), max_size=2),
        "status": st.fixed_dictionaries(
            {}, optional={"conditions": conditions(), "addresses": addresses, "rest": values}
        ),
    },
)


@given(documents, documents)
def test_merge_patch_applied_to_old_yields_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = merge_patch(old, new, KEYS)
    assert apply_patch(old, json.loads(json.dumps(patch)), API_KEYS) == new
    assert bool(patch) == (json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True))


@given(documents)
def test_merge_patch_equal_documents_is_empty(old: dict[str, Any]) -> None:
    assert merge_patch(old, old, KEYS) == {}


A = {"type": "A", "status": "True", "message": "m"}
B = {"type": "B", "status": "True"}


@pytest.mark.parametrize(
    ("old", "new", "patch"),
    [
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, {"a": {"c": None}}, id="removed"),
        pytest.param({"x": [1, 2]}, {"x": [1]}, {"x": [1]}, id="atomic list"),
        pytest.param(
            {"status": {"conditions": [A, B]}},
            {"status": {"conditions": [{**A, "status": "False"}, B]}},
            {
                "status": {
                    "$setElementOrder/conditions": [{"type": "A"}, {"type": "B"}],
                    "conditions": [{"type": "A", "status": "False"}],
                }
            },
            id="one item changed",
        ),
        pytest.param(
            {"status": {"conditions": [A, B]}},
            {"status": {"conditions": [{"type": "A", "status": "True"}]}},
            {
                "status": {
                    "$setElementOrder/conditions": [{"type": "A"}],
                    "conditions": [{"type": "A", "message": None}, {"$patch": "delete", "type": "B"}],
                }
            },
            id="item and field removed",
        ),
        pytest.param(
            {"status": {"addresses": [{"type": "I", "address": "1"}]}},
            {"status": {"addresses": [{"type": "I", "address": "1"}, {"type": "I", "address": "2"}]}},
            {
                "status": {
                    "addresses": [
                        {"type": "I", "address": "1"},
                        {"type": "I", "address": "2"},
                        {"$patch": "replace"},
                    ]
                }
            },
            id="addresses share types",
        ),
        pytest.param(
            {},
            {"status": {"addresses": [{"type": "I", "address": "1"}]}},
            {"status": {"addresses": [{"type": "I", "address": "1"}]}},
            id="first addresses",
        ),
    ],
)
def test_merge_patch_change_yields_expected_patch(
    old: dict[str, Any], new: dict[str, Any], patch: dict[str, Any]
) -> None:
    assert merge_patch(old, new, KEYS) == patch
