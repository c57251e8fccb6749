import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.agent.servers import _manifests
from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.podconfig.manifests import Contents
from pykubelet.podconfig.mux import PodMux
from pykubelet.podconfig.static_pods import (
    MIRROR_ANNOTATION,
    complete_static_pod,
    is_critical_pod,
    is_mirror_pod,
    is_static_pod,
    seen_time,
    source_of,
    static_contents,
    static_pods,
    without_duplicates,
)
from pykubelet.podconfig.static_sources import StaticSources, served_kinds, validation_options
from pykubelet.podconfig.validate import PodValidationOptions
from pykubelet.podconfig.wait_for import WAIT_FOR_ANNOTATION
from pykubelet.util.tasks import TaskScope
from tests.unit.podconfig.making import NOW, document, manifest, static, written


def completed(pod: Pod, **changed: Any) -> Pod:
    place: dict[str, Any] = {
        "source": "file",
        "origin": "/m/web.yaml",
        "node_name": "Node-1",
        "now": NOW,
        **changed,
    }
    return complete_static_pod(pod, **place)


def test_complete_static_pod_sets_name_uid_and_annotations() -> None:
    pod = completed(written())
    assert pod.full_name == "default/web-node-1"
    assert pod.spec.node_name == "Node-1"
    assert len(pod.uid) == 32
    assert int(pod.uid, 16)
    annotations = pod.metadata.annotations
    assert annotations["kubernetes.io/config.hash"] == pod.uid
    assert annotations["kubernetes.io/config.source"] == "file"
    assert annotations["kubernetes.io/config.seen"] == seen_time(NOW)
    assert pod.status.phase == "Pending"


def test_complete_static_pod_does_not_modify_argument() -> None:
    pod = written()
    before = to_document(pod)
    completed(pod)
    assert to_document(pod) == before


def shuffled(value: Any, draw: st.DataObject) -> Any:
    if isinstance(value, dict):
        keys = draw.draw(st.permutations(list(value)))
        return {key: shuffled(value[key], draw) for key in keys}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


@given(st.data())
def test_complete_static_pod_key_order_does_not_change_uid(data: st.DataObject) -> None:
    manifest = document(
        volumes=[{"name": "a", "configMap": {"name": "x", "optional": True}}], hostNetwork=True
    )
    manifest["metadata"]["labels"] = {"a": "1", "b": "2", "c": "3"}
    other = shuffled(manifest, data)
    assert completed(from_document(Pod, other)).uid == completed(from_document(Pod, manifest)).uid


def test_complete_static_pod_uid_depends_on_content_origin_and_node() -> None:
    first = completed(written()).uid
    assert completed(written(), now=NOW + 1).uid == first
    assert completed(from_document(Pod, {**document(), "status": {"phase": "Running"}})).uid == first
    said_twice = from_document(
        Pod, json.loads(json.dumps(document(restartPolicy="", hostPID=False, volumes=[])))
    )
    assert completed(said_twice).uid == first
    others = [
        completed(written(hostNetwork=True)),
        completed(written(), origin="/m/other.yaml"),
        completed(written(), node_name="node-2"),
        completed(written(), source="http"),
        completed(written("other")),
    ]
    assert len({first, *(pod.uid for pod in others)}) == 6


def test_complete_static_pod_uid_is_stable_across_versions() -> None:
    """A new version of the agent must not restart every static pod: this value is for ever."""
    manifest = document(volumes=[{"name": "a", "emptyDir": {"sizeLimit": "1Gi"}}], hostNetwork=True)
    manifest["metadata"]["labels"] = {"b": "2", "a": "1"}
    manifest["metadata"]["creationTimestamp"] = "2024-01-01T00:00:00Z"
    assert completed(from_document(Pod, manifest)).uid == "2d2331865e353f03aba2c027f18473c3"


def test_complete_static_pod_explicit_uid_is_preserved() -> None:
    pod = written()
    pod.metadata.uid = "mine"
    assert completed(pod).uid == "mine"
    assert completed(pod).metadata.annotations["kubernetes.io/config.hash"] == "mine"


def test_complete_static_pod_status_is_reset_to_pending() -> None:
    status = {"phase": "Failed", "qosClass": "Guaranteed", "podIP": "10.0.0.1"}
    pod = completed(from_document(Pod, {**document(), "status": status}))
    assert to_document(pod.status) == {"phase": "Pending"}


def test_complete_static_pod_file_source_tolerates_no_execute() -> None:
    exists = {"operator": "Exists", "effect": "NoExecute"}
    assert to_document(completed(written()).spec.tolerations) == [exists]
    # One that gives up after a while is replaced by one that does not.
    pod = completed(
        written(tolerations=[{**exists, "tolerationSeconds": 5}, {"key": "a", "operator": "Exists"}])
    )
    assert to_document(pod.spec.tolerations) == [{"key": "a", "operator": "Exists"}, exists]
    assert completed(written(), source="http").spec.tolerations == []


def test_pod_source_predicates_follow_annotations_and_priority() -> None:
    pod = static()
    assert (source_of(pod), is_static_pod(pod), is_mirror_pod(pod), is_critical_pod(pod)) == (
        "file",
        True,
        False,
        True,
    )
    pod = written()
    assert (source_of(pod), is_static_pod(pod), is_mirror_pod(pod), is_critical_pod(pod)) == (
        "",
        False,
        False,
        False,
    )
    pod.metadata.annotations["kubernetes.io/config.source"] = "api"
    assert (source_of(pod), is_static_pod(pod), is_critical_pod(pod)) == ("api", False, False)
    pod.spec.priority = 2_000_000_000
    assert is_critical_pod(pod)
    pod.spec.priority = 1_999_999_999
    assert not is_critical_pod(pod)
    pod.metadata.annotations[MIRROR_ANNOTATION] = "hash"
    assert is_mirror_pod(pod)
    assert is_critical_pod(pod)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("UTC", "2023-11-14T22:13:20.123456789Z"),
        ("Asia/Kolkata", "2023-11-15T03:43:20.123456789+05:30"),
        ("America/St_Johns", "2023-11-14T18:43:20.123456789-03:30"),
    ],
)
def test_seen_time_is_local_with_nanoseconds(zone: pytest.MonkeyPatch, name: str, text: str) -> None:
    zone.setenv("TZ", name)
    time.tzset()
    assert seen_time(NOW) == text
    assert seen_time(1_700_000_000_000_000_000)[19:29] == ".000000000"


def load(text: str) -> list[Pod]:
    return static_pods(text.encode(), source="file", origin="/m/a.yaml", node_name="node-1", now=NOW)


def test_static_pods_several_documents_return_all_pods() -> None:
    assert [pod.full_name for pod in load(manifest("a") + "---\n" + manifest("b"))] == [
        "default/a-node-1",
        "default/b-node-1",
    ]


def test_static_pods_all_problems_of_all_pods_are_reported() -> None:
    bad = document("b", restartPolicy="x")
    del bad["spec"]["containers"][0]["image"]
    nameless = document()
    del nameless["metadata"]["name"]
    with pytest.raises(ConfigError) as err:
        load(json.dumps({"apiVersion": "v1", "kind": "PodList", "items": [document("a"), bad, nameless]}))
    assert [str(problem).partition(", but")[0] for problem in err.value.problems] == [
        "/m/a.yaml: pod 'b': spec.restartPolicy: is 'x'",
        "/m/a.yaml: pod 'b': spec.containers[0].image: must be set",
        "/m/a.yaml: metadata.name: must be set",
    ]


def test_static_pods_api_object_reference_raises_config_error() -> None:
    text = manifest(volumes=[{"name": "a", "configMap": {"name": "c"}}])
    with pytest.raises(ConfigError, match="configmaps"):
        load(text)
    served = frozenset({"configmaps"})
    assert static_pods(text.encode(), source="file", origin="/", node_name="n", now=NOW, served=served)


@pytest.mark.parametrize("gate", [True, False])
async def test_static_sources_api_references_only_without_gate(tmp_path: Path, gate: bool) -> None:
    gates = FeatureGates().with_overrides({"PreventStaticPodAPIReferences": gate})
    config_map, token = {"name": "a", "configMap": {"name": "c"}}, {"serviceAccountToken": {"path": "t"}}
    bundle = {"clusterTrustBundle": {"name": "roots", "path": "ca.pem"}}
    put = (tmp_path / "a.yaml").write_text
    found: list[tuple[int, str]] = []

    def emit(name: str, pods: Sequence[Pod], problems: Sequence[Problem]) -> None:
        found.append((len(pods), " ".join(map(str, problems))))

    sources = StaticSources(
        KubeletConfiguration(static_pod_path=str(tmp_path)),
        "node-1",
        PodMux(lambda: 0),
        emit,
        objects=None,
        served=served_kinds(gates, standalone=False),
    )
    volumes = [config_map, {"name": "p", "projected": {"sources": [token]}}]
    put(manifest(volumes=volumes))
    async with asyncio.timeout(20), TaskScope() as scope:
        sources.start(scope)
        while not found:
            await asyncio.sleep(0.01)
        assert found[-1][0] == (0 if gate else 1)
        put(manifest(volumes=[{"name": "p", "projected": {"sources": [bundle]}}]))
        while "clustertrustbundles" not in found[-1][1]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("gate", [True, False])
async def test_static_sources_validation_follows_gates(tmp_path: Path, gate: bool) -> None:
    names = "StrictIPCIDRValidation", "PodDeletionCost", "MatchLabelKeysInPodTopologySpreadSelectorMerge"
    gates = FeatureGates().with_overrides(dict.fromkeys(names, gate))
    expected = PodValidationOptions(strict_ips=gate, deletion_cost=gate, merged_label_keys=gate)
    assert validation_options(gates) == expected
    assert validation_options(FeatureGates()) == PodValidationOptions()
    text = manifest(dnsConfig={"nameservers": ["010.0.0.1"]})
    (tmp_path / "a.yaml").write_text(text)
    found: list[int] = []

    def emit(name: str, pods: Sequence[Pod], problems: Sequence[Problem]) -> None:
        found.append(len(pods))

    sources = StaticSources(
        KubeletConfiguration(static_pod_path=str(tmp_path), static_pod_url="http://localhost/pods"),
        "node-1",
        PodMux(lambda: 0),
        emit,
        objects=None,
        options=validation_options(gates),
    )
    file, url = sources._file, sources._url
    assert file is not None
    assert url is not None
    async with asyncio.timeout(20), TaskScope() as scope:
        scope.start(file.run(), name="source-file")
        while not found:
            await asyncio.sleep(0.01)
    assert found == [0 if gate else 1]
    with pytest.raises(ConfigError, match="leading 0s") if gate else nullcontext():
        url._load(text.encode())


@pytest.mark.parametrize("gate", [True, False])
def test_manifest_directory_of_server_validation_follows_gates(tmp_path: Path, gate: bool) -> None:
    gates = FeatureGates().with_overrides({"StrictIPCIDRValidation": gate})
    settings = SimpleNamespace(
        config=KubeletConfiguration(static_pod_path=str(tmp_path)), gates=gates, node_name="n"
    )
    directory = _manifests(SimpleNamespace(settings=settings, cluster=None))  # type: ignore[arg-type]
    assert directory is not None
    assert directory._options == validation_options(gates)
    text = manifest(hostAliases=[{"ip": "::ffff:1.2.3.4"}]).encode()
    with pytest.raises(ConfigError, match="IPv4-mapped") if gate else nullcontext():
        directory._parse(tmp_path / "a.yaml", text)


def test_static_contents_cluster_node_without_gate_has_no_objects_and_workloads_of_its_own() -> None:
    """Verify that kinds of the API server do not make the node one whose manifests contain the objects."""
    gates = FeatureGates().with_overrides({"PreventStaticPodAPIReferences": False})
    served = served_kinds(gates, standalone=False)

    def read(*documents: dict[str, Any]) -> Contents:
        data = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}).encode()
        return static_contents(data, source="file", origin="/m", node_name="n", now=NOW, served=served)

    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"key": "1"}}
    waiting = document("web")
    waiting["metadata"]["annotations"] = {WAIT_FOR_ANNOTATION: "web"}
    contents = read(config_map, waiting)
    assert (len(contents.pods), contents.objects, contents.unused) == (1, [], ["ConfigMap"])
    with pytest.raises(ConfigError):
        read({**document(), "apiVersion": "apps/v1", "kind": "Deployment"})


def test_served_kinds_standalone_node_has_no_api_objects() -> None:
    gates = FeatureGates().with_overrides({"PreventStaticPodAPIReferences": False})
    assert served_kinds(gates, standalone=True) == frozenset()


def test_without_duplicates_first_pod_wins() -> None:
    one, two, three = static("a"), static("a", hostNetwork=True), static("b")
    three.metadata.uid = one.uid
    kept, problems = without_duplicates([("one", one), ("two", two), ("three", three)])
    assert kept == [one]
    assert [problem.path for problem in problems] == ["two", "three"]
    assert all("one" in problem.message for problem in problems)
