from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Pod
from pykubelet.podconfig.mux import PodChange, PodStore
from pykubelet.podconfig.static_pods import MIRROR_ANNOTATION


def make(uid: str, name: str = "web", *, mirror: bool = False, hostname: str = "") -> Pod:
    pod = Pod()
    pod.metadata.uid, pod.metadata.name, pod.metadata.namespace = uid, name, "default"
    pod.spec.hostname = hostname
    if mirror:
        pod.metadata.annotations[MIRROR_ANNOTATION] = "hash"
    return pod


def add(store: PodStore, pod: Pod) -> None:
    store.apply(PodChange("ADD", pod, "file"))


def remove(store: PodStore, pod: Pod) -> None:
    store.apply(PodChange("REMOVE", pod, "file"))


def test_pod_store_finds_by_uid_and_by_name() -> None:
    store = PodStore()
    add(store, make("a"))
    add(store, make("b", "other"))
    assert store.get("a") == make("a")
    assert store.by_name("default/other") == make("b", "other")
    assert [pod.uid for pod in store.pods()] == ["a", "b"]
    store.apply(PodChange("UPDATE", make("a", hostname="x"), "file"))
    store.apply(PodChange("DELETE", make("b", "other", hostname="x"), "file"))
    assert [pod.spec.hostname for pod in store.pods()] == ["x", "x"]
    remove(store, make("a"))
    remove(store, make("a"))
    assert store.get("a") is None
    assert store.by_name("default/web") is None


def test_pod_store_old_pod_removed_name_refers_to_new_pod() -> None:
    store = PodStore()
    add(store, make("old"))
    add(store, make("new"))
    remove(store, make("old"))
    assert store.by_name("default/web") == make("new")


def test_pod_store_mirror_pods_are_separate_and_resolved() -> None:
    store = PodStore()
    static, mirror = make("static"), make("mirror", mirror=True)
    add(store, mirror)
    assert store.pods() == []
    assert store.get("mirror") is None
    assert store.resolve("mirror") == "mirror"
    add(store, static)
    assert store.resolve("mirror") == "static"
    assert store.resolve("static") == "static"
    assert store.resolve("unknown") == "unknown"
    assert store.mirror_of(static) == mirror
    assert store.by_name("default/web") == static
    remove(store, static)
    assert store.mirrors() == [mirror]
    remove(store, mirror)
    assert store.mirrors() == []


steps = st.lists(
    st.tuples(st.sampled_from("+-"), st.sampled_from("abc"), st.sampled_from("xy"), st.booleans())
)


@given(steps)
def test_pod_store_any_sequence_indexes_are_consistent(many: list[tuple[str, str, str, bool]]) -> None:
    store = PodStore()
    model: dict[tuple[str, bool], Pod] = {}
    for what, uid, name, mirror in many:
        pod = make(uid, name, mirror=mirror)
        if what == "+":
            model[uid, mirror] = pod
            add(store, pod)
        else:
            model.pop((uid, mirror), None)
            remove(store, pod)
        wanted = [pod for (_, is_mirror), pod in model.items() if not is_mirror]
        assert {pod.uid: pod for pod in store.pods()} == {pod.uid: pod for pod in wanted}
        for name in "xy":
            found = store.by_name(f"default/{name}")
            assert (found in wanted) if found else not any(pod.metadata.name == name for pod in wanted)
