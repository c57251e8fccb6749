"""The checks of ids, privileges and namespaces: those that contradict each other, or cannot be."""

from __future__ import annotations

import re

from pykubelet.api.pod import PodSpec, Profile, SecurityContext
from pykubelet.api.sysctl import namespace_of
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem
from pykubelet.pods.checks import Problems, choice, in_range, inside, optional_choice, refused, unique

_SEGMENT = "[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?"
_SYSCTL = re.compile(rf"(?:{_SEGMENT}[./])*{_SEGMENT}")
_PROFILES = ("RuntimeDefault", "Unconfined", "Localhost")
_LONGEST_PROFILE = 4095


def check_pod_security(spec: PodSpec) -> Problems:
    """Give everything that is wrong with the security context and namespaces of a pod."""
    path, context = "spec.securityContext", spec.security_context
    for field, value in (
        ("runAsUser", context.run_as_user),
        ("runAsGroup", context.run_as_group),
        ("fsGroup", context.fs_group),
        *((f"supplementalGroups[{index}]", group) for index, group in enumerate(context.supplemental_groups)),
    ):
        yield from in_range(f"{path}.{field}", value, 0)
    for field, word, allowed in (
        ("fsGroupChangePolicy", context.fs_group_change_policy, ("OnRootMismatch", "Always")),
        ("supplementalGroupsPolicy", context.supplemental_groups_policy, ("Merge", "Strict")),
    ):
        yield from optional_choice(f"{path}.{field}", word, allowed)
    yield from _check_sysctls(f"{path}.sysctls", spec)
    yield from _check_seccomp(f"{path}.seccompProfile", context.seccomp_profile)
    yield from _check_app_armor(f"{path}.appArmorProfile", context.app_armor_profile)
    shared = spec.share_process_namespace and spec.host_pid
    yield from refused("spec.shareProcessNamespace", "must not be set together with hostPID", shared)
    if spec.host_users is False:
        for field, value in (
            ("hostNetwork", spec.host_network),
            ("hostPID", spec.host_pid),
            ("hostIPC", spec.host_ipc),
        ):
            yield from refused(f"spec.{field}", "must not be set with hostUsers: false", value)


def check_container_security(path: str, context: SecurityContext | None, spec: PodSpec) -> Problems:
    """Give everything that is wrong with the security context of a container."""
    if context is None:
        return
    yield from in_range(f"{path}.runAsUser", context.run_as_user, 0)
    yield from in_range(f"{path}.runAsGroup", context.run_as_group, 0)
    yield from optional_choice(f"{path}.procMount", context.proc_mount, ("Default", "Unmasked"))
    unmasked = context.proc_mount == "Unmasked" and spec.host_users is not False
    yield from refused(f"{path}.procMount", "Unmasked needs spec.hostUsers: false", unmasked)
    if context.allow_privilege_escalation is False:
        path_here = f"{path}.allowPrivilegeEscalation"
        yield from refused(path_here, "must not be false for a privileged container", context.privileged)
        added = context.capabilities.add if context.capabilities else []
        yield from refused(path_here, "must not be false with CAP_SYS_ADMIN", "CAP_SYS_ADMIN" in added)
    yield from _check_seccomp(f"{path}.seccompProfile", context.seccomp_profile)
    yield from _check_app_armor(f"{path}.appArmorProfile", context.app_armor_profile)


def _check_sysctls(path: str, spec: PodSpec) -> Problems:
    sysctls = spec.security_context.sysctls
    for index, sysctl in enumerate(sysctls):
        place = f"{path}[{index}].name"
        good = len(sysctl.name) <= 253 and _SYSCTL.fullmatch(sysctl.name)
        yield from refused(
            place, f"{quoted(sysctl.name)} is not a sysctl such as net.core.somaxconn", not good
        )
        namespace = namespace_of(sysctl.name)
        for field, shared in (
            ("hostNetwork", spec.host_network and namespace == "Net"),
            ("hostIPC", spec.host_ipc and namespace == "IPC"),
        ):
            yield from refused(place, f"{quoted(sysctl.name)} must not be set with {field}", shared)
    yield from unique((f"{path}[{index}].name", sysctl.name) for index, sysctl in enumerate(sysctls))


def _check_seccomp(path: str, profile: Profile | None) -> Problems:
    if profile is not None:
        yield from _check_profile(path, profile)
        if profile.localhost_profile:
            yield from inside(f"{path}.localhostProfile", profile.localhost_profile)


def _check_app_armor(path: str, profile: Profile | None) -> Problems:
    if profile is not None:
        yield from _check_profile(path, profile)
        name = profile.localhost_profile or ""
        path = f"{path}.localhostProfile"
        yield from refused(path, "must not begin or end with a space", name != name.strip())
        message = f"must not be longer than {_LONGEST_PROFILE} characters"
        yield from refused(path, message, len(name) > _LONGEST_PROFILE)


def _check_profile(path: str, profile: Profile) -> Problems:
    yield from choice(f"{path}.type", profile.type, _PROFILES)
    if profile.type == "Localhost" and not profile.localhost_profile:
        yield Problem(f"{path}.localhostProfile", "must be set with type Localhost")
    elif profile.type != "Localhost" and profile.localhost_profile is not None:
        yield Problem(f"{path}.localhostProfile", "must not be set without type Localhost")
