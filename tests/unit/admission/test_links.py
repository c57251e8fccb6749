"""Each link's refusals, by tables; the words are those that users and controllers match on."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pykubelet.admission.handler import AdmitRejection
from pykubelet.admission.node_support import (
    AppArmor,
    DeclaredFeatures,
    OperatingSystem,
    PodLevelResources,
    SupplementalGroups,
    Sysctls,
    apparmor_is_enabled,
    safe_sysctls,
)
from pykubelet.api.node import NodeFeatures
from tests.support.admission import attempt, node, pod, surroundings


@pytest.mark.parametrize(
    ("names", "allowed", "spec", "problem"),
    [
        ([], [], {}, None),
        (["kernel.shm_rmid_forced", "net.ipv4.tcp_rmem"], [], {}, None),
        (["net/ipv4/tcp_syncookies"], [], {}, None),
        (["kernel.msgmax"], [], {}, '"kernel.msgmax" not allowlisted'),
        (["kernel/msgmax"], [], {}, '"kernel.msgmax" not allowlisted'),
        (["kernel.msgmax"], ["kernel.msg*"], {}, None),
        (["kernel.shm_rmid_forced", "net.core.somaxconn"], ["net.core.somaxconn"], {}, None),
        (["net.core.somaxconn"], ["net/core/*"], {}, None),
        (["net.core.somaxconn"], ["net.core.somax"], {}, '"net.core.somaxconn" not allowlisted'),
        (
            ["kernel.msgmax"],
            ["kernel.msg*"],
            {"hostIPC": True},
            '"kernel.msgmax" not allowed with host IPC enabled',
        ),
        (["kernel.msgmax"], ["kernel.msg*"], {"hostNetwork": True}, None),
        (
            ["net.ipv4.tcp_syncookies"],
            [],
            {"hostNetwork": True},
            '"net.ipv4.tcp_syncookies" not allowed with host Net enabled',
        ),
        (["net.ipv4.tcp_syncookies"], [], {"hostIPC": True}, None),
        # The first one is told.
        (["a.b", "c.d"], [], {}, '"a.b" not allowlisted'),
    ],
)
def test_sysctls_handler_forbidden_sysctl_rejected(
    names: list[str], allowed: list[str], spec: dict[str, Any], problem: str | None
) -> None:
    link = Sysctls(surroundings(allowed_sysctls=allowed))
    wishes = [{"name": name, "value": "1"} for name in names]
    refusal = link.admit(attempt(pod(securityContext={"sysctls": wishes}, **spec)))
    assert refusal == (AdmitRejection("SysctlForbidden", f"forbidden sysctl: {problem}") if problem else None)


@pytest.mark.parametrize(
    ("kernel", "count", "last"),
    [
        ("", 5, "net.ipv4.ip_unprivileged_port_start"),
        ("odd", 5, "net.ipv4.ip_unprivileged_port_start"),
        ("3.10.0-957.el7.x86_64", 5, "net.ipv4.ip_unprivileged_port_start"),
        ("3.18.0-957.27.2.el7.x86_64", 6, "net.ipv4.ip_local_reserved_ports"),
        ("4.5", 9, "net.ipv4.tcp_keepalive_probes"),
        ("4.9.0", 10, "net.ipv4.tcp_keepalive_probes"),
        ("5.15.0-75-generic", 12, "net.ipv4.tcp_wmem"),
        ("10.0", 12, "net.ipv4.tcp_wmem"),
    ],
)
def test_safe_sysctls_by_kernel_version(kernel: str, count: int, last: str) -> None:
    safe = list(safe_sysctls(kernel))
    assert (len(safe), safe[-1]) == (count, last)


@pytest.mark.parametrize(
    ("labels", "os", "reason"),
    [
        ({}, None, None),
        ({"kubernetes.io/os": "linux"}, "linux", None),
        ({"kubernetes.io/os": "windows"}, None, "PodOSSelectorNodeLabelDoesNotMatch"),
        ({"kubernetes.io/os": ""}, None, "PodOSSelectorNodeLabelDoesNotMatch"),
        ({"kubernetes.io/os": "windows"}, "windows", "PodOSSelectorNodeLabelDoesNotMatch"),
        ({}, "windows", "PodOSNotSupported"),
    ],
)
def test_operating_system_handler_other_os_rejected(
    labels: dict[str, str], os: str | None, reason: str | None
) -> None:
    asked = pod(meta={"labels": labels}, os={"name": os} if os else None)
    # Whatever label the node was given: the machine is what it is.
    refusal = OperatingSystem().admit(attempt(asked, at=node({"kubernetes.io/os": "windows"})))
    assert (refusal.reason if refusal else None) == reason


@pytest.mark.parametrize("policy", [None, "Merge", "Strict"])
@pytest.mark.parametrize("features", [None, NodeFeatures(), NodeFeatures(supplemental_groups_policy=True)])
def test_supplemental_groups_handler_strict_unsupported_rejected(
    policy: str | None, features: NodeFeatures | None
) -> None:
    asked = pod(securityContext={"supplementalGroupsPolicy": policy} if policy else {})
    here = node()
    here.status.features = features
    refusal = SupplementalGroups().admit(attempt(asked, at=here))
    known = features is not None and features.supplemental_groups_policy is True
    assert (refusal is not None) == (policy == "Strict" and not known)
    if refusal is not None:
        assert refusal == AdmitRejection(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        )


ANNOTATION = "container.apparmor.security.beta.kubernetes.io/main"
OFF = "AppArmor is not enabled on the host"
EMPTY = 'invalid empty AppArmor profile name: "&AppArmorProfile{Type:Localhost,LocalhostProfile:%s,}"'


@pytest.mark.parametrize(
    ("pod_profile", "own", "annotation", "without", "with_apparmor"),
    [
        (None, None, None, None, None),
        ({"type": "Unconfined"}, {"type": "Unconfined"}, "unconfined", None, None),
        ({"type": "RuntimeDefault"}, None, None, OFF, None),
        (None, {"type": "RuntimeDefault"}, None, OFF, None),
        (None, None, "runtime/default", OFF, None),
        # A profile that is written counts, also where another one is in force.
        ({"type": "RuntimeDefault"}, {"type": "Unconfined"}, None, OFF, None),
        (None, {"type": "Localhost", "localhostProfile": "mine"}, None, OFF, None),
        (None, {"type": "Localhost", "localhostProfile": " "}, None, OFF, EMPTY % "* "),
        ({"type": "Localhost"}, None, None, OFF, EMPTY % "nil"),
        ({"type": "Localhost"}, {"type": "RuntimeDefault"}, None, OFF, None),
        (None, None, "localhost/", OFF, EMPTY % "*"),
        ({"type": "Localhost"}, None, "runtime/default", OFF, None),
    ],
)
def test_apparmor_handler_unenforceable_profile_rejected(
    pod_profile: dict[str, str] | None,
    own: dict[str, str] | None,
    annotation: str | None,
    without: str | None,
    with_apparmor: str | None,
) -> None:
    container = {"name": "main", **({"securityContext": {"appArmorProfile": own}} if own else {})}
    asked = pod(
        meta={"annotations": {ANNOTATION: annotation} if annotation else {}},
        containers=[container],
        securityContext={"appArmorProfile": pod_profile} if pod_profile else {},
    )
    for enabled, problem in ((False, without), (True, with_apparmor)):
        refusal = AppArmor(surroundings(apparmor=enabled)).admit(attempt(asked))
        assert refusal == (
            AdmitRejection("AppArmor", f"Cannot enforce AppArmor: {problem}") if problem else None
        )
    begun = msgspec.structs.replace(asked, status=msgspec.structs.replace(asked.status, phase="Running"))
    assert AppArmor(surroundings()).admit(attempt(begun)) is None


def test_apparmor_is_enabled_reads_kernel_parameter(tmp_path: Path) -> None:
    assert not apparmor_is_enabled(tmp_path)
    (tmp_path / "kernel/security/apparmor").mkdir(parents=True)
    assert not apparmor_is_enabled(tmp_path)
    switch = tmp_path / "module/apparmor/parameters/enabled"
    switch.parent.mkdir(parents=True)
    for text, enabled in (("Y\n", True), ("N\n", False)):
        switch.write_text(text)
        assert apparmor_is_enabled(tmp_path) is enabled


@pytest.mark.parametrize(
    ("whole", "refused"),
    [
        (None, False),
        ({}, False),
        ({"requests": {"cpu": "1"}}, True),
        ({"limits": {"hugepages-2Mi": "2Mi"}}, True),
        ({"limits": {"example.com/dongle": "1"}}, False),
    ],
)
def test_pod_level_resources_handler_gate_disabled_rejected(
    whole: dict[str, Any] | None, refused: bool
) -> None:
    asked = attempt(pod(resources=whole))
    assert PodLevelResources(surroundings()).admit(asked) is None
    refusal = PodLevelResources(surroundings({"PodLevelResources": False})).admit(asked)
    told = AdmitRejection("PodLevelResourcesNotSupported", "PodLevelResources feature gate is disabled")
    assert refusal == (told if refused else None)


RULES = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [3]}}]


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ({}, ""),
        ({"hostNetwork": True}, ""),
        ({"hostUsers": False}, ""),
        ({"hostNetwork": True, "hostUsers": True}, ""),
        ({"hostNetwork": True, "hostUsers": False}, "UserNamespacesHostNetworkSupport"),
        (
            {"initContainers": [{"name": "first", "restartPolicyRules": RULES}]},
            "RestartAllContainersOnContainerExits",
        ),
        (
            {
                "containers": [{"name": "main", "restartPolicyRules": RULES}],
                "hostNetwork": True,
                "hostUsers": False,
            },
            "RestartAllContainersOnContainerExits, UserNamespacesHostNetworkSupport",
        ),
    ],
)
def test_declared_features_handler_missing_node_feature_rejected(spec: dict[str, Any], missing: str) -> None:
    link = DeclaredFeatures(surroundings())
    message = f"Pod requires node features that are not available: {missing}"
    expected = AdmitRejection("PodFeatureUnsupported", message) if missing else None
    assert link.admit(attempt(pod(**spec))) == expected
    able = node()
    able.status.declared_features = missing.split(", ")
    assert link.admit(attempt(pod(**spec), at=able)) is None
    assert DeclaredFeatures(surroundings({"NodeDeclaredFeatures": False})).admit(attempt(pod(**spec))) is None
