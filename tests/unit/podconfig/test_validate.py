from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.objects.references import object_references
from pykubelet.podconfig.defaults import apply_defaults
from pykubelet.podconfig.validate import PodValidationOptions, validate_pod
from tests.unit.podconfig.making import static, written
from tests.unit.podconfig.validating import of_container, of_spec, problems

C = "spec.containers[0]"


def test_validate_pod_valid_pod_returns_no_problems() -> None:
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


GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("given-*.yaml")), ids=lambda file: file.name)
def test_validate_pod_golden_pods_return_no_problems(file: Path) -> None:
    documents = [one for one in yaml.safe_load_all(file.read_text()) if one["kind"] == "Pod"]
    assert documents
    for one in documents:
        pod = from_document(Pod, one)
        pod.metadata.uid, pod.metadata.namespace = "u", "default"
        apply_defaults(pod)
        assert validate_pod(pod) == []


@pytest.mark.parametrize(
    "name",
    ["../../etc", "a/b", "..", ".", "UPPER", "a_b", "-a", "a" * 300, "a\nb", "ü", " ", "a..b"],
)
def test_validate_pod_hostile_name_is_rejected(name: str) -> None:
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


def test_validate_pod_invalid_labels_and_annotations_are_rejected() -> None:
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


@pytest.mark.parametrize(
    ("cost", "is_good"),
    [
        *((cost, True) for cost in ("0", "10", "-5", "-008", "2147483647", "-2147483648")),
        *((cost, False) for cost in ("", "+10", "008", "1.5", "ten", "2147483648", "-2147483649", "1 ", "-")),
    ],
)
def test_validate_pod_deletion_cost_is_integer_unless_gate_is_off(cost: str, is_good: bool) -> None:
    pod, name = static(), "controller.kubernetes.io/pod-deletion-cost"
    pod.metadata.annotations[name] = cost
    assert problems(pod) == ([] if is_good else [f"metadata.annotations['{name}']"])
    assert validate_pod(pod, options=PodValidationOptions(deletion_cost=False)) == []


@pytest.mark.parametrize(
    ("ip", "is_good"),
    [
        *((ip, True) for ip in ("10.0.0.1", "0.0.0.0", "FD00::1", "fd00:0:0::01", "64:ff9b::1.2.3.4")),
        *((ip, False) for ip in ("010.0.0.1", "1.2.3.04", "::ffff:1.2.3.4", "::FFFF:a01:1")),
    ],
)
def test_validate_pod_ambiguous_ips_rejected_unless_gate_is_off(ip: str, is_good: bool) -> None:
    pod = static(dnsConfig={"nameservers": [ip]}, hostAliases=[{"ip": ip}])
    paths = ["spec.hostAliases[0].ip", "spec.dnsConfig.nameservers[0]"]
    assert problems(pod) == ([] if is_good else paths)
    assert validate_pod(pod, options=PodValidationOptions(strict_ips=False)) == []


SPREAD = {
    "maxSkew": 1,
    "topologyKey": "zone",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app": "web"}},
}


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"minDomains": 2, "nodeAffinityPolicy": "Honor", "nodeTaintsPolicy": "Ignore"}, []),
        ({"matchLabelKeys": ["pod-template-hash"]}, []),
        ({"labelSelector": None}, []),
        ({"maxSkew": 0}, ["maxSkew"]),
        ({"topologyKey": ""}, ["topologyKey"]),
        ({"whenUnsatisfiable": "Never"}, ["whenUnsatisfiable"]),
        ({"minDomains": 0}, ["minDomains"]),
        ({"minDomains": 2, "whenUnsatisfiable": "ScheduleAnyway"}, ["minDomains"]),
        ({"nodeAffinityPolicy": "Never"}, ["nodeAffinityPolicy"]),
        ({"nodeTaintsPolicy": ""}, ["nodeTaintsPolicy"]),
        ({"matchLabelKeys": ["a"], "labelSelector": None}, ["matchLabelKeys"]),
        ({"matchLabelKeys": ["a b"]}, ["matchLabelKeys[0]"]),
        ({"labelSelector": {"matchLabels": {"a": "b c"}}}, ["labelSelector.matchLabels['a']"]),
        *(
            (
                {
                    "labelSelector": {
                        "matchExpressions": [{"key": key, "operator": operator, "values": values}]
                    }
                },
                [f"labelSelector.matchExpressions[0].{field}"] if field else [],
            )
            for key, operator, values, field in (
                ("a", "In", ["b"], ""),
                ("a", "Exists", [], ""),
                ("a b", "Exists", [], "key"),
                ("a", "Is", ["b"], "operator"),
                ("a", "NotIn", [], "values"),
                ("a", "DoesNotExist", ["b"], "values"),
                ("a", "In", ["b c"], "values[0]"),
            )
        ),
    ],
)
def test_validate_pod_topology_spread_constraint_names_field(
    changes: dict[str, Any], paths: list[str]
) -> None:
    spread = {name: value for name, value in {**SPREAD, **changes}.items() if value is not None}
    prefix = "spec.topologySpreadConstraints[0]."
    assert of_spec(topologySpreadConstraints=[spread]) == [prefix + path for path in paths]


def test_validate_pod_equal_topology_spread_constraints_are_rejected() -> None:
    other = {**SPREAD, "whenUnsatisfiable": "ScheduleAnyway"}
    assert of_spec(topologySpreadConstraints=[SPREAD, other]) == []
    path = "spec.topologySpreadConstraints[2].{topologyKey, whenUnsatisfiable}"
    assert of_spec(topologySpreadConstraints=[SPREAD, other, SPREAD]) == [path]


@pytest.mark.parametrize("is_merged", [True, False])
def test_validate_pod_match_label_key_in_selector_follows_gate(is_merged: bool) -> None:
    options = PodValidationOptions(merged_label_keys=is_merged)
    requirement = {"key": "app", "operator": "In", "values": ["web"]}
    path = "spec.topologySpreadConstraints[0].matchLabelKeys[0]"
    for expressions, is_good in (([], is_merged), ([requirement], False)):
        selector = {"matchLabels": {"app": "web"}, "matchExpressions": expressions}
        pod = static(
            topologySpreadConstraints=[{**SPREAD, "labelSelector": selector, "matchLabelKeys": ["app"]}]
        )
        found = [problem.path for problem in validate_pod(pod, options=options)]
        assert found == ([] if is_good else [path])


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
def test_validate_pod_invalid_spec_names_field(spec: dict[str, Any], paths: list[str]) -> None:
    assert of_spec(**spec) == paths


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


def test_validate_pod_unserved_object_references_are_rejected() -> None:
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
def test_validate_pod_any_decodable_spec_does_not_raise(spec: dict[str, Any]) -> None:
    try:
        pod = from_document(Pod, {"metadata": {"name": "a"}, "spec": spec})
    except ValueError:
        return
    apply_defaults(pod)
    for problem in validate_pod(pod, served=frozenset()):
        assert problem.path.startswith(("metadata", "spec"))
        assert "\n" not in str(problem)


def test_validate_pod_messages_name_allowed_values() -> None:
    pod = written(restartPolicy="Sometimes", containers=[{"name": "A", "image": ""}])
    apply_defaults(pod)
    pod.metadata.namespace, pod.metadata.uid = "default", "1"
    assert [str(problem) for problem in validate_pod(pod)] == [
        "spec.restartPolicy: is 'Sometimes', but must be one of Always, OnFailure, Never",
        "spec.containers[0].name: 'A' must be 1 to 63 lower case letters, digits or '-', "
        "and begin and end with a letter or digit, such as my-name",
        "spec.containers[0].image: must be set",
    ]
