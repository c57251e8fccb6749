import json
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.podconfig.defaults import apply_defaults, container_total, default_pull_policy
from pykubelet.podconfig.static_pods import complete_static_pod
from tests.unit.podconfig.making import written

GOLDEN = Path(__file__).parents[2] / "data" / "pods" / "mirror-pod.json"


def defaulted(**spec: Any) -> dict[str, Any]:
    pod = written(**spec)
    apply_defaults(pod)
    result: dict[str, Any] = to_document(pod)["spec"]
    return result


def with_container(**fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = defaulted(containers=[{"name": "main", "image": "busybox:1.35", **fields}])
    container: dict[str, Any] = result["containers"][0]
    return container


def test_complete_static_pod_equals_upstream_mirror_pod() -> None:
    mirror = json.loads(GOLDEN.read_text())
    spec = mirror["spec"]
    # What the API server's admission adds when the mirror is made is not the agent's to know.
    del spec["priority"], spec["preemptionPolicy"]
    manifest = {
        "metadata": {"name": "static-web", "namespace": "kube-system", "labels": {"app": "static"}},
        "spec": {
            "priorityClassName": "system-node-critical",
            "containers": [
                {
                    "name": "web",
                    "image": "registry.local/busybox:1.35",
                    "command": ["sh", "-c", "sleep 3600"],
                    "resources": {"requests": {"cpu": "10m"}},
                }
            ],
        },
    }
    pod = complete_static_pod(
        from_document(Pod, manifest), source="file", origin="/m/web.yaml", node_name="vm", now=0
    )
    assert to_document(pod)["spec"] == spec
    assert pod.metadata.name == mirror["metadata"]["name"]
    assert pod.metadata.labels == mirror["metadata"]["labels"]
    ours = {*mirror["metadata"]["annotations"]} - {"kubernetes.io/config.mirror"}
    assert set(pod.metadata.annotations) == ours


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("busybox", "Always"),
        ("busybox:latest", "Always"),
        ("registry.local:5000/team/app", "Always"),
        ("registry.local:5000/team/app:latest", "Always"),
        ("busybox:latest@sha256:" + "0" * 64, "Always"),
        ("busybox:1.35", "IfNotPresent"),
        ("registry.local:5000/team/app:v1", "IfNotPresent"),
        ("busybox@sha256:" + "0" * 64, "IfNotPresent"),
        ("Not An Image", "IfNotPresent"),
        ("", "IfNotPresent"),
        ("0" * 64, "IfNotPresent"),
    ],
)
def test_default_pull_policy_follows_image_tag(image: str, policy: str) -> None:
    assert default_pull_policy(image) == policy


def test_apply_defaults_explicit_values_are_unchanged() -> None:
    spec = defaulted(
        restartPolicy="Never",
        dnsPolicy="None",
        terminationGracePeriodSeconds=0,
        schedulerName="mine",
        enableServiceLinks=False,
        containers=[
            {
                "name": "main",
                "image": "busybox",
                "imagePullPolicy": "Never",
                "terminationMessagePath": "/log",
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
    )
    assert spec["restartPolicy"] == "Never"
    assert spec["dnsPolicy"] == "None"
    assert spec["terminationGracePeriodSeconds"] == 0
    assert spec["schedulerName"] == "mine"
    assert spec["enableServiceLinks"] is False
    assert spec["containers"][0]["imagePullPolicy"] == "Never"
    assert spec["containers"][0]["terminationMessagePath"] == "/log"
    assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_apply_defaults_completes_probes_and_lifecycle_hooks() -> None:
    container = with_container(
        livenessProbe={"httpGet": {"port": 80}},
        readinessProbe={"grpc": {"port": 90}, "periodSeconds": 7},
        startupProbe={"httpGet": {"port": 80, "path": "/x", "scheme": "HTTPS"}, "failureThreshold": 30},
        lifecycle={"preStop": {"httpGet": {"port": 80}}},
    )
    seconds = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
    request = {"port": 80, "path": "/", "scheme": "HTTP"}
    assert container["livenessProbe"] == {"httpGet": request, **seconds}
    assert container["readinessProbe"] == {"grpc": {"port": 90, "service": ""}, **seconds, "periodSeconds": 7}
    assert container["startupProbe"]["httpGet"] == {"port": 80, "path": "/x", "scheme": "HTTPS"}
    assert container["startupProbe"]["failureThreshold"] == 30
    assert container["lifecycle"]["preStop"]["httpGet"] == request


def test_apply_defaults_completes_env_and_volumes() -> None:
    container = with_container(
        env=[
            {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "B", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}},
        ]
    )
    assert container["env"][0]["valueFrom"]["fieldRef"]["apiVersion"] == "v1"
    assert container["env"][1]["valueFrom"]["fileKeyRef"]["optional"] is False
    volumes = defaulted(
        volumes=[
            {"name": "a"},
            {"name": "b", "hostPath": {"path": "/x"}},
            {"name": "c", "configMap": {"name": "c"}},
        ]
    )["volumes"]
    assert volumes[0] == {"name": "a", "emptyDir": {}}
    assert volumes[1]["hostPath"] == {"path": "/x", "type": ""}
    assert volumes[2] == {"name": "c", "configMap": {"name": "c"}}


def test_apply_defaults_host_network_sets_host_ports() -> None:
    container = {
        "name": "main",
        "image": "x",
        "ports": [{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}],
    }
    ports = defaulted(hostNetwork=True, containers=[container])["containers"][0]["ports"]
    assert [port["hostPort"] for port in ports] == [80, 81]
    assert "hostPort" not in defaulted(containers=[container])["containers"][0]["ports"][0]


def test_apply_defaults_requests_from_limits_rounded_up() -> None:
    container = with_container(
        resources={"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "100500u"}}
    )
    assert container["resources"]["requests"] == {"cpu": "101m", "memory": "1Gi"}


def test_apply_defaults_service_account_and_service_account_name_are_equal() -> None:
    assert defaulted(serviceAccount="me")["serviceAccountName"] == "me"
    assert defaulted(serviceAccountName="me")["serviceAccount"] == "me"


SIDECAR = {"name": "side", "image": "x", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}
INIT = {"name": "init", "image": "x", "resources": {"requests": {"cpu": "5"}}}
MAIN = {"name": "main", "image": "x", "resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}


@pytest.mark.parametrize(
    ("init", "cpu"),
    [([], "2"), ([SIDECAR], "3"), ([INIT], "5"), ([SIDECAR, INIT], "6"), ([INIT, SIDECAR], "5")],
)
def test_container_total_includes_sidecars_and_largest_init_container(
    init: list[dict[str, Any]], cpu: str
) -> None:
    spec = written(containers=[MAIN], initContainers=init).spec
    assert to_document(container_total(spec, "requests")) == {"cpu": cpu, "memory": "1Gi"}


def test_apply_defaults_pod_level_requests_from_limits_and_containers() -> None:
    spec = defaulted(
        containers=[MAIN], resources={"limits": {"cpu": "4", "memory": "2Gi", "hugepages-2Mi": "4Mi"}}
    )
    assert spec["resources"]["requests"] == {"cpu": "2", "memory": "1Gi", "hugepages-2Mi": "4Mi"}
    pages = {**MAIN, "resources": {"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}}}
    spec = defaulted(containers=[pages], resources={"requests": {"cpu": "4"}})
    assert spec["resources"] == {
        "requests": {"cpu": "4", "hugepages-2Mi": "4Mi"},
        "limits": {"hugepages-2Mi": "4Mi"},
    }
    assert "resources" not in defaulted(containers=[MAIN])


def test_apply_defaults_twice_is_idempotent() -> None:
    pod = written(
        hostNetwork=True, containers=[{**MAIN, "ports": [{"containerPort": 80}]}], volumes=[{"name": "a"}]
    )
    apply_defaults(pod)
    once = to_document(pod)
    apply_defaults(pod)
    assert to_document(pod) == once
