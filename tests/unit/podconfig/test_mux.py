import copy
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import to_document
from pykubelet.api.pod import Container, Pod
from pykubelet.apiserver.client import PODS
from pykubelet.apiserver.reflector import Store, WatchEvent
from pykubelet.podconfig.mux import PodChange, PodMux
from pykubelet.podconfig.static_pods import MIRROR_ANNOTATION, SEEN_ANNOTATION, SOURCE_ANNOTATION, seen_time

SOURCES = ("file", "http", "api")


class Clock:
    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        self.now += 10**9
        return self.now


def make(
    uid: str = "u1",
    name: str = "",
    *,
    image: str = "",
    phase: str = "",
    label: str = "",
    note: str = "",
    deleting: bool = False,
) -> Pod:
    pod = Pod()
    pod.metadata.uid, pod.metadata.name, pod.metadata.namespace = uid, name or f"n-{uid}", "default"
    pod.spec.hostname = image
    pod.status.phase = phase
    if label:
        pod.metadata.labels["l"] = label
    if note:
        pod.metadata.annotations["note"] = note
    if deleting:
        pod.metadata.deletion_timestamp = datetime(2024, 1, 1, tzinfo=UTC)
    return pod


def told(changes: Iterable[PodChange]) -> list[tuple[str, str]]:
    return [(change.op, change.pod.uid) for change in changes]


@pytest.fixture
def mux() -> PodMux:
    return PodMux(Clock())


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ([], [make()], [("ADD", "u1")]),
        ([], [make(deleting=True)], [("ADD", "u1")]),
        ([make()], [make()], []),
        ([make()], [], [("REMOVE", "u1")]),
        ([make()], [make(image="x")], [("UPDATE", "u1")]),
        ([make()], [make(label="x")], [("UPDATE", "u1")]),
        ([make()], [make(note="x")], [("UPDATE", "u1")]),
        ([make(note="x")], [make()], [("UPDATE", "u1")]),
        ([make()], [make(deleting=True)], [("DELETE", "u1")]),
        ([make(deleting=True)], [make(deleting=True)], []),
        ([make(deleting=True)], [make(deleting=True, image="x")], [("DELETE", "u1")]),
        ([make(deleting=True)], [], [("REMOVE", "u1")]),
        ([make()], [make(phase="Failed")], [("RECONCILE", "u1")]),
        ([make()], [make(phase="Failed", image="x")], [("UPDATE", "u1")]),
        # A changed manifest is a new pod with the old one's name: first the old one goes.
        ([make("u1", "web")], [make("u2", "web")], [("REMOVE", "u1"), ("ADD", "u2")]),
        ([], [make("u1", "web"), make("u2", "web")], [("ADD", "u1")]),
        ([], [make("u1", "a"), make("u1", "b")], [("ADD", "u1")]),
        (
            [make("a"), make("b"), make("c"), make("d"), make("e")],
            [make("f"), make("e", phase="x"), make("d", deleting=True), make("c", image="x"), make("b")],
            [("REMOVE", "a"), ("ADD", "f"), ("UPDATE", "c"), ("DELETE", "d"), ("RECONCILE", "e")],
        ),
    ],
)
def test_set_changed_pods_returns_operations(
    mux: PodMux, before: list[Pod], after: list[Pod], changes: list[tuple[str, str]]
) -> None:
    mux.set("api", before)
    assert told(mux.set("api", after)) == changes


def test_add_ephemeral_container_kept_until_the_source_removes_the_pod(mux: PodMux) -> None:
    pod = make()
    mux.set("file", [pod])
    first, second = Container(name="d1", image="i"), Container(name="d2", image="i")
    assert told(mux.add_ephemeral_container("u1", first)) == [("UPDATE", "u1")]
    [change] = mux.add_ephemeral_container("u1", second)
    assert change.pod.spec.ephemeral_containers == [first, second]
    assert pod.spec.ephemeral_containers == []
    assert mux.set("file", [pod]) == []
    assert mux.set("file", [copy.deepcopy(pod)]) == []
    [change] = mux.set("file", [make(image="x")])
    assert change.pod.spec.ephemeral_containers == [first, second]
    assert told(mux.set("file", [])) == [("REMOVE", "u1")]
    [change] = mux.set("file", [pod])
    assert change.pod.spec.ephemeral_containers == []
    with pytest.raises(LookupError):
        mux.add_ephemeral_container("u2", first)


def test_set_only_kubelet_annotations_changed_returns_no_change(mux: PodMux) -> None:
    mux.set("file", [make()])
    again = make()
    again.metadata.annotations |= {SEEN_ANNOTATION: "later", SOURCE_ANNOTATION: "x", MIRROR_ANNOTATION: "y"}
    again.metadata.resource_version = "7"
    assert mux.set("file", [again]) == []


def test_set_sets_source_and_preserves_first_seen_annotation(mux: PodMux) -> None:
    [added] = mux.set("api", [make()])
    seen = added.pod.metadata.annotations[SEEN_ANNOTATION]
    assert seen == seen_time(10**18 + 10**9)
    assert added.pod.metadata.annotations[SOURCE_ANNOTATION] == "api"
    [updated] = mux.set("api", [make(image="x")])
    assert updated.pod.metadata.annotations[SEEN_ANNOTATION] == seen
    [reconciled] = mux.set("api", [make(image="x", phase="y")])
    assert reconciled.pod.metadata.annotations[SEEN_ANNOTATION] == seen
    assert reconciled.pod.status.phase == "y"


def test_set_seen_annotation_of_file_source_is_preserved(mux: PodMux) -> None:
    pod = make()
    pod.metadata.annotations[SEEN_ANNOTATION] = "then"
    assert mux.set("file", [pod])[0].pod.metadata.annotations[SEEN_ANNOTATION] == "then"
    assert mux.set("api", [make("u2")])[0].pod.metadata.annotations[SEEN_ANNOTATION] != "then"


def test_set_does_not_remove_pods_of_other_sources(mux: PodMux) -> None:
    mux.set("file", [make("a")])
    assert told(mux.set("api", [make("b")])) == [("ADD", "b")]
    assert told(mux.set("file", [])) == [("REMOVE", "a")]
    assert set(mux.pods()) == {"b"}


def test_set_new_pods_ordered_by_creation_timestamp(mux: PodMux) -> None:
    pods = [make(uid) for uid in ("young", "static", "old")]
    pods[0].metadata.creation_timestamp = datetime(2024, 1, 2, tzinfo=UTC)
    pods[2].metadata.creation_timestamp = datetime(2024, 1, 1, tzinfo=UTC)
    assert told(mux.set("api", pods)) == [("ADD", "static"), ("ADD", "old"), ("ADD", "young")]


def test_set_same_name_in_different_sources_is_accepted(mux: PodMux) -> None:
    # A mirror pod has its static pod's name.
    mux.set("file", [make("a", "web")])
    assert told(mux.set("api", [make("b", "web")])) == [("ADD", "b")]


def test_set_same_uid_in_two_sources_belongs_to_first_source(mux: PodMux) -> None:
    mux.set("file", [make("a", image="files")])
    assert mux.set("api", [make("a", image="apis")]) == []
    assert mux.set("api", [make("a", image="other")]) == []
    [change] = mux.set("file", [])
    assert (change.op, change.source, change.pod.spec.hostname) == ("UPDATE", "api", "other")
    assert told(mux.set("file", [make("a", image="again")])) == []
    assert mux.pods()["a"].spec.hostname == "other"
    assert told(mux.set("file", [])) == []
    assert told(mux.set("api", [])) == [("REMOVE", "a")]


def test_all_reported_only_after_every_expected_source(mux: PodMux) -> None:
    assert mux.all_reported
    mux.expect("file")
    mux.expect("api")
    assert not mux.all_reported
    mux.set("file", [])
    assert not mux.all_reported
    assert (mux.has_reported("file"), mux.has_reported("api")) == (True, False)
    mux.set("api", [make()])
    assert mux.all_reported


def test_offer_before_source_reports_does_not_count_as_reported(mux: PodMux) -> None:
    mux.expect("api")
    assert told(mux.offer("api", [make("a"), make("b")])) == [("ADD", "a"), ("ADD", "b")]
    # It is not the source's own word.
    assert (mux.all_reported, mux.has_reported("api")) == (False, False)
    assert told(mux.set("api", [make("b", image="x"), make("c")])) == [
        ("REMOVE", "a"),
        ("ADD", "c"),
        ("UPDATE", "b"),
    ]
    assert mux.all_reported
    # Once it has spoken, nobody speaks for it.
    assert mux.offer("api", [make("a")]) == []
    assert set(mux.pods()) == {"b", "c"}


pods = st.builds(
    make,
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from(["", "", "web"]),
    image=st.sampled_from(["", "x"]),
    phase=st.sampled_from(["", "Running"]),
    label=st.sampled_from(["", "l"]),
    note=st.sampled_from(["", "n"]),
    deleting=st.booleans(),
)
reports = st.lists(st.tuples(st.sampled_from(SOURCES), st.lists(pods, max_size=5)), max_size=12)


def test_set_duplicate_name_in_source_notifies_once_per_report() -> None:
    duplicates: list[tuple[str, str]] = []
    mux = PodMux(Clock(), lambda pod, source: duplicates.append((pod.uid, source)))
    first, second = make("a", "web"), make("b", "web")
    mux.set("file", [first, second])
    assert duplicates == [("b", "file")]
    assert list(mux.pods()) == ["a"]
    mux.set("url", [make("c", "web")])
    assert duplicates == [("b", "file")], "another source may have a pod of the same name"


def content(pod: Pod) -> object:
    """A pod without what the mux adds."""
    document = to_document(pod)
    for key in (SOURCE_ANNOTATION, SEEN_ANNOTATION):
        document["metadata"].get("annotations", {}).pop(key, None)
    if not document["metadata"].get("annotations"):
        document["metadata"].pop("annotations", None)
    return document


@given(reports)
def test_set_any_sequence_changes_reproduce_pods(reported: list[tuple[str, list[Pod]]]) -> None:
    mux = PodMux(Clock())
    model: dict[str, Pod] = {}
    last: dict[str, dict[str, Pod]] = {}
    for source, given_pods in reported:
        untouched = copy.deepcopy(given_pods)
        changes = mux.set(source, given_pods)
        assert given_pods == untouched
        last[source] = distinct(given_pods)
        for change in changes:
            uid = change.pod.uid
            if change.op == "REMOVE":
                assert change.source == source
                assert not any(uid in had for had in last.values())
                del model[uid]
                continue
            assert (uid in model) == (change.op != "ADD")
            assert change.pod.metadata.annotations[SOURCE_ANNOTATION] == change.source
            if change.op == "DELETE":
                assert change.pod.metadata.deletion_timestamp is not None
            if uid in model and change.source == model[uid].metadata.annotations[SOURCE_ANNOTATION]:
                assert content(model[uid]) != content(change.pod)
                seen = model[uid].metadata.annotations[SEEN_ANNOTATION]
                assert change.pod.metadata.annotations[SEEN_ANNOTATION] == seen
            model[uid] = change.pod
        assert model == mux.pods()
        assert model.keys() == {uid for had in last.values() for uid in had}
        for uid, pod in model.items():
            owner = pod.metadata.annotations[SOURCE_ANNOTATION]
            assert same_wish(pod, last[owner][uid])
        assert mux.set(source, given_pods) == []
        assert [mux.has_reported(name) for name in SOURCES] == [name in last for name in SOURCES]


def same_wish(one: Pod, other: Pod) -> bool:
    # A new name alone is no change: names never change under one uid.
    return (one.spec, one.metadata.labels, one.status, one.metadata.deletion_timestamp) == (
        other.spec,
        other.metadata.labels,
        other.status,
        other.metadata.deletion_timestamp,
    )


def distinct(given_pods: list[Pod]) -> dict[str, Pod]:
    kept: dict[str, Pod] = {}
    names: set[str] = set()
    for pod in given_pods:
        if pod.uid not in kept and pod.full_name not in names:
            kept[pod.uid] = pod
            names.add(pod.full_name)
    return kept


class TestUpdate:
    """Differences of a source against full sets, as the API server's watch produces them."""

    events = st.lists(
        st.tuples(
            st.sampled_from(["ADDED", "MODIFIED", "DELETED"]),
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["x", "y"]),
            st.sampled_from(["Pending", "Running"]),
        ),
        max_size=4,
    )
    steps = st.lists(st.one_of(events, st.lists(pods, max_size=3).map(tuple)), max_size=12)

    @staticmethod
    def batch(events: list[tuple[str, str, str, str, str]], version: int) -> list[WatchEvent]:
        return [
            WatchEvent(
                kind,
                msgspec.Raw(
                    msgspec.json.encode(
                        {
                            "metadata": {"name": name, "uid": uid, "resourceVersion": str(version)},
                            "spec": {"containers": [{"name": "main", "image": image}]},
                            "status": {"phase": phase},
                        }
                    )
                ),
            )
            for kind, name, uid, image, phase in events
        ]

    @given(st.booleans(), steps)
    def test_update_any_sequence_equals_set_of_full_set(
        self, listed: bool, steps: list[list[tuple[str, str, str, str, str]] | tuple[Pod, ...]]
    ) -> None:
        """Verify that differences lead to the same changes and pods as full sets, also with clashing uids."""
        known, by_update, by_set = Store(PODS), PodMux(lambda: 1), PodMux(lambda: 1)
        if listed:
            assert by_update.set("api", []) == by_set.set("api", []) == []
        for number, step in enumerate(steps):
            if isinstance(step, tuple):
                assert by_update.set("file", step) == by_set.set("file", step)
                continue
            update = known.apply(self.batch(step, number)).update
            everything = list(known.objects.values())
            changes = by_update.update("api", update.changed, update.removed, lambda: everything)  # noqa: B023
            assert sorted(told(changes)) == sorted(told(by_set.set("api", everything)))
            assert by_update.pods() == by_set.pods()
            assert by_update.has_reported("api")

    def test_update_of_known_source_does_not_read_full_set(self, mux: PodMux) -> None:
        """Verify that the cost of a difference does not depend on the number of pods."""

        def everything() -> list[Pod]:
            raise AssertionError("the full set was read")

        first, second = make("a"), make("b")
        mux.set("api", [first, second])
        changes = mux.update("api", [make("c"), make("b", image="x")], [first], everything)
        assert told(changes) == [("REMOVE", "a"), ("ADD", "c"), ("UPDATE", "b")]
        assert mux.update("api", [], [], everything) == []
        assert set(mux.pods()) == {"b", "c"}

    def test_update_pod_recreated_under_same_name_replaces_it(self, mux: PodMux) -> None:
        old, new = make("1", "web"), make("2", "web")
        mux.set("api", [old])
        assert told(mux.update("api", [new], [old], list)) == [("REMOVE", "1"), ("ADD", "2")]
        assert told(mux.update("api", [], [new], list)) == [("REMOVE", "2")]
