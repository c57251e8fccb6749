from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Capabilities, PodSecurityContext, Profile, SecurityContext, SELinuxOptions
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.cri_configs import make_container_config
from pykubelet.kuberuntime.configuration.options import (
    IdMappings,
    IdRange,
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
)
from pykubelet.kuberuntime.configuration.security import (
    MASKED_PATHS,
    READONLY_PATHS,
    container_security,
    effective_security,
    sandbox_security,
    verify_run_as_non_root,
)
from pykubelet.kuberuntime.errors import ContainerConfigError, RootNotAllowed
from tests.support.containers import make_container, make_pod

NUMERIC, NAMED = PresentImage("", 1000, ""), PresentImage("", None, "www")
IDS = IdMappings((IdRange(0, 65536, 65536),), (IdRange(0, 131072, 65536),))


def security(
    own: SecurityContext | None = None, whole: PodSecurityContext | None = None, **fields: Any
) -> cri.LinuxContainerSecurityContext:
    facts = {name: fields.pop(name) for name in list(fields) if name in RunContainerOptions.__slots__}
    facts.setdefault("node", RuntimeNodeOptions())
    container = make_container(security_context=own)
    pod = make_pod(container, security_context=whole or PodSecurityContext(), **fields)
    return container_security(pod, container, RunContainerOptions(**facts))


def sandbox(whole: PodSecurityContext | None = None, **fields: Any) -> cri.LinuxSandboxSecurityContext:
    facts = {name: fields.pop(name) for name in list(fields) if name in RunSandboxOptions.__slots__}
    pod = make_pod(security_context=whole or PodSecurityContext(), **fields)
    return sandbox_security(pod, RunSandboxOptions(node=RuntimeNodeOptions(), **facts))


def test_effective_security_container_context_overrides_pod() -> None:
    whole = PodSecurityContext(
        run_as_user=1, run_as_group=2, run_as_non_root=True, se_linux_options=SELinuxOptions(level="s0")
    )
    own = SecurityContext(run_as_user=0, run_as_non_root=False)
    container = make_container(security_context=own)
    effective = effective_security(make_pod(container, security_context=whole), container)
    assert (effective.run_as_user, effective.run_as_group, effective.run_as_non_root) == (0, 2, False)
    assert effective.se_linux_options == SELinuxOptions(level="s0")
    assert own.run_as_group is None


@pytest.mark.parametrize(
    ("fields", "uid", "name"),
    [
        ({}, 0, ""),
        ({"image": NUMERIC}, 1000, ""),
        ({"image": NAMED}, None, "www"),
        ({"image": NUMERIC, "whole": PodSecurityContext(run_as_user=5)}, 5, ""),
        ({"image": NAMED, "own": SecurityContext(run_as_user=0)}, 0, ""),
    ],
)
def test_container_security_user_from_spec_or_image(
    fields: dict[str, Any], uid: int | None, name: str
) -> None:
    message = security(**fields)
    assert message.HasField("run_as_user") == (uid is not None)
    assert message.run_as_user.value == (uid or 0)
    assert message.run_as_username == name


def test_container_security_supplemental_groups_in_upstream_order() -> None:
    whole = PodSecurityContext(
        run_as_user=1,
        run_as_group=7,
        fs_group=2000,
        supplemental_groups=[3, 4],
        supplemental_groups_policy="Strict",
    )
    own = security(whole=whole, extra_groups=(9,))
    assert list(own.supplemental_groups) == [2000, 3, 4, 9]
    assert own.supplemental_groups_policy == cri.Strict
    assert own.run_as_group.value == 7
    below = sandbox(whole, extra_groups=(9,))
    assert list(below.supplemental_groups) == [2000, 9, 3, 4]
    assert below.supplemental_groups_policy == cri.Strict
    assert (below.run_as_user.value, below.run_as_group.value) == (1, 7)
    assert not sandbox().HasField("run_as_user")


def test_security_unknown_supplemental_groups_policy_raises() -> None:
    whole = PodSecurityContext(supplemental_groups_policy="Sometimes")
    for make in (security, sandbox):
        with pytest.raises(ContainerConfigError, match="unsupported supplementalGroupsPolicy: Sometimes"):
            make(whole=whole)


def test_container_security_privilege_fields_converted() -> None:
    plain = security()
    assert (plain.privileged, plain.no_new_privs, plain.readonly_rootfs) == (False, False, False)
    assert not plain.HasField("capabilities")
    assert not plain.HasField("selinux_options")
    message = security(
        SecurityContext(
            privileged=True,
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            capabilities=Capabilities(add=["NET_ADMIN"], drop=["ALL"]),
            se_linux_options=SELinuxOptions(user="u", role="r", type="t", level="l"),
        )
    )
    assert message.privileged
    assert message.no_new_privs
    assert message.readonly_rootfs
    assert list(message.capabilities.add_capabilities) == ["NET_ADMIN"]
    assert list(message.capabilities.drop_capabilities) == ["ALL"]
    assert message.selinux_options == cri.SELinuxOption(user="u", role="r", type="t", level="l")
    assert not security(SecurityContext(allow_privilege_escalation=True)).no_new_privs


def test_sandbox_security_any_privileged_container_is_privileged() -> None:
    privileged = make_container("p", security_context=SecurityContext(privileged=True))
    assert not sandbox().privileged
    assert sandbox(init_containers=[privileged]).privileged
    assert sandbox(ephemeral_containers=[privileged]).privileged


@pytest.mark.parametrize(
    ("proc_mount", "masked", "read_only"),
    [
        (None, (*MASKED_PATHS, "/sys/x"), READONLY_PATHS),
        ("Default", (*MASKED_PATHS, "/sys/x"), READONLY_PATHS),
        ("Unmasked", (), ()),
    ],
)
def test_container_security_proc_mount_sets_masked_and_readonly_paths(
    proc_mount: str | None, masked: tuple[str, ...], read_only: tuple[str, ...]
) -> None:
    message = security(
        SecurityContext(proc_mount=proc_mount), node=RuntimeNodeOptions(masked_paths=("/sys/x",))
    )
    assert tuple(message.masked_paths) == masked
    assert tuple(message.readonly_paths) == read_only


RUNTIME = cri.SecurityProfile(profile_type=cri.SecurityProfile.RuntimeDefault)
UNCONFINED = cri.SecurityProfile(profile_type=cri.SecurityProfile.Unconfined)


def localhost(ref: str) -> cri.SecurityProfile:
    return cri.SecurityProfile(profile_type=cri.SecurityProfile.Localhost, localhost_ref=ref)


@pytest.mark.parametrize(
    ("own", "whole", "default", "wanted"),
    [
        (None, None, False, UNCONFINED),
        (None, None, True, RUNTIME),
        (Profile(type="Unconfined"), None, True, UNCONFINED),
        (None, Profile(type="RuntimeDefault"), False, RUNTIME),
        (Profile(type="Unconfined"), Profile(type="RuntimeDefault"), False, UNCONFINED),
        (
            Profile(type="Localhost", localhost_profile="a/b.json"),
            None,
            True,
            localhost("/root/seccomp/a/b.json"),
        ),
    ],
)
def test_container_security_seccomp_profile_resolved(
    own: Profile | None, whole: Profile | None, default: bool, wanted: cri.SecurityProfile
) -> None:
    message = security(
        SecurityContext(seccomp_profile=own),
        PodSecurityContext(seccomp_profile=whole),
        node=RuntimeNodeOptions(seccomp_root="/root/seccomp", seccomp_default=default),
    )
    assert message.seccomp == wanted
    assert sandbox(PodSecurityContext(seccomp_profile=whole)).seccomp == RUNTIME


@pytest.mark.parametrize("name", [None, "", "../../etc/passwd", "a/../../x", ".."])
def test_container_security_invalid_seccomp_profile_raises(name: str | None) -> None:
    with pytest.raises(ContainerConfigError, match=r"localhostProfile must be set|is not below"):
        security(SecurityContext(seccomp_profile=Profile(type="Localhost", localhost_profile=name)))


@pytest.mark.parametrize(
    ("own", "annotation", "whole", "wanted", "old"),
    [
        (None, None, None, None, ""),
        (Profile(type="RuntimeDefault"), None, None, RUNTIME, "runtime/default"),
        (Profile(type="Unconfined"), None, None, UNCONFINED, "unconfined"),
        (Profile(type="Localhost", localhost_profile="p"), None, None, localhost("p"), "localhost/p"),
        (None, None, Profile(type="Unconfined"), UNCONFINED, "unconfined"),
        (None, "localhost/q", Profile(type="Unconfined"), localhost("q"), "localhost/q"),
        (None, "runtime/default", None, RUNTIME, "runtime/default"),
        (None, "unconfined", None, UNCONFINED, "unconfined"),
        (None, "nonsense", None, None, ""),
        (Profile(type="Unconfined"), "runtime/default", None, UNCONFINED, "unconfined"),
    ],
)
def test_container_security_apparmor_profile_resolved(
    own: Profile | None,
    annotation: str | None,
    whole: Profile | None,
    wanted: cri.SecurityProfile | None,
    old: str,
) -> None:
    key = "container.apparmor.security.beta.kubernetes.io/main"
    message = security(
        SecurityContext(app_armor_profile=own),
        PodSecurityContext(app_armor_profile=whole),
        annotations={} if annotation is None else {key: annotation},
    )
    assert message.HasField("apparmor") == (wanted is not None)
    assert wanted is None or message.apparmor == wanted
    assert message.apparmor_profile == old


@pytest.mark.parametrize(
    ("profile", "problem"),
    [(Profile(type="Localhost"), "missing localhost apparmor"), (Profile(type="X"), "unknown apparmor")],
)
def test_container_security_invalid_apparmor_profile_raises(profile: Profile, problem: str) -> None:
    with pytest.raises(ContainerConfigError, match=problem):
        security(SecurityContext(app_armor_profile=profile))


@pytest.mark.parametrize(
    ("fields", "network", "pid", "ipc"),
    [
        ({}, cri.POD, cri.CONTAINER, cri.POD),
        ({"host_network": True}, cri.NODE, cri.CONTAINER, cri.POD),
        ({"host_pid": True}, cri.POD, cri.NODE, cri.POD),
        ({"host_ipc": True}, cri.POD, cri.CONTAINER, cri.NODE),
        ({"share_process_namespace": True}, cri.POD, cri.POD, cri.POD),
        ({"share_process_namespace": False}, cri.POD, cri.CONTAINER, cri.POD),
        ({"host_pid": True, "share_process_namespace": True}, cri.POD, cri.NODE, cri.POD),
    ],
)
def test_security_host_namespaces_converted(
    fields: dict[str, Any], network: cri.NamespaceMode, pid: cri.NamespaceMode, ipc: cri.NamespaceMode
) -> None:
    wanted = cri.NamespaceOption(
        network=network, pid=pid, ipc=ipc, userns_options=cri.UserNamespace(mode=cri.NODE)
    )
    assert security(**fields).namespace_options == wanted
    assert sandbox(**fields).namespace_options == wanted


def test_container_security_ephemeral_container_targets_pid_namespace() -> None:
    aimed = security(target_id="abc").namespace_options
    assert (aimed.pid, aimed.target_id) == (cri.TARGET, "abc")
    shared = security(target_id="abc", share_process_namespace=True).namespace_options
    assert (shared.pid, shared.target_id) == (cri.POD, "")


def test_security_user_namespace_mappings_converted() -> None:
    wanted = cri.UserNamespace(
        mode=cri.POD,
        uids=[cri.IDMapping(container_id=0, host_id=65536, length=65536)],
        gids=[cri.IDMapping(container_id=0, host_id=131072, length=65536)],
    )
    assert security(host_users=False, id_mappings=IDS).namespace_options.userns_options == wanted
    assert sandbox(host_users=False, id_mappings=IDS).namespace_options.userns_options == wanted
    host = cri.UserNamespace(mode=cri.NODE)
    assert sandbox(host_users=True, id_mappings=IDS).namespace_options.userns_options == host
    with pytest.raises(ContainerConfigError, match="runtime does not support user namespaces"):
        sandbox(host_users=False)


WHERE = '(pod: "web_shop(u-1)", container: main)'


@pytest.mark.parametrize(
    ("own", "whole", "uid", "name", "message"),
    [
        (None, None, 0, "", None),
        (None, True, 1000, "", None),
        (SecurityContext(run_as_user=1), True, 0, "", None),
        (SecurityContext(run_as_non_root=False), True, 0, "", None),
        (None, True, 0, "", f"container has runAsNonRoot and image will run as root {WHERE}"),
        (
            SecurityContext(run_as_user=0),
            True,
            1000,
            "",
            f"container's runAsUser breaks non-root policy {WHERE}",
        ),
        (
            None,
            True,
            None,
            "www",
            "container has runAsNonRoot and image has non-numeric user (www), "
            f"cannot verify user is non-root {WHERE}",
        ),
        (None, True, None, "", None),
        (
            SecurityContext(run_as_non_root=True),
            None,
            2**31,
            "",
            "container has runAsNonRoot and image has an invalid user id (2147483648). "
            f"(Must be 1-(2147483647)): must be between 0 and 2147483647, inclusive {WHERE}",
        ),
    ],
)
def test_verify_run_as_non_root_root_user_returns_message(
    own: SecurityContext | None, whole: bool | None, uid: int | None, name: str, message: str | None
) -> None:
    container = make_container(security_context=own)
    pod = make_pod(container, security_context=PodSecurityContext(run_as_non_root=whole))
    assert verify_run_as_non_root(pod, container, uid, name) == message


@given(st.integers(-(2**63), 2**63 - 1), st.none() | st.integers(0, 2**31 - 1))
def test_verify_run_as_non_root_any_uid_root_never_allowed(uid: int, run_as: int | None) -> None:
    container = make_container(security_context=SecurityContext(run_as_user=run_as, run_as_non_root=True))
    pod = make_pod(container)
    allowed = verify_run_as_non_root(pod, container, uid, "") is None
    options = RunContainerOptions(node=RuntimeNodeOptions(), image=PresentImage("", uid, ""))
    sent = container_security(pod, container, options)
    assert not (allowed and sent.run_as_user.value == 0)


@pytest.mark.parametrize(("image", "run_as"), [(0, None), (0, 0), (1000, 0), (0, 1000), (1000, None)])
def test_make_container_config_run_as_non_root_never_starts_root(image: int, run_as: int | None) -> None:
    """Verify that the start itself is rejected, not only that the rule could be asked (CVE-2019-11245)."""
    container = make_container(security_context=SecurityContext(run_as_user=run_as, run_as_non_root=True))
    facts = RunContainerOptions(node=RuntimeNodeOptions(), image=PresentImage("", image, ""))
    user = image if run_as is None else run_as
    if user:
        sent = make_container_config(make_pod(container), container, facts)
        assert sent.linux.security_context.run_as_user.value == user
    else:
        with pytest.raises(RootNotAllowed, match=r"non-root policy|will run as root"):
            make_container_config(make_pod(container), container, facts)
