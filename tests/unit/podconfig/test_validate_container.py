from typing import Any

import pytest

from tests.unit.podconfig.validating import of_container, of_spec

C = "spec.containers[0]"


def env(**source: Any) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": source}]}


def mount(**fields: Any) -> dict[str, Any]:
    return {"volumeMounts": [{"name": "v", "mountPath": "/a", **fields}]}


V = f"{C}.env[0].valueFrom"
M = f"{C}.volumeMounts[0]"


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"image": ""}, [f"{C}.image"]),
        ({"image": " busybox"}, [f"{C}.image"]),
        ({"imagePullPolicy": "Often"}, [f"{C}.imagePullPolicy"]),
        ({"terminationMessagePolicy": "x"}, [f"{C}.terminationMessagePolicy"]),
        ({"ports": [{"containerPort": 0}]}, [f"{C}.ports[0].containerPort"]),
        ({"ports": [{"containerPort": 65536}]}, [f"{C}.ports[0].containerPort"]),
        ({"ports": [{"containerPort": 1, "hostPort": -1}]}, [f"{C}.ports[0].hostPort"]),
        ({"ports": [{"containerPort": 1, "protocol": "tcp"}]}, [f"{C}.ports[0].protocol"]),
        ({"ports": [{"containerPort": 1, "name": "a--b"}]}, [f"{C}.ports[0].name"]),
        ({"ports": [{"containerPort": 1, "name": "80"}]}, [f"{C}.ports[0].name"]),
        ({"ports": [{"containerPort": 1, "name": "x" * 16}]}, [f"{C}.ports[0].name"]),
        (
            {"ports": [{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}]},
            [f"{C}.ports[1].name"],
        ),
        (
            {"ports": [{"containerPort": 1, "hostPort": 5}, {"containerPort": 2, "hostPort": 5}]},
            [f"{C}.ports[1].hostPort"],
        ),
        ({"env": [{"name": ""}]}, [f"{C}.env[0].name"]),
        ({"env": [{"name": "a=b"}]}, [f"{C}.env[0].name"]),
        (env(), [V]),
        (env(fieldRef={"fieldPath": "metadata.name"}, secretKeyRef={"name": "s", "key": "k"}), [V]),
        (
            {"env": [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
            [V],
        ),
        (env(fieldRef={"fieldPath": "spec.containers"}), [f"{V}.fieldRef.fieldPath"]),
        (env(fieldRef={"fieldPath": "metadata.labels['a b']"}), [f"{V}.fieldRef.fieldPath"]),
        (env(fieldRef={"fieldPath": "metadata.name", "apiVersion": "v2"}), [f"{V}.fieldRef.apiVersion"]),
        (env(resourceFieldRef={"resource": "limits.gpu"}), [f"{V}.resourceFieldRef.resource"]),
        (
            env(resourceFieldRef={"resource": "limits.cpu", "divisor": "1Mi"}),
            [f"{V}.resourceFieldRef.divisor"],
        ),
        (
            env(resourceFieldRef={"resource": "limits.memory", "divisor": "x"}),
            [f"{V}.resourceFieldRef.divisor"],
        ),
        (env(configMapKeyRef={"name": "c", "key": "../x"}), [f"{V}.configMapKeyRef.key"]),
        (env(secretKeyRef={"key": "k"}), [f"{V}.secretKeyRef.name"]),
        (env(fileKeyRef={"volumeName": "h", "path": "x", "key": "k"}), [f"{V}.fileKeyRef.volumeName"]),
        (env(fileKeyRef={"volumeName": "v", "path": "../x", "key": "k"}), [f"{V}.fileKeyRef.path"]),
        ({"envFrom": [{"prefix": "x"}]}, [f"{C}.envFrom[0]"]),
        ({"envFrom": [{"secretRef": {}}]}, [f"{C}.envFrom[0].secretRef.name"]),
        ({"envFrom": [{"prefix": "=", "secretRef": {"name": "a"}}]}, [f"{C}.envFrom[0].prefix"]),
        (mount(name="none"), [f"{M}.name"]),
        (mount(mountPath=""), [f"{M}.mountPath"]),
        ({"volumeMounts": [{"name": "v", "mountPath": "/a"}] * 2}, [f"{C}.volumeMounts[1].mountPath"]),
        (mount(subPath="/a"), [f"{M}.subPath"]),
        (mount(subPath="a/../../b"), [f"{M}.subPath"]),
        (mount(subPathExpr="../$(A)"), [f"{M}.subPathExpr"]),
        (mount(subPath="a", subPathExpr="b"), [f"{M}.subPathExpr"]),
        (mount(mountPropagation="x"), [f"{M}.mountPropagation"]),
        (mount(mountPropagation="Bidirectional"), [f"{M}.mountPropagation"]),
        ({**mount(mountPropagation="Bidirectional"), "securityContext": {"privileged": True}}, []),
        (mount(recursiveReadOnly="Enabled"), [f"{M}.recursiveReadOnly"]),
        (mount(recursiveReadOnly="x"), [f"{M}.recursiveReadOnly"]),
        ({"volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]}, [f"{C}.volumeDevices[0].name"]),
        ({"restartPolicy": "x"}, [f"{C}.restartPolicy"]),
        (
            {"restartPolicyRules": [{"action": "Restart"}]},
            [f"{C}.restartPolicy", f"{C}.restartPolicyRules[0].exitCodes"],
        ),
        ({"livenessProbe": {}}, [f"{C}.livenessProbe"]),
        ({"livenessProbe": {"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}}, [f"{C}.livenessProbe"]),
        ({"livenessProbe": {"exec": {}}}, [f"{C}.livenessProbe.exec.command"]),
        ({"livenessProbe": {"tcpSocket": {"port": 0}}}, [f"{C}.livenessProbe.tcpSocket.port"]),
        ({"livenessProbe": {"tcpSocket": {"port": "A B"}}}, [f"{C}.livenessProbe.tcpSocket.port"]),
        ({"livenessProbe": {"grpc": {"port": 70000}}}, [f"{C}.livenessProbe.grpc.port"]),
        ({"livenessProbe": {"httpGet": {"port": 1, "scheme": "FTP"}}}, [f"{C}.livenessProbe.httpGet.scheme"]),
        (
            {"livenessProbe": {"httpGet": {"port": 1, "httpHeaders": [{"name": "a b"}]}}},
            [f"{C}.livenessProbe.httpGet.httpHeaders[0].name"],
        ),
        (
            {"livenessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": -1}},
            [f"{C}.livenessProbe.periodSeconds"],
        ),
        (
            {"livenessProbe": {"tcpSocket": {"port": 1}, "successThreshold": 2}},
            [f"{C}.livenessProbe.successThreshold"],
        ),
        (
            {"startupProbe": {"tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": 0}},
            [f"{C}.startupProbe.terminationGracePeriodSeconds"],
        ),
        (
            {"readinessProbe": {"tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": 1}},
            [f"{C}.readinessProbe.terminationGracePeriodSeconds"],
        ),
        ({"lifecycle": {"postStart": {}}}, [f"{C}.lifecycle.postStart"]),
        ({"lifecycle": {"preStop": {"sleep": {"seconds": 31}}}}, [f"{C}.lifecycle.preStop.sleep.seconds"]),
        ({"lifecycle": {"preStop": {"sleep": {"seconds": -1}}}}, [f"{C}.lifecycle.preStop.sleep.seconds"]),
        ({"lifecycle": {"stopSignal": "SIGTERM"}}, [f"{C}.lifecycle.stopSignal"]),
        ({"securityContext": {"runAsUser": -1}}, [f"{C}.securityContext.runAsUser"]),
        ({"securityContext": {"procMount": "x"}}, [f"{C}.securityContext.procMount"]),
        ({"securityContext": {"procMount": "Unmasked"}}, [f"{C}.securityContext.procMount"]),
        (
            {"securityContext": {"privileged": True, "allowPrivilegeEscalation": False}},
            [f"{C}.securityContext.allowPrivilegeEscalation"],
        ),
        (
            {
                "securityContext": {
                    "capabilities": {"add": ["CAP_SYS_ADMIN"]},
                    "allowPrivilegeEscalation": False,
                }
            },
            [f"{C}.securityContext.allowPrivilegeEscalation"],
        ),
        ({"resources": {"claims": [{"name": "x"}]}}, [f"{C}.resources.claims[0].name"]),
    ],
)
def test_validate_container_invalid_field_names_field(fields: dict[str, Any], paths: list[str]) -> None:
    assert of_container(**fields) == paths


R = f"{C}.resources"


@pytest.mark.parametrize(
    ("resources", "paths"),
    [
        ({"limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1G", "example.com/gpu": 2}}, []),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}, [f"{R}.requests[cpu]"]),
        ({"limits": {"cpu": "-1"}}, [f"{R}.limits[cpu]", f"{R}.requests[cpu]"]),
        ({"requests": {"gpu": "1"}, "limits": {"gpu": "1"}}, [f"{R}.limits[gpu]", f"{R}.requests[gpu]"]),
        ({"requests": {"example.com/gpu": "1"}}, [f"{R}.requests[example.com/gpu]"]),
        (
            {"limits": {"example.com/gpu": "1500m"}},
            [f"{R}.limits[example.com/gpu]", f"{R}.requests[example.com/gpu]"],
        ),
        ({"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi"}}, []),
        ({"limits": {"hugepages-2Mi": "4Mi"}}, [R]),
        (
            {"limits": {"hugepages-2Mi": "3Mi", "cpu": "1"}},
            [f"{R}.limits[hugepages-2Mi]", f"{R}.requests[hugepages-2Mi]"],
        ),
        (
            {"limits": {"hugepages-x": "3Mi", "cpu": "1"}},
            [f"{R}.limits[hugepages-x]", f"{R}.requests[hugepages-x]"],
        ),
    ],
)
def test_validate_container_invalid_resources_name_field(resources: dict[str, Any], paths: list[str]) -> None:
    assert of_container(resources=resources) == paths


def test_validate_pod_level_resources_below_container_resources_rejected() -> None:
    main = {
        "name": "main",
        "image": "x",
        "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "2Gi"}},
    }
    assert of_spec(containers=[main], resources={"requests": {"cpu": "2", "memory": "2Gi"}}) == []
    assert of_spec(containers=[main], resources={"requests": {"cpu": "1", "memory": "2Gi"}}) == [
        "spec.resources.requests[cpu]"
    ]
    assert of_spec(containers=[main], resources={"limits": {"memory": "1Gi"}}) == [
        "spec.resources.requests[memory]",
        "spec.containers[0].resources.limits[memory]",
    ]
    assert of_spec(resources={"limits": {"example.com/gpu": "1"}}) == [
        "spec.resources.limits[example.com/gpu]"
    ]
    assert of_spec(volumes=[{"name": "a", "emptyDir": {"sizeLimit": "-1"}}]) == [
        "spec.volumes[0].emptyDir.sizeLimit"
    ]


def test_validate_host_ports_conflict_between_containers_is_rejected() -> None:
    def container(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "image": "x", "ports": [{"containerPort": 80, "hostPort": 80, **more}]}

    assert of_spec(containers=[container("a"), container("b")]) == ["spec.containers[1].ports[0].hostPort"]
    assert of_spec(containers=[container("a"), container("b", protocol="UDP")]) == []
    assert of_spec(containers=[container("a"), container("b", hostIP="127.0.0.1")]) == []
    assert of_spec(containers=[container("a")], initContainers=[container("b"), container("c")]) == []
    assert of_spec(hostNetwork=True, containers=[container("a", hostPort=81)]) == [f"{C}.ports[0].hostPort"]


def test_validate_init_container_with_probe_or_lifecycle_is_rejected() -> None:
    probe = {"tcpSocket": {"port": 1}}
    fields = {
        "name": "i",
        "image": "x",
        "livenessProbe": probe,
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
    }
    assert of_spec(initContainers=[fields]) == [
        "spec.initContainers[0].lifecycle",
        "spec.initContainers[0].livenessProbe",
    ]
    assert of_spec(initContainers=[{**fields, "restartPolicy": "Always"}]) == []
