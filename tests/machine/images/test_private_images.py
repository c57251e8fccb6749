"""A private image that one pod pulled, and the other pods of the node, through the running kubelet."""

import base64
import json
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.image_registry import PASSWORD, USER, Registry, running_registry
from tests.support.manifests import Document, container, pod
from tests.support.metrics_page import Page
from tests.support.node import Node, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with (
        tempfile.TemporaryDirectory(prefix="pyk-registry-") as directory,
        running_registry(Path(directory) / "guarded", protected=True) as started,
    ):
        yield started


@pytest.fixture
def image(registry: Registry) -> str:
    repository = f"team/app-{uuid.uuid4().hex[:8]}"
    registry.push_busybox(repository, "1")
    return f"{registry.host}/{repository}:1"


def put_secret(node: Node, registry: Registry, name: str, namespace: str = "default") -> None:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    content = json.dumps({"auths": {registry.host: {"auth": auth}}})
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": content},
    }
    node.write(json.dumps(document), f"{name}.secret.json")


def user(name: str, image: str, secret: str = "", policy: str = "IfNotPresent", **meta: Any) -> Document:
    secrets = {"imagePullSecrets": [{"name": secret}]} if secret else {}
    return pod(name, container(image=image, imagePullPolicy=policy), meta=meta, **secrets)


def wait_waiting(node: Node, name: str, *reasons: str) -> Document:
    """Wait until a pod's container waits for one of these reasons; return its state."""

    def waits(found: Document) -> bool:
        state = status_of(found, "main")["state"]
        return state.get("waiting", {}).get("reason") in reasons

    found = node.wait_pod(name, f"to wait with {reasons}", waits)
    state: Document = status_of(found, "main")["state"]["waiting"]
    return state


def pulls(node: Node) -> float:
    return Page(node.page("/metrics")).total("kubelet_runtime_operations_total", operation_type="pull_image")


def pulled_records(node: Node) -> list[Document]:
    return [json.loads(path.read_text()) for path in (node.root / "image_manager" / "pulled").iterdir()]


def accessible(image: str) -> str:
    return f'Container image "{image}" already present on machine and can be accessed by the pod'


def test_private_image_without_secret_is_rejected(
    runtime: RunningRuntime, registry: Registry, image: str
) -> None:
    with running(kubelet_node(runtime)) as node:
        put_secret(node, registry, "login")
        put_secret(node, registry, "copy", "other")
        node.start_pod(user("owner", image, "login"))

        never = f'Container image "{image}" is not present with pull policy of Never'
        for attempt in ("before", "after"):
            thief, quiet = f"thief-{attempt}", f"quiet-{attempt}"
            state = wait_waiting(node, node.write(user(thief, image)), "ErrImagePull", "ImagePullBackOff")
            assert "401 Unauthorized" in state["message"] or "no basic auth credentials" in state["message"]
            assert "Pulling" in {reason for reason, _, _ in node.events(f"{thief}-n1")}
            state = wait_waiting(node, node.write(user(quiet, image, policy="Never")), "ErrImageNeverPull")
            assert state["message"] == never
            assert node.wait_event(f"{quiet}-n1", "ErrImageNeverPull") == never
            assert not node.truth.containers(f"{thief}-n1")
            assert not node.truth.containers(f"{quiet}-n1")
            if attempt == "before":
                # A pod that was refused must not gain access because the kubelet forgets.
                node.kill()
                node.start()

        checked = Page(node.page("/metrics"))
        refused = [f"{name}-{attempt}" for name in ("thief", "quiet") for attempt in ("before", "after")]
        uids = {found["metadata"]["name"]: found["metadata"]["uid"] for found in node.pods()}
        node.remove(*refused)
        for name in refused:
            node.wait_gone(f"{name}-n1", uids[f"{name}-n1"])
        count = pulls(node)
        node.start_pod(user("again", image, "login", "Never"))
        node.start_pod(user("other", image, "copy", namespace="other"))
        for name in ("again-n1", "other-n1"):
            assert node.wait_event(name, "Pulled") == accessible(image)
        repository = image.rpartition(":")[0]
        known = [record["credentialMapping"].get(repository) for record in pulled_records(node)]
        [credentials] = [item for item in known if item is not None]
        secrets = [(item["namespace"], item["name"]) for item in credentials["kubernetesSecrets"]]
        assert secrets == [("default", "login"), ("other", "copy")]
        assert pulls(node) == count
        page = Page(node.page("/metrics"))
        checks = "kubelet_imagemanager_image_mustpull_checks_total"
        assert checked.total(checks, result="mustAuthenticate") >= 2
        assert page.total(checks, result="credentialRecordFound") >= 2
        assert page.value("kubelet_imagemanager_ondisk_pulledrecords") == len(pulled_records(node))
        assert page.value("kubelet_imagemanager_ondisk_pullintents") == 0
        assert PASSWORD not in node.log_text()
        node.clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"imagePullCredentialsVerificationPolicy": "NeverVerify"}, accessible),
        (
            {"featureGates": {"KubeletEnsureSecretPulledImages": False}},
            lambda image: f'Container image "{image}" already present on machine',
        ),
    ],
    ids=["NeverVerify", "gate off"],
)
def test_private_image_without_verification_runs_for_every_pod(
    runtime: RunningRuntime, registry: Registry, image: str, settings: Document, message: Any
) -> None:
    """Verify that both switches restore what every pod could do before images were verified."""
    with running(kubelet_node(runtime, **settings)) as node:
        put_secret(node, registry, "login")
        node.start_pod(user("owner", image, "login"))
        node.start_pod(user("thief", image))
        node.start_pod(user("quiet", image, policy="Never"))
        for name in ("thief-n1", "quiet-n1"):
            assert node.wait_event(name, "Pulled") == message(image)
        node.clear()
