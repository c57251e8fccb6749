import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.apiserver.client import PODS
from pykubelet.apiserver.errors import Gone, InvalidResponse, ServerError
from pykubelet.apiserver.reflector import Store, Unreadable
from tests.support.watch_events import Heard, pod, status, watch_event

BAD = {"containers": "none"}


def listed(copy: Store[Any], *objects: Any) -> Any:
    return copy.replace([copy.read(json.dumps(obj).encode()) for obj in objects])


def names(objects: Any) -> list[str]:
    return [f"{o.metadata.name}@{o.metadata.resource_version}" for o in objects]


def test_store_replace_returns_only_differences() -> None:
    copy = Store(PODS)
    first = listed(copy, pod("a", 1), pod("b", 2), pod("c", 3))
    assert (names(first.changed), names(first.removed), first.listed) == (["a@1", "b@2", "c@3"], [], True)
    kept = copy.objects["default", "a"]
    second = listed(copy, pod("a", 1), pod("c", 7, uid="other"), pod("d", 8))
    assert names(second.changed) == ["c@7", "d@8"]
    assert names(second.removed) == ["c@3", "b@2"]
    assert copy.objects["default", "a"] is kept


def test_store_apply_watch_events_returns_delta_and_resource_version() -> None:
    copy = Store(PODS)
    listed(copy, pod("a", 1), pod("b", 2))
    applied = copy.apply(
        [
            watch_event("ADDED", pod("c", 10)),
            watch_event("MODIFIED", pod("a", 11)),
            watch_event("MODIFIED", pod("a", 12)),
            watch_event("DELETED", pod("b", 13)),
            watch_event("SOMETHING_NEW", {"x": 1}),
            watch_event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "20"}}),
        ]
    )
    assert names(applied.update.changed) == ["c@10", "a@12"]
    assert names(applied.update.removed) == ["b@13"]
    assert (applied.version, applied.error) == ("20", None)


def test_store_apply_name_reused_in_batch_reports_both_pods() -> None:
    copy = Store(PODS)
    listed(copy, pod("a", 1))
    applied = copy.apply([watch_event("DELETED", pod("a", 2)), watch_event("ADDED", pod("a", 3, uid="new"))])
    assert (names(applied.update.removed), names(applied.update.changed)) == (["a@2"], ["a@3"])
    applied = copy.apply([watch_event("ADDED", pod("x", 5)), watch_event("DELETED", pod("x", 6))])
    assert (applied.update.changed, applied.update.removed) == ((), ())


def test_store_apply_uid_changed_reports_old_object_removed() -> None:
    copy = Store(PODS)
    listed(copy, pod("a", 1))
    applied = copy.apply([watch_event("MODIFIED", pod("a", 9, uid="new"))])
    assert (names(applied.update.removed), names(applied.update.changed)) == (["a@1"], ["a@9"])


def test_store_apply_error_event_keeps_preceding_events() -> None:
    copy = Store(PODS)
    applied = copy.apply(
        [
            watch_event("ADDED", pod("a", 4)),
            watch_event("ERROR", status(410, "Expired")),
            watch_event("ADDED", pod("b", 5)),
        ]
    )
    assert (names(applied.update.changed), applied.version) == (["a@4"], "4")
    assert isinstance(applied.error, Gone)
    strange = copy.apply([watch_event("ERROR", {"no": "status"})])
    assert isinstance(strange.error, ServerError)


def test_store_unreadable_object_keeps_last_readable_version() -> None:
    copy = Store(PODS)
    listed(copy, pod("a", 1), pod("b", 1))
    applied = copy.apply([watch_event("MODIFIED", pod("a", 2, **BAD))])
    assert (applied.update.changed, applied.update.removed, applied.version) == ((), (), "2")
    assert copy.objects["default", "a"].metadata.resource_version == "1"
    assert "containers" in copy.unreadable["default", "a"]
    update = listed(copy, pod("a", 3, **BAD), pod("b", 1), pod("new", 4, **BAD))
    assert (update.changed, update.removed) == ((), ())
    assert set(copy.unreadable) == {("default", "a"), ("default", "new")}
    # Another object of that name is not the one we knew.
    update = listed(copy, pod("a", 5, uid="other", **BAD), pod("b", 1))
    assert names(update.removed) == ["a@1"]
    applied = copy.apply([watch_event("MODIFIED", pod("a", 6, uid="other"))])
    assert names(applied.update.changed) == ["a@6"]
    assert copy.unreadable == {}
    copy.apply([watch_event("MODIFIED", pod("a", 7, uid="other", **BAD))])
    assert names(copy.apply([watch_event("DELETED", pod("a", 8, uid="other", **BAD))]).update.removed) == [
        "a@6"
    ]
    assert copy.unreadable == {}


@pytest.mark.parametrize(
    "obj",
    [{}, {"metadata": None}, {"metadata": {"namespace": "x"}}, {"metadata": {"name": 3}}, [], "x", None],
)
def test_store_object_without_name_raises_invalid_response(obj: Any) -> None:
    copy = Store(PODS)
    with pytest.raises(InvalidResponse, match="cannot be told apart"):
        copy.read(json.dumps(obj).encode())
    applied = copy.apply([watch_event("ADDED", pod("a", 4)), watch_event("ADDED", obj)])
    assert isinstance(applied.error, InvalidResponse)
    assert names(applied.update.changed) == ["a@4"]


def test_store_read_missing_fields_get_defaults() -> None:
    found = Store(PODS).read(b'{"metadata": {"name": "a"}, "spec": {"containers": null}}')
    assert not isinstance(found, Unreadable)
    assert (found.uid, found.spec.containers) == ("", [])


NAMES = st.sampled_from("abc")
KINDS = st.sampled_from(["ADDED", "MODIFIED", "DELETED", "LIST"])
STEPS = st.lists(st.tuples(KINDS, st.sets(NAMES, max_size=3), st.integers(1, 3), st.booleans()), max_size=30)


@settings(max_examples=200)
@given(STEPS)
def test_store_any_sequence_deltas_reproduce_objects(steps: list[tuple[str, set[str], int, bool]]) -> None:
    """Whatever happens, the owner's picture made of updates alone is the copy itself."""
    copy, heard, version = Store(PODS), Heard(), 0
    for kind, chosen, uid, bad in steps:
        objects = []
        for name in sorted(chosen):
            version += 1
            objects.append(pod(name, version, uid=f"{name}{uid}", **(BAD if bad else {})))
        if kind == "LIST":
            update = listed(copy, *objects)
        else:
            update = copy.apply([watch_event(kind, obj) for obj in objects]).update
        heard.follow(update)
        assert heard.pods == {f"{ns}/{name}": obj for (ns, name), obj in copy.objects.items()}
        if kind == "LIST":
            assert copy.objects.keys() | copy.unreadable.keys() == {("default", name) for name in chosen}
