"""Security contexts of sandboxes and containers: users, groups, capabilities, profiles and namespaces.

A container's security context overrides its pod's. What neither specifies is left to the image (the user) or
the runtime (capabilities), except that sensitive paths of /proc and /sys are masked or read-only unless
`procMount` is Unmasked. A sandbox and its containers must have the same namespace options, so both use
`pod_namespaces`.
"""

from __future__ import annotations

from collections.abc import Iterable
from posixpath import join, normpath

import msgspec

from pykubelet.api.pod import Capabilities, Container, Pod, Profile, SecurityContext, SELinuxOptions
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.options import (
    IdMappings,
    IdRange,
    RunContainerOptions,
    RunSandboxOptions,
)
from pykubelet.kuberuntime.errors import ContainerConfigError, RootNotAllowed

APPARMOR_ANNOTATION_PREFIX = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of the deprecated AppArmor annotations, which static pods may still use."""
_RUNTIME_DEFAULT = cri.SecurityProfile.RuntimeDefault
_UNCONFINED = cri.SecurityProfile.Unconfined
_LOCALHOST = cri.SecurityProfile.Localhost


def seccomp_profile(pod: Pod, container: Container, root: str, default: bool) -> cri.SecurityProfile:
    """Return the seccomp profile: the container's, the pod's, or with `default` the runtime's.

    `Localhost` profiles are files below `root`. Raises ContainerConfigError for one without a name.
    """
    own = container.security_context.seccomp_profile if container.security_context else None
    profile = own or pod.spec.security_context.seccomp_profile
    if profile is None:
        return cri.SecurityProfile(profile_type=_RUNTIME_DEFAULT if default else _UNCONFINED)
    match profile.type:
        case "RuntimeDefault":
            return cri.SecurityProfile(profile_type=_RUNTIME_DEFAULT)
        case "Localhost":
            if not profile.localhost_profile:
                raise ContainerConfigError(
                    "localhostProfile must be set if seccompProfile type is Localhost."
                )
            return cri.SecurityProfile(
                profile_type=_LOCALHOST, localhost_ref=_below(root, profile.localhost_profile)
            )
    return cri.SecurityProfile(profile_type=_UNCONFINED)


def apparmor_profile(pod: Pod, container: Container) -> tuple[cri.SecurityProfile | None, str]:
    """Return the AppArmor profile as a message and in the deprecated syntax; (None, "") without one.

    Raises ContainerConfigError for a `Localhost` profile without a name, or an unknown type.
    """
    own = container.security_context.app_armor_profile if container.security_context else None
    profile = own or _annotated(pod, container) or pod.spec.security_context.app_armor_profile
    if profile is None:
        return None, ""
    match profile.type:
        case "RuntimeDefault":
            return cri.SecurityProfile(profile_type=_RUNTIME_DEFAULT), "runtime/default"
        case "Unconfined":
            return cri.SecurityProfile(profile_type=_UNCONFINED), "unconfined"
        case "Localhost":
            if profile.localhost_profile is None:
                raise ContainerConfigError("missing localhost apparmor profile name")
            name = profile.localhost_profile
            return cri.SecurityProfile(profile_type=_LOCALHOST, localhost_ref=name), f"localhost/{name}"
    raise ContainerConfigError(f'unknown apparmor profile type: "{profile.type}"')


def _below(root: str, name: str) -> str:
    path = normpath(join(root, name.lstrip("/")))
    if not path.startswith(f"{normpath(root).rstrip('/')}/"):
        raise ContainerConfigError(f'the seccomp profile "{name}" is not below {root}: name a file that is')
    return path


def _annotated(pod: Pod, container: Container) -> Profile | None:
    text = pod.metadata.annotations.get(APPARMOR_ANNOTATION_PREFIX + container.name)
    match text:
        case "runtime/default":
            return Profile(type="RuntimeDefault")
        case "unconfined":
            return Profile(type="Unconfined")
    if text is not None and text.startswith("localhost/"):
        return Profile(type="Localhost", localhost_profile=text.removeprefix("localhost/"))
    return None


def pod_namespaces(pod: Pod, mappings: IdMappings | None) -> cri.NamespaceOption:
    """Return a pod's namespace options. Raises ContainerConfigError if user namespaces are not supported."""
    spec = pod.spec
    own_pid = cri.POD if spec.share_process_namespace else cri.CONTAINER
    return cri.NamespaceOption(
        network=cri.NODE if spec.host_network else cri.POD,
        ipc=cri.NODE if spec.host_ipc else cri.POD,
        pid=cri.NODE if spec.host_pid else own_pid,
        userns_options=_user_namespace(spec.host_users is False, mappings),
    )


def id_messages(ranges: Iterable[IdRange]) -> list[cri.IDMapping]:
    """Return ID ranges as CRI messages."""
    return [
        cri.IDMapping(host_id=ids.host_id, container_id=ids.container_id, length=ids.length) for ids in ranges
    ]


def _user_namespace(requested: bool, mappings: IdMappings | None) -> cri.UserNamespace:
    if not requested:
        return cri.UserNamespace(mode=cri.NODE)
    if mappings is None:
        raise ContainerConfigError(
            "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
        )
    return cri.UserNamespace(mode=cri.POD, uids=id_messages(mappings.uids), gids=id_messages(mappings.gids))


MASKED_PATHS = (
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
)
READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
LARGEST_UID = 2**31 - 1


def container_security(
    pod: Pod, container: Container, options: RunContainerOptions
) -> cri.LinuxContainerSecurityContext:
    """Return a container's security context. Raises ContainerConfigError."""
    security = effective_security(pod, container)
    pod_security = pod.spec.security_context
    user, username = security.run_as_user, ""
    if user is None:
        user, username = options.image.uid, options.image.username
    message = cri.LinuxContainerSecurityContext(
        run_as_user=_optional(user),
        run_as_username=username,
        run_as_group=_optional(security.run_as_group),
        privileged=bool(security.privileged),
        readonly_rootfs=bool(security.read_only_root_filesystem),
        # Only an explicit false counts: unset allows privilege escalation.
        no_new_privs=security.allow_privilege_escalation is False,
        namespace_options=pod_namespaces(pod, options.id_mappings),
        supplemental_groups=_groups(
            pod_security.fs_group, pod_security.supplemental_groups, options.extra_groups
        ),
        supplemental_groups_policy=_groups_policy(pod),
        seccomp=seccomp_profile(pod, container, options.node.seccomp_root, options.node.seccomp_default),
        capabilities=_capabilities(security.capabilities),
        selinux_options=_selinux(security.se_linux_options),
    )
    if security.proc_mount != "Unmasked":
        message.masked_paths.extend((*MASKED_PATHS, *options.node.masked_paths))
        message.readonly_paths.extend(READONLY_PATHS)
    apparmor, old_name = apparmor_profile(pod, container)
    if apparmor is not None:
        message.apparmor.CopyFrom(apparmor)
        message.apparmor_profile = old_name
    if options.target_id and message.namespace_options.pid == cri.CONTAINER:
        message.namespace_options.pid = cri.TARGET
        message.namespace_options.target_id = options.target_id
    return message


def sandbox_security(pod: Pod, options: RunSandboxOptions) -> cri.LinuxSandboxSecurityContext:
    """Return a sandbox's security context. Raises ContainerConfigError.

    The sandbox runs only the runtime's pause process, so its seccomp profile is always the runtime's, and a
    pod's stricter profile cannot prevent its sandbox from starting.
    """
    pod_security = pod.spec.security_context
    return cri.LinuxSandboxSecurityContext(
        run_as_user=_optional(pod_security.run_as_user),
        run_as_group=_optional(pod_security.run_as_group),
        privileged=has_privileged_container(pod),
        namespace_options=pod_namespaces(pod, options.id_mappings),
        supplemental_groups=_groups(
            pod_security.fs_group, options.extra_groups, pod_security.supplemental_groups
        ),
        supplemental_groups_policy=_groups_policy(pod),
        seccomp=cri.SecurityProfile(profile_type=cri.SecurityProfile.RuntimeDefault),
        selinux_options=_selinux(pod_security.se_linux_options),
    )


def effective_security(pod: Pod, container: Container) -> SecurityContext:
    """Return the effective security context of a container, with the pod's values as defaults."""
    own = container.security_context or SecurityContext()
    pod_security = pod.spec.security_context
    inherited = {
        name: getattr(pod_security, name)
        for name in ("se_linux_options", "run_as_user", "run_as_group", "run_as_non_root")
        if getattr(own, name) is None
    }
    return msgspec.structs.replace(own, **inherited)


def has_privileged_container(pod: Pod) -> bool:
    """Return whether any container of the pod is privileged."""
    spec = pod.spec
    return any(
        container.security_context is not None and container.security_context.privileged
        for container in (*spec.containers, *spec.init_containers, *spec.ephemeral_containers)
    )


def verify_run_as_non_root(
    pod: Pod, container: Container, image_uid: int | None, image_username: str
) -> str | None:
    """Return the reason why a container violates `runAsNonRoot`, or None.

    The image's user must be numeric: a name cannot be resolved before the container exists.
    """
    security = effective_security(pod, container)
    if not security.run_as_non_root:
        return None
    meta = pod.metadata
    where = f'(pod: "{meta.name}_{meta.namespace}({meta.uid})", container: {container.name})'
    if security.run_as_user is not None:
        return f"container's runAsUser breaks non-root policy {where}" if security.run_as_user == 0 else None
    if image_uid is None:
        if not image_username:
            return None
        return (
            f"container has runAsNonRoot and image has non-numeric user ({image_username}), "
            f"cannot verify user is non-root {where}"
        )
    if image_uid == 0:
        return f"container has runAsNonRoot and image will run as root {where}"
    if not 0 <= image_uid <= LARGEST_UID:
        return (
            f"container has runAsNonRoot and image has an invalid user id ({image_uid}). "
            f"(Must be 1-({LARGEST_UID})): must be between 0 and {LARGEST_UID}, inclusive {where}"
        )
    return None


def check_run_as_non_root(pod: Pod, container: Container, options: RunContainerOptions) -> None:
    """Raise RootNotAllowed when the container violates `runAsNonRoot`."""
    if problem := verify_run_as_non_root(pod, container, options.image.uid, options.image.username):
        raise RootNotAllowed(problem)


def _optional(number: int | None) -> cri.Int64Value | None:
    return None if number is None else cri.Int64Value(value=number)


def _capabilities(capabilities: Capabilities | None) -> cri.Capability | None:
    return (
        None
        if capabilities is None
        else cri.Capability(add_capabilities=capabilities.add, drop_capabilities=capabilities.drop)
    )


def _groups(fs_group: int | None, *more: Iterable[int]) -> list[int]:
    first = [] if fs_group is None else [fs_group]
    return [*first, *(group for groups in more for group in groups)]


def _groups_policy(pod: Pod) -> cri.SupplementalGroupsPolicy:
    policy = pod.spec.security_context.supplemental_groups_policy
    match policy:
        case None | "Merge":
            return cri.Merge
        case "Strict":
            return cri.Strict
    raise ContainerConfigError(f"unsupported supplementalGroupsPolicy: {policy}")


def _selinux(options: SELinuxOptions | None) -> cri.SELinuxOption | None:
    if options is None:
        return None
    return cri.SELinuxOption(user=options.user, role=options.role, type=options.type, level=options.level)
