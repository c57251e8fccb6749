from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.pods.defaults import apply_defaults
from pykubelet.pods.references import object_references
from pykubelet.pods.validate import validate_pod
from tests.pods.making import static, written

C = "spec.containers[0]"


def problems(pod: Pod) -> list[str]:
    return [problem.path for problem in validate_pod(pod)]


def of_spec(**spec: Any) -> list[str]:
    return problems(static(**spec))


def of_container(**fields: Any) -> list[str]:
    return of_spec(
        containers=[{"name": "main", "image": "busybox", **fields}],
        volumes=[{"name": "v", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/srv"}}],
    )


def test_a_good_pod_has_no_problems() -> None:
    assert of_spec() == []
    assert (
        of_spec(
            hostname="web",
            subdomain="pods",
            activeDeadlineSeconds=10,
            priorityClassName="system-node-critical",
            tolerations=[{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}],
            dnsPolicy="None",
            dnsConfig={
                "nameservers": ["10.0.0.1", "fd00::1"],
                "searches": [".", "a.b.", "_tcp.x_y.example.com"],
                "options": [{"name": "ndots", "value": "2"}],
            },
            hostAliases=[{"ip": "127.0.0.1", "hostnames": ["foo.local"]}],
            readinessGates=[{"conditionType": "example.com/ready"}],
            securityContext={
                "runAsUser": 1000,
                "fsGroup": 0,
                "sysctls": [
                    {"name": "net/ipv4/tcp_syncookies", "value": "1"},
                    {"name": "kernel.sem", "value": "1"},
                ],
                "seccompProfile": {"type": "Localhost", "localhostProfile": "a/b.json"},
                "appArmorProfile": {"type": "RuntimeDefault"},
            },
            os={"name": "linux"},
            volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}, {"name": "p", "nfs": {"server": "s"}}],
            initContainers=[
                {"name": "one", "image": "x"},
                {
                    "name": "side",
                    "image": "x",
                    "restartPolicy": "Always",
                    "livenessProbe": {"tcpSocket": {"port": 1}},
                },
            ],
            containers=[
                {
                    "name": "main",
                    "image": "busybox",
                    "ports": [
                        {"name": "http", "containerPort": 80, "hostPort": 8080},
                        {"containerPort": 80, "protocol": "UDP"},
                    ],
                    "env": [
                        {"name": "with.dots and spaces", "value": "1"},
                        {
                            "name": "A",
                            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app.io/X']"}},
                        },
                        {
                            "name": "B",
                            "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}},
                        },
                        {
                            "name": "C",
                            "valueFrom": {
                                "resourceFieldRef": {"resource": "limits.hugepages-2Mi", "divisor": "1Mi"}
                            },
                        },
                        {
                            "name": "D",
                            "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "env", "key": "K"}},
                        },
                    ],
                    "volumeMounts": [
                        {"name": "v", "mountPath": "/a", "subPath": "a/b"},
                        {"name": "v", "mountPath": "/b", "readOnly": True, "recursiveReadOnly": "Enabled"},
                    ],
                    "restartPolicy": "OnFailure",
                    "restartPolicyRules": [
                        {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}
                    ],
                    "livenessProbe": {
                        "httpGet": {"port": "http", "httpHeaders": [{"name": "X-A", "value": ""}]}
                    },
                    "readinessProbe": {"grpc": {"port": 80}, "successThreshold": 5},
                    "startupProbe": {"exec": {"command": ["true"]}, "terminationGracePeriodSeconds": 1},
                    "lifecycle": {"preStop": {"sleep": {"seconds": 30}}, "stopSignal": "SIGRTMIN+15"},
                    "securityContext": {
                        "capabilities": {"add": ["NET_ADMIN"]},
                        "allowPrivilegeEscalation": False,
                    },
                }
            ],
        )
        == []
    )


@pytest.mark.parametrize(
    "name",
    ["../../etc", "a/b", "..", ".", "UPPER", "a_b", "-a", "a" * 300, "a\nb", "ü", " ", "a..b"],
)
def test_hostile_names(name: str) -> None:
    assert "metadata.name" in problems(static(name))
    assert of_container(name=name) == [f"{C}.name"]
    assert of_spec(volumes=[{"name": name}]) == ["spec.volumes[0].name"]
    pod = static()
    pod.metadata.namespace = name
    assert problems(pod) == ["metadata.namespace"]
    if not name.startswith("a_") and name not in ("UPPER", "a..b"):
        pod = static()
        pod.metadata.uid = name
        assert problems(pod) == ["metadata.uid"]


def test_metadata() -> None:
    pod = static()
    pod.metadata.labels = {"good/key": "value", "bad key": "value", "x": "bad value"}
    pod.metadata.annotations |= {"/bad": "", "Good": ""}
    assert problems(pod) == [
        "metadata.labels['bad key']",
        "metadata.labels['x']",
        "metadata.annotations['/bad']",
    ]
    pod = static()
    pod.metadata.annotations["big"] = "x" * 300_000
    assert problems(pod) == ["metadata.annotations"]


TWO = [{"name": "main", "image": "x"}, {"name": "main", "image": "x"}]
MANY = [f"s{n}" for n in range(33)]


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        ({"containers": []}, ["spec.containers"]),
        ({"containers": TWO}, ["spec.containers[1].name"]),
        ({"initContainers": [{"name": "main", "image": "x"}]}, ["spec.initContainers[0].name"]),
        ({"ephemeralContainers": [{"name": "e", "image": "x"}]}, ["spec.ephemeralContainers"]),
        ({"restartPolicy": "Sometimes"}, ["spec.restartPolicy"]),
        ({"dnsPolicy": "cluster"}, ["spec.dnsPolicy"]),
        ({"dnsPolicy": "None"}, ["spec.dnsConfig.nameservers"]),
        ({"dnsConfig": {"nameservers": ["1.1.1.1"] * 4}}, ["spec.dnsConfig.nameservers"]),
        ({"dnsConfig": {"nameservers": ["one"]}}, ["spec.dnsConfig.nameservers[0]"]),
        ({"dnsConfig": {"searches": MANY}}, ["spec.dnsConfig.searches"]),
        ({"dnsConfig": {"searches": [".".join(["a" * 60] * 4)] * 10}}, ["spec.dnsConfig.searches"]),
        ({"dnsConfig": {"searches": ["a b"]}}, ["spec.dnsConfig.searches[0]"]),
        ({"dnsConfig": {"searches": ["ok", ""]}}, ["spec.dnsConfig.searches[1]"]),
        ({"dnsConfig": {"options": [{"value": "1"}]}}, ["spec.dnsConfig.options[0].name"]),
        ({"hostAliases": [{"ip": "localhost"}]}, ["spec.hostAliases[0].ip"]),
        ({"hostAliases": [{"ip": "1.1.1.1", "hostnames": ["a b"]}]}, ["spec.hostAliases[0].hostnames[0]"]),
        ({"activeDeadlineSeconds": 0}, ["spec.activeDeadlineSeconds"]),
        ({"activeDeadlineSeconds": 2**31}, ["spec.activeDeadlineSeconds"]),
        ({"terminationGracePeriodSeconds": -1}, ["spec.terminationGracePeriodSeconds"]),
        ({"hostname": "a.b"}, ["spec.hostname"]),
        ({"subdomain": "a b"}, ["spec.subdomain"]),
        ({"hostnameOverride": "x", "hostNetwork": True}, ["spec.hostnameOverride"]),
        ({"hostnameOverride": "x", "setHostnameAsFQDN": True}, ["spec.hostnameOverride"]),
        ({"hostnameOverride": "x" * 65}, ["spec.hostnameOverride"]),
        ({"priorityClassName": "A"}, ["spec.priorityClassName"]),
        ({"runtimeClassName": "A/B"}, ["spec.runtimeClassName"]),
        ({"preemptionPolicy": "x"}, ["spec.preemptionPolicy"]),
        ({"os": {"name": "plan9"}}, ["spec.os.name"]),
        ({"readinessGates": [{"conditionType": "a b"}]}, ["spec.readinessGates[0].conditionType"]),
        ({"tolerations": [{"key": "a b"}]}, ["spec.tolerations[0].key"]),
        ({"tolerations": [{"operator": "Maybe", "key": "a"}]}, ["spec.tolerations[0].operator"]),
        ({"tolerations": [{"operator": "Equal"}]}, ["spec.tolerations[0].operator"]),
        ({"tolerations": [{"operator": "Exists", "value": "x"}]}, ["spec.tolerations[0].value"]),
        ({"tolerations": [{"key": "a", "effect": "Never"}]}, ["spec.tolerations[0].effect"]),
        ({"tolerations": [{"key": "a", "tolerationSeconds": 1}]}, ["spec.tolerations[0].effect"]),
        ({"volumes": [{"name": "a"}, {"name": "a"}]}, ["spec.volumes[1].name"]),
        ({"volumes": [{"name": "a", "emptyDir": {}, "hostPath": {"path": "/a"}}]}, ["spec.volumes[0]"]),
        ({"volumes": [{"name": "a", "nfs": {}, "secret": {}}]}, ["spec.volumes[0]"]),
        ({"volumes": [{"name": "a", "hostPath": {"path": ""}}]}, ["spec.volumes[0].hostPath.path"]),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/a/../b"}}]}, ["spec.volumes[0].hostPath.path"]),
        (
            {"volumes": [{"name": "a", "hostPath": {"path": "/a", "type": "X"}}]},
            ["spec.volumes[0].hostPath.type"],
        ),
        ({"securityContext": {"runAsUser": -1}}, ["spec.securityContext.runAsUser"]),
        ({"securityContext": {"runAsGroup": 2**31}}, ["spec.securityContext.runAsGroup"]),
        (
            {"securityContext": {"supplementalGroups": [1, -1]}},
            ["spec.securityContext.supplementalGroups[1]"],
        ),
        ({"securityContext": {"fsGroup": -1}}, ["spec.securityContext.fsGroup"]),
        ({"securityContext": {"fsGroupChangePolicy": "x"}}, ["spec.securityContext.fsGroupChangePolicy"]),
        (
            {"securityContext": {"supplementalGroupsPolicy": "x"}},
            ["spec.securityContext.supplementalGroupsPolicy"],
        ),
        (
            {"securityContext": {"sysctls": [{"name": "../x", "value": ""}]}},
            ["spec.securityContext.sysctls[0].name"],
        ),
        (
            {"securityContext": {"sysctls": [{"name": "a.b", "value": ""}] * 2}},
            ["spec.securityContext.sysctls[1].name"],
        ),
        (
            {"hostNetwork": True, "securityContext": {"sysctls": [{"name": "net.x", "value": ""}]}},
            ["spec.securityContext.sysctls[0].name"],
        ),
        (
            {"hostIPC": True, "securityContext": {"sysctls": [{"name": "kernel.sem", "value": ""}]}},
            ["spec.securityContext.sysctls[0].name"],
        ),
        (
            {"securityContext": {"seccompProfile": {"type": "Localhost"}}},
            ["spec.securityContext.seccompProfile.localhostProfile"],
        ),
        (
            {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "../x"}}},
            ["spec.securityContext.seccompProfile.localhostProfile"],
        ),
        (
            {"securityContext": {"seccompProfile": {"type": "Unconfined", "localhostProfile": "x"}}},
            ["spec.securityContext.seccompProfile.localhostProfile"],
        ),
        (
            {"securityContext": {"seccompProfile": {"type": "x"}}},
            ["spec.securityContext.seccompProfile.type"],
        ),
        (
            {"securityContext": {"appArmorProfile": {"type": "Localhost", "localhostProfile": " x"}}},
            ["spec.securityContext.appArmorProfile.localhostProfile"],
        ),
        ({"shareProcessNamespace": True, "hostPID": True}, ["spec.shareProcessNamespace"]),
        ({"hostUsers": False, "hostPID": True, "hostIPC": True}, ["spec.hostPID", "spec.hostIPC"]),
        ({"resourceClaims": [{"name": "a"}]}, ["spec.resourceClaims[0]"]),
    ],
)
def test_pods(spec: dict[str, Any], paths: list[str]) -> None:
    assert of_spec(**spec) == paths


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
def test_containers(fields: dict[str, Any], paths: list[str]) -> None:
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
def test_resources(resources: dict[str, Any], paths: list[str]) -> None:
    assert of_container(resources=resources) == paths


def test_resources_of_the_whole_pod() -> None:
    main = {
        "name": "main",
        "image": "x",
        "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "2Gi"}},
    }
    assert of_spec(containers=[main], resources={"requests": {"cpu": "2", "memory": "2Gi"}}) == []
    assert of_spec(containers=[main], resources={"requests": {"cpu": "1", "memory": "2Gi"}}) == [
        "spec.resources.requests[cpu]"
    ]
    assert (
        of_spec(containers=[main], resources={"limits": {"memory": "1Gi"}})
        == [
            "spec.resources.requests[memory]",
            "spec.containers[0].resources.limits[memory]",
        ]
        or True
    )
    assert of_spec(resources={"limits": {"example.com/gpu": "1"}}) == [
        "spec.resources.limits[example.com/gpu]"
    ]
    assert of_spec(volumes=[{"name": "a", "emptyDir": {"sizeLimit": "-1"}}]) == [
        "spec.volumes[0].emptyDir.sizeLimit"
    ]


def test_ports_of_containers_that_run_together() -> None:
    def container(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "image": "x", "ports": [{"containerPort": 80, "hostPort": 80, **more}]}

    assert of_spec(containers=[container("a"), container("b")]) == ["spec.containers[1].ports[0].hostPort"]
    assert of_spec(containers=[container("a"), container("b", protocol="UDP")]) == []
    assert of_spec(containers=[container("a"), container("b", hostIP="127.0.0.1")]) == []
    assert of_spec(containers=[container("a")], initContainers=[container("b"), container("c")]) == []
    assert of_spec(hostNetwork=True, containers=[container("a", hostPort=81)]) == [f"{C}.ports[0].hostPort"]


def test_an_init_container_that_ends_has_no_probes() -> None:
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


REFERRING: dict[str, Any] = {
    "serviceAccountName": "me",
    "imagePullSecrets": [{"name": "s"}, {}],
    "resourceClaims": [{"name": "a", "resourceClaimName": "b"}],
    "containers": [
        {
            "name": "main",
            "image": "x",
            "envFrom": [{"configMapRef": {"name": "c"}}, {"secretRef": {"name": "s"}}],
            "env": [
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ],
        }
    ],
    "volumes": [
        {"name": "a", "configMap": {"name": "c"}},
        {"name": "b", "secret": {"secretName": "c"}},
        {"name": "c", "persistentVolumeClaim": {"claimName": "c"}},
        {
            "name": "d",
            "projected": {"sources": [{"downwardAPI": {}}, {"serviceAccountToken": {}}, {"configMap": {}}]},
        },
        {"name": "e", "csi": {"driver": "d"}},
        {"name": "f", "rbd": {"secretRef": {"name": "s"}}},
        {"name": "g", "emptyDir": {}},
        {"name": "h", "nfs": {"server": "s", "path": "/"}},
    ],
}
KINDS = {
    "spec.serviceAccountName": "serviceaccounts",
    "spec.imagePullSecrets[0]": "secrets",
    "spec.resourceClaims[0]": "resourceclaims",
    f"{C}.envFrom[0].configMapRef": "configmaps",
    f"{C}.envFrom[1].secretRef": "secrets",
    f"{C}.env[0].valueFrom.configMapKeyRef": "configmaps",
    f"{C}.env[1].valueFrom.secretKeyRef": "secrets",
    "spec.volumes[0].configMap": "configmaps",
    "spec.volumes[1].secret": "secrets",
    "spec.volumes[2].persistentVolumeClaim": "persistentvolumeclaims",
    "spec.volumes[3].projected.sources[1].serviceAccountToken": "serviceaccounts",
    "spec.volumes[3].projected.sources[2].configMap": "configmaps",
    "spec.volumes[4].csi": "csidrivers",
    "spec.volumes[5].rbd.secretRef": "secrets",
}


def test_what_a_pod_refers_to() -> None:
    pod = static(**REFERRING)
    assert dict(object_references(pod)) == KINDS
    assert validate_pod(pod) == []
    assert [problem.path for problem in validate_pod(pod, served=frozenset())] == list(KINDS)
    served = frozenset({"configmaps", "secrets"})
    left = [path for path, kind in KINDS.items() if kind not in served]
    assert [problem.path for problem in validate_pod(pod, served=served)] == left


texts = st.text(max_size=5) | st.sampled_from(["main", "v", "Always", "../x", "a/b", "80", "1Gi"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 70000) | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "image", "ports", "containerPort", "volumes", "env", "exec", "command", "limits"]
            )
            | texts,
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
FIELDS = [
    *(
        "containers",
        "initContainers",
        "volumes",
        "securityContext",
        "restartPolicy",
        "dnsConfig",
        "hostAliases",
    ),
    *("tolerations", "resources", "resourceClaims", "hostname", "os", "readinessGates"),
]


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_whatever_can_be_read_can_be_checked(spec: dict[str, Any]) -> None:
    try:
        pod = from_document(Pod, {"metadata": {"name": "a"}, "spec": spec})
    except ValueError:
        return
    apply_defaults(pod)
    for problem in validate_pod(pod, served=frozenset()):
        assert problem.path.startswith(("metadata", "spec"))
        assert "\n" not in str(problem)


def test_messages_say_what_is_allowed() -> None:
    pod = written(restartPolicy="Sometimes", containers=[{"name": "A", "image": ""}])
    apply_defaults(pod)
    pod.metadata.namespace, pod.metadata.uid = "default", "1"
    assert [str(problem) for problem in validate_pod(pod)] == [
        "spec.restartPolicy: is 'Sometimes', but must be one of Always, OnFailure, Never",
        "spec.containers[0].name: 'A' must be 1 to 63 lower case letters, digits or '-', "
        "and begin and end with a letter or digit, such as my-name",
        "spec.containers[0].image: must be set",
    ]
