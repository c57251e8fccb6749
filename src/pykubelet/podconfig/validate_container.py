"""Validation of containers, resources and security contexts, and the generic field validators.

The `check_*` functions validate containers (image, ports, environment, mounts, restart rules), probes,
lifecycle hooks and stop signal, resources (names, quantities, requests within limits), and security contexts
(IDs, privileges, namespaces, contradictory settings). The generic validators each yield the problems of one
field, none for a valid value. Messages state what is allowed; the path of a problem names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from signal import Signals
from typing import Any

from pykubelet.api.ip import parse_ip
from pykubelet.api.meta import Resources
from pykubelet.api.names import dns_label_problem, dns_subdomain_problem, namespace_of, qualified_name_problem
from pykubelet.api.pod import (
    PROBE_HANDLERS,
    Container,
    ContainerPort,
    EnvFromSource,
    EnvVar,
    EnvVarSource,
    LifecycleHandler,
    PodSpec,
    Probe,
    Profile,
    ResourceRequirements,
    SecurityContext,
    VolumeMount,
)
from pykubelet.api.quantity import Quantity
from pykubelet.config.errors import Problem
from pykubelet.podconfig.defaults import container_total
from pykubelet.util.text import quoted

Problems = Iterator[Problem]
MAX_INT32 = 2**31 - 1
_LEADING_ZERO = re.compile(r"0[0-9]", re.ASCII)
_VARIABLE = re.compile(r"[ -<>-~]+")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])(?!.*--)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")


def problem_if(path: str, message: str, when: object) -> Problems:
    """Yield a problem if the condition holds."""
    if when:
        yield Problem(path, message)


def required(path: str, value: object) -> Problems:
    """Require a value."""
    return problem_if(path, "must be set", not value)


def choice(path: str, value: str, allowed: Collection[str]) -> Problems:
    """Require one of the allowed values."""
    names = ", ".join(item or '""' for item in allowed)
    return problem_if(path, f"is {quoted(value)}, but must be one of {names}", value not in allowed)


def optional_choice(path: str, value: str | None, allowed: Collection[str]) -> Problems:
    """Require one of the allowed values, or None."""
    return choice(path, value, allowed) if value is not None else iter(())


def in_range(path: str, value: int | None, low: int, high: int = MAX_INT32) -> Problems:
    """Require a number from `low` to `high`, or None."""
    message = f"is {value}, but must be from {low} to {high}"
    return problem_if(path, message, value is not None and not low <= value <= high)


def named(path: str, value: str, problem: Callable[[str], str | None]) -> Problems:
    """Require a name that `problem`, a function of `api/names.py`, accepts."""
    if not value:
        yield Problem(path, "must be set")
    elif sentence := problem(value):
        yield Problem(path, f"{quoted(value)} {sentence}")


def unique(paths_and_values: Iterable[tuple[str, str]]) -> Problems:
    """Require unique values; the later of two equal ones is the problem."""
    first: dict[str, str] = {}
    for path, value in paths_and_values:
        if value in first:
            yield Problem(path, f"{quoted(value)} is already used by {first[value]}")
        first.setdefault(value, path)


def exactly_one(path: str, what: str, fields: dict[str, Any]) -> Problems:
    """Require exactly one of several fields to be set."""
    names = [name for name, value in fields.items() if value is not None]
    if not names:
        yield Problem(path, f"must have {what}: one of {', '.join(fields)}")
    elif len(names) > 1:
        yield Problem(path, f"has {' and '.join(names)}, but must have only one {what}")


def no_steps_back(path: str, value: str) -> Problems:
    """Require a path without `..`."""
    return problem_if(path, f"{quoted(value)} must not contain '..'", ".." in value.split("/"))


def inside(path: str, value: str) -> Problems:
    """Require a relative path that stays below its base directory."""
    yield from problem_if(path, f"{quoted(value)} must be a relative path", value.startswith("/"))
    yield from no_steps_back(path, value)


def address(path: str, value: str, *, strict: bool) -> Problems:
    """Require an IP address; if `strict`, one that all software reads in the same way."""
    try:
        found = parse_ip(value)
    except ValueError as err:
        yield Problem(path, str(err))
        return
    if not strict:
        return
    has_zeros = "." in value and any(_LEADING_ZERO.match(part) for part in re.split(r"[.:]", value)[-4:])
    yield from problem_if(path, f"{quoted(value)} must not have leading 0s", has_zeros)
    is_mapped = found.version == 6 and found.ipv4_mapped is not None
    yield from problem_if(path, f"{quoted(value)} must not be an IPv4-mapped IPv6 address", is_mapped)


def port(path: str, value: int | str) -> Problems:
    """Require a port number, or a valid port name."""
    return (
        in_range(path, value, 1, 65535) if isinstance(value, int) else named(path, value, port_name_problem)
    )


def port_name_problem(name: str) -> str | None:
    """Return why a port name is invalid, None if it is valid."""
    if _PORT_NAME.fullmatch(name):
        return None
    return "must be 1 to 15 lower case letters, digits or single '-', with at least one letter, such as http"


def variable_problem(name: str) -> str | None:
    """Return why the name of an environment variable is invalid, None if it is valid."""
    return None if _VARIABLE.fullmatch(name) else "must be printable ASCII characters without '='"


def key_problem(key: str) -> str | None:
    """Return why a key of a configMap or secret, a file name, is invalid, None if it is valid."""
    if len(key) <= 253 and _KEY.fullmatch(key) and key != "." and not key.startswith(".."):
        return None
    return "must be 1 to 253 letters, digits, '-', '_' or '.', and not begin with '..'"


_HEADER = re.compile(r"[-A-Za-z0-9]+")
_REAL_TIME_SIGNAL = re.compile(r"SIGRTMIN\+(?:[1-9]|1[0-5])|SIGRTMAX-(?:[1-9]|1[0-4])")


def check_probes(path: str, container: Container) -> Problems:
    """Yield the problems of a container's probes."""
    for field, probe in (
        ("livenessProbe", container.liveness_probe),
        ("readinessProbe", container.readiness_probe),
        ("startupProbe", container.startup_probe),
    ):
        if probe is not None:
            yield from _check_probe(f"{path}.{field}", probe, counts_up=field == "readinessProbe")


def check_hooks(path: str, container: Container, spec: PodSpec) -> Problems:
    """Yield the problems of a container's lifecycle hooks and stop signal."""
    if (lifecycle := container.lifecycle) is None:
        return
    for field, hook in (("postStart", lifecycle.post_start), ("preStop", lifecycle.pre_stop)):
        if hook is None:
            continue
        field_path = f"{path}.{field}"
        handlers = {
            "exec": hook.exec,
            "httpGet": hook.http_get,
            "tcpSocket": hook.tcp_socket,
            "sleep": hook.sleep,
        }
        yield from exactly_one(field_path, "a handler", handlers)
        yield from _check_handler(field_path, hook)
        if hook.sleep is not None:
            limit = spec.termination_grace_period_seconds or 0
            yield from in_range(f"{field_path}.sleep.seconds", hook.sleep.seconds, 0, limit)
    if lifecycle.stop_signal is not None:
        yield from problem_if(f"{path}.stopSignal", "needs spec.os.name", spec.os is None)
        name = lifecycle.stop_signal
        known = name in Signals.__members__ or _REAL_TIME_SIGNAL.fullmatch(name)
        message = f"{quoted(name)} is not a signal such as SIGTERM"
        yield from problem_if(f"{path}.stopSignal", message, not known)


def _check_probe(path: str, probe: Probe, *, counts_up: bool) -> Problems:
    handler = LifecycleHandler(exec=probe.exec, http_get=probe.http_get, tcp_socket=probe.tcp_socket)
    handlers = {field: getattr(probe, name) for name, field in PROBE_HANDLERS.items()}
    yield from exactly_one(path, "a handler", handlers)
    yield from _check_handler(path, handler)
    if probe.grpc is not None:
        yield from port(f"{path}.grpc.port", probe.grpc.port)
    for field, value in (
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ):
        yield from in_range(f"{path}.{field}", value, 0)
    grace = probe.termination_grace_period_seconds
    if counts_up:
        message = "is only for liveness and startup probes"
        yield from problem_if(f"{path}.terminationGracePeriodSeconds", message, grace is not None)
    else:
        yield from problem_if(f"{path}.successThreshold", "must be 1", probe.success_threshold != 1)
        yield from in_range(f"{path}.terminationGracePeriodSeconds", grace, 1, 2**63 - 1)


def _check_handler(path: str, handler: LifecycleHandler) -> Problems:
    if handler.exec is not None:
        yield from required(f"{path}.exec.command", handler.exec.command)
    if handler.tcp_socket is not None:
        yield from port(f"{path}.tcpSocket.port", handler.tcp_socket.port)
    if (request := handler.http_get) is not None:
        yield from port(f"{path}.httpGet.port", request.port)
        yield from choice(f"{path}.httpGet.scheme", request.scheme, ("HTTP", "HTTPS"))
        for index, header in enumerate(request.http_headers):
            message = f"{quoted(header.name)} must be letters, digits or '-', such as X-Name"
            field_path = f"{path}.httpGet.httpHeaders[{index}].name"
            yield from problem_if(field_path, message, not _HEADER.fullmatch(header.name))


_STANDARD = ("cpu", "memory", "ephemeral-storage")
_POD_LEVEL = ("cpu", "memory")


def check_resources(path: str, resources: ResourceRequirements, spec: PodSpec) -> Problems:
    """Yield the problems of a container's resources."""
    yield from _check_amounts(path, resources, _STANDARD, extended=True)
    claims = {claim.name for claim in spec.resource_claims}
    for index, claim in enumerate(resources.claims):
        message = f"{quoted(claim.name)} is not the name of one of spec.resourceClaims"
        yield from problem_if(f"{path}.claims[{index}].name", message, claim.name not in claims)
        if claim.request:
            yield from named(f"{path}.claims[{index}].request", claim.request, dns_label_problem)
    yield from unique(
        (f"{path}.claims[{index}]", f"{claim.name}/{claim.request}")
        for index, claim in enumerate(resources.claims)
    )


def check_pod_resources(spec: PodSpec) -> Problems:
    """Yield the problems of the pod-level resources, claims and overhead."""
    for name, amount in spec.overhead.items():
        yield from _check_amount("spec.overhead", name, amount, _STANDARD, extended=True)
    for index, claim in enumerate(spec.resource_claims):
        path = f"spec.resourceClaims[{index}]"
        yield from named(f"{path}.name", claim.name, dns_label_problem)
        yield from exactly_one(
            path,
            "a claim",
            {
                "resourceClaimName": claim.resource_claim_name,
                "resourceClaimTemplateName": claim.resource_claim_template_name,
            },
        )
    yield from unique(
        (f"spec.resourceClaims[{index}].name", claim.name) for index, claim in enumerate(spec.resource_claims)
    )
    if (pod_level := spec.resources) is None:
        return
    yield from problem_if("spec.resources.claims", "are only for containers", pod_level.claims)
    yield from _check_amounts("spec.resources", pod_level, _POD_LEVEL, extended=False)
    yield from _check_covers("spec.resources.requests", pod_level.requests, container_total(spec, "requests"))
    for index, container in enumerate(spec.containers):
        for name, amount in container.resources.limits.items():
            limit = pod_level.limits.get(name)
            message = f"is {amount}, but the whole pod may have only {limit}"
            field_path = f"spec.containers[{index}].resources.limits[{name}]"
            yield from problem_if(field_path, message, limit is not None and amount > limit)
    pages = {
        name: amount
        for name, amount in container_total(spec, "limits").items()
        if name.startswith("hugepages-")
    }
    yield from _check_covers("spec.resources.limits", pod_level.limits, pages)


def _check_covers(path: str, pod_level: Resources, needed: Resources) -> Problems:
    for name, amount in needed.items():
        if name in pod_level and pod_level[name] < amount:
            yield Problem(
                f"{path}[{name}]", f"is {pod_level[name]}, but the containers together have {amount}"
            )


def _check_amounts(
    path: str, resources: ResourceRequirements, standard: tuple[str, ...], *, extended: bool
) -> Problems:
    limits, requests = resources.limits, resources.requests
    for name, amount in limits.items():
        yield from _check_amount(f"{path}.limits", name, amount, standard, extended=extended)
    for name, amount in requests.items():
        field_path = f"{path}.requests[{name}]"
        yield from _check_amount(f"{path}.requests", name, amount, standard, extended=extended)
        limit = limits.get(name)
        if name in _STANDARD:
            message = f"is {amount}, more than the limit of {limit}"
            yield from problem_if(field_path, message, limit is not None and amount > limit)
        else:
            message = f"is {amount}, but must be the same as the limit ({'none' if limit is None else limit})"
            yield from problem_if(field_path, message, limit != amount)
    names = {*limits, *requests}
    pages = any(name.startswith("hugepages-") for name in names)
    yield from problem_if(
        path, "has huge pages, which need cpu or memory too", pages and not {"cpu", "memory"} & names
    )


def _check_amount(
    path: str, name: str, amount: Quantity, standard: tuple[str, ...], *, extended: bool
) -> Problems:
    path = f"{path}[{name}]"
    yield from problem_if(path, f"is {amount}, but must not be negative", amount.nanos < 0)
    if name.startswith("hugepages-"):
        yield from _check_pages(path, name, amount)
    elif "/" in name and extended:
        yield from named(path, name, qualified_name_problem)
        yield from problem_if(path, "must not begin with 'requests.'", name.startswith("requests."))
        pod_level = amount.is_integer or "kubernetes.io/" in name
        yield from problem_if(path, f"is {amount}, but must be a whole number", not pod_level)
    elif name not in standard:
        more = ", hugepages-<size>" + (" or a name such as example.com/device" if extended else "")
        yield Problem(path, f"{quoted(name)} is not a resource: use {', '.join(standard)}{more}")


def _check_pages(path: str, name: str, amount: Quantity) -> Problems:
    try:
        size = Quantity.parse(name.removeprefix("hugepages-"))
    except ValueError:
        size = Quantity.from_units(0)
    if size.nanos <= 0 or not size.is_integer:
        yield Problem(path, f"{quoted(name)} must name the size of a page, such as hugepages-2Mi")
    elif amount.nanos % size.nanos:
        yield Problem(path, f"is {amount}, but must be a multiple of {size}")


_SEGMENT = "[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?"
_SYSCTL = re.compile(rf"(?:{_SEGMENT}[./])*{_SEGMENT}")
_PROFILES = ("RuntimeDefault", "Unconfined", "Localhost")
_MAX_PROFILE_CHARACTERS = 4095


def check_pod_security(spec: PodSpec) -> Problems:
    """Yield the problems of a pod's security context and namespaces."""
    path, context = "spec.securityContext", spec.security_context
    for field, value in (
        ("runAsUser", context.run_as_user),
        ("runAsGroup", context.run_as_group),
        ("fsGroup", context.fs_group),
        *((f"supplementalGroups[{index}]", group) for index, group in enumerate(context.supplemental_groups)),
    ):
        yield from in_range(f"{path}.{field}", value, 0)
    for field, policy, allowed in (
        ("fsGroupChangePolicy", context.fs_group_change_policy, ("OnRootMismatch", "Always")),
        ("supplementalGroupsPolicy", context.supplemental_groups_policy, ("Merge", "Strict")),
    ):
        yield from optional_choice(f"{path}.{field}", policy, allowed)
    yield from _check_sysctls(f"{path}.sysctls", spec)
    yield from _check_seccomp(f"{path}.seccompProfile", context.seccomp_profile)
    yield from _check_app_armor(f"{path}.appArmorProfile", context.app_armor_profile)
    shared = spec.share_process_namespace and spec.host_pid
    yield from problem_if("spec.shareProcessNamespace", "must not be set together with hostPID", shared)
    if spec.host_users is False:
        for field, value in (
            ("hostNetwork", spec.host_network),
            ("hostPID", spec.host_pid),
            ("hostIPC", spec.host_ipc),
        ):
            yield from problem_if(f"spec.{field}", "must not be set with hostUsers: false", value)


def check_container_security(path: str, context: SecurityContext | None, spec: PodSpec) -> Problems:
    """Yield the problems of a container's security context."""
    if context is None:
        return
    yield from in_range(f"{path}.runAsUser", context.run_as_user, 0)
    yield from in_range(f"{path}.runAsGroup", context.run_as_group, 0)
    yield from optional_choice(f"{path}.procMount", context.proc_mount, ("Default", "Unmasked"))
    unmasked = context.proc_mount == "Unmasked" and spec.host_users is not False
    yield from problem_if(f"{path}.procMount", "Unmasked needs spec.hostUsers: false", unmasked)
    if context.allow_privilege_escalation is False:
        path_here = f"{path}.allowPrivilegeEscalation"
        yield from problem_if(path_here, "must not be false for a privileged container", context.privileged)
        added = context.capabilities.add if context.capabilities else []
        yield from problem_if(path_here, "must not be false with CAP_SYS_ADMIN", "CAP_SYS_ADMIN" in added)
    yield from _check_seccomp(f"{path}.seccompProfile", context.seccomp_profile)
    yield from _check_app_armor(f"{path}.appArmorProfile", context.app_armor_profile)


def _check_sysctls(path: str, spec: PodSpec) -> Problems:
    sysctls = spec.security_context.sysctls
    for index, sysctl in enumerate(sysctls):
        field_path = f"{path}[{index}].name"
        good = len(sysctl.name) <= 253 and _SYSCTL.fullmatch(sysctl.name)
        yield from problem_if(
            field_path, f"{quoted(sysctl.name)} is not a sysctl such as net.core.somaxconn", not good
        )
        namespace = namespace_of(sysctl.name)
        for field, shared in (
            ("hostNetwork", spec.host_network and namespace == "Net"),
            ("hostIPC", spec.host_ipc and namespace == "IPC"),
        ):
            yield from problem_if(field_path, f"{quoted(sysctl.name)} must not be set with {field}", shared)
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
        yield from problem_if(path, "must not begin or end with a space", name != name.strip())
        message = f"must not be longer than {_MAX_PROFILE_CHARACTERS} characters"
        yield from problem_if(path, message, len(name) > _MAX_PROFILE_CHARACTERS)


def _check_profile(path: str, profile: Profile) -> Problems:
    yield from choice(f"{path}.type", profile.type, _PROFILES)
    if profile.type == "Localhost" and not profile.localhost_profile:
        yield Problem(f"{path}.localhostProfile", "must be set with type Localhost")
    elif profile.type != "Localhost" and profile.localhost_profile is not None:
        yield Problem(f"{path}.localhostProfile", "must not be set without type Localhost")


_POD_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)
_KEYED_FIELD = re.compile(r"(metadata\.(?:annotations|labels))\['(.*)'\]")
_RESOURCE_FIELD = re.compile(r"(?:limits|requests)\.(?P<resource>cpu|memory|ephemeral-storage|hugepages-.+)")
_BYTE_DIVISORS = ("1", *(f"1{unit}{i}" for i in ("", "i") for unit in ("k" if not i else "K", *"MGTPE")))
_DIVISORS = {"cpu": ("1m", "1")}
_PROPAGATIONS = ("None", "HostToContainer", "Bidirectional")
_RECURSIVE = ("Disabled", "IfPossible", "Enabled")
_MAX_RULES = 20
_MAX_EXIT_CODES = 255


def check_container(path: str, container: Container, spec: PodSpec, *, is_init: bool) -> Problems:
    """Yield the problems of a container of this pod; `path` is its field path."""
    yield from named(f"{path}.name", container.name, dns_label_problem)
    yield from required(f"{path}.image", container.image)
    padded = container.image != container.image.strip()
    yield from problem_if(f"{path}.image", "must not begin or end with a space", padded)
    yield from choice(
        f"{path}.imagePullPolicy", container.image_pull_policy, ("Always", "IfNotPresent", "Never")
    )
    yield from choice(
        f"{path}.terminationMessagePolicy",
        container.termination_message_policy,
        ("File", "FallbackToLogsOnError"),
    )
    yield from _check_ports(f"{path}.ports", container.ports, spec)
    for index, variable in enumerate(container.env):
        yield from _check_variable(f"{path}.env[{index}]", variable, spec)
    for index, source in enumerate(container.env_from):
        yield from _check_env_from(f"{path}.envFrom[{index}]", source)
    yield from _check_mounts(path, container, spec)
    yield from _check_restarts(path, container)
    yield from check_resources(f"{path}.resources", container.resources, spec)
    yield from check_container_security(f"{path}.securityContext", container.security_context, spec)
    if is_init and container.restart_policy != "Always":
        for field, value in (
            ("lifecycle", container.lifecycle),
            ("livenessProbe", container.liveness_probe),
            ("readinessProbe", container.readiness_probe),
            ("startupProbe", container.startup_probe),
        ):
            message = "is only for containers that stay: set restartPolicy: Always, or remove it"
            yield from problem_if(f"{path}.{field}", message, value is not None)
    else:
        yield from check_probes(path, container)
        yield from check_hooks(f"{path}.lifecycle", container, spec)


def host_port_conflicts(containers: Iterable[tuple[str, Container]]) -> Problems:
    """Yield host ports that several of the containers use."""
    return unique(
        (f"{path}.ports[{index}].hostPort", f"{published.protocol}/{published.host_ip}/{published.host_port}")
        for path, container in containers
        for index, published in enumerate(container.ports)
        if published.host_port
    )


def _check_ports(path: str, ports: list[ContainerPort], spec: PodSpec) -> Problems:
    for index, port_spec in enumerate(ports):
        field_path = f"{path}[{index}]"
        if port_spec.name:
            yield from named(f"{field_path}.name", port_spec.name, port_name_problem)
        yield from in_range(f"{field_path}.containerPort", port_spec.container_port, 1, 65535)
        yield from in_range(f"{field_path}.hostPort", port_spec.host_port, 0, 65535)
        yield from choice(f"{field_path}.protocol", port_spec.protocol, ("TCP", "UDP", "SCTP"))
        yield from problem_if(
            f"{field_path}.hostPort",
            f"is {port_spec.host_port}, but must be the containerPort with hostNetwork",
            spec.host_network and port_spec.host_port != port_spec.container_port,
        )
    yield from unique(
        (f"{path}[{index}].name", port_spec.name) for index, port_spec in enumerate(ports) if port_spec.name
    )


def _check_variable(path: str, variable: EnvVar, spec: PodSpec) -> Problems:
    yield from named(f"{path}.name", variable.name, variable_problem)
    if (source := variable.value_from) is None:
        return
    path = f"{path}.valueFrom"
    sources = {
        "fieldRef": source.field_ref,
        "resourceFieldRef": source.resource_field_ref,
        "configMapKeyRef": source.config_map_key_ref,
        "secretKeyRef": source.secret_key_ref,
        "fileKeyRef": source.file_key_ref,
    }
    yield from problem_if(path, "must not be set together with a value", variable.value)
    yield from exactly_one(path, "a source", sources)
    yield from _check_pod_fields(path, source)
    for field, key in (
        ("configMapKeyRef", source.config_map_key_ref),
        ("secretKeyRef", source.secret_key_ref),
    ):
        if key is not None:
            yield from named(f"{path}.{field}.name", key.name, dns_subdomain_problem)
            yield from named(f"{path}.{field}.key", key.key, key_problem)
    if (file := source.file_key_ref) is not None:
        path = f"{path}.fileKeyRef"
        yield from named(f"{path}.key", file.key, variable_problem)
        yield from required(f"{path}.path", file.path)
        yield from no_steps_back(f"{path}.path", file.path)
        empty_dirs = [volume.name for volume in spec.volumes if volume.empty_dir is not None]
        message = f"{quoted(file.volume_name)} must be an emptyDir volume of the pod"
        yield from problem_if(f"{path}.volumeName", message, file.volume_name not in empty_dirs)


def _check_pod_fields(path: str, source: EnvVarSource) -> Problems:
    if (field := source.field_ref) is not None:
        yield from choice(f"{path}.fieldRef.apiVersion", field.api_version, ("v1",))
        if keyed := _KEYED_FIELD.fullmatch(field.field_path):
            key = keyed[2].lower() if keyed[1] == "metadata.annotations" else keyed[2]
            yield from named(f"{path}.fieldRef.fieldPath", key, qualified_name_problem)
        else:
            yield from choice(f"{path}.fieldRef.fieldPath", field.field_path, _POD_FIELDS)
    if (amount := source.resource_field_ref) is not None:
        path = f"{path}.resourceFieldRef"
        form = _RESOURCE_FIELD.fullmatch(amount.resource)
        message = f"is {quoted(amount.resource)}, but must be a limit or request such as limits.cpu"
        yield from problem_if(f"{path}.resource", message, form is None)
        try:
            divisor = Quantity.parse(str(amount.divisor))
        except ValueError as err:
            yield Problem(f"{path}.divisor", str(err))
            return
        if form is not None and divisor.nanos:
            yield from choice(
                f"{path}.divisor", str(divisor), _DIVISORS.get(form["resource"], _BYTE_DIVISORS)
            )


def _check_env_from(path: str, source: EnvFromSource) -> Problems:
    if source.prefix:
        yield from named(f"{path}.prefix", source.prefix, variable_problem)
    sources = {"configMapRef": source.config_map_ref, "secretRef": source.secret_ref}
    yield from exactly_one(path, "a source", sources)
    for field, ref in sources.items():
        if ref is not None:
            yield from named(f"{path}.{field}.name", ref.name, dns_subdomain_problem)


def _check_mounts(path: str, container: Container, spec: PodSpec) -> Problems:
    volumes = {volume.name: volume for volume in spec.volumes}
    paths = []
    for index, mount in enumerate(container.volume_mounts):
        field_path = f"{path}.volumeMounts[{index}]"
        paths.append((f"{field_path}.mountPath", mount.mount_path))
        message = f"{quoted(mount.name)} is not the name of a volume of the pod"
        yield from problem_if(f"{field_path}.name", message, mount.name not in volumes)
        yield from required(f"{field_path}.mountPath", mount.mount_path)
        yield from _check_mount_options(field_path, mount, container)
    for index, device in enumerate(container.volume_devices):
        field_path = f"{path}.volumeDevices[{index}]"
        paths.append((f"{field_path}.devicePath", device.device_path))
        volume = volumes.get(device.name)
        claimed = volume is not None and {"persistentVolumeClaim", "ephemeral"} & set(volume.kinds)
        message = f"{quoted(device.name)} is not the name of a volume of the pod with a claim"
        yield from problem_if(f"{field_path}.name", message, not claimed)
        yield from required(f"{field_path}.devicePath", device.device_path)
        yield from no_steps_back(f"{field_path}.devicePath", device.device_path)
        mounted = any(mount.name == device.name for mount in container.volume_mounts)
        yield from problem_if(
            f"{field_path}.name", f"{quoted(device.name)} is already in volumeMounts", mounted
        )
    yield from unique(paths)


def _check_mount_options(path: str, mount: VolumeMount, container: Container) -> Problems:
    yield from inside(f"{path}.subPath", mount.sub_path)
    yield from inside(f"{path}.subPathExpr", mount.sub_path_expr)
    both = mount.sub_path and mount.sub_path_expr
    yield from problem_if(f"{path}.subPathExpr", "must not be set together with subPath", both)
    yield from optional_choice(f"{path}.mountPropagation", mount.mount_propagation, _PROPAGATIONS)
    privileged = container.security_context is not None and container.security_context.privileged
    yield from problem_if(
        f"{path}.mountPropagation",
        "Bidirectional is only for privileged containers",
        mount.mount_propagation == "Bidirectional" and not privileged,
    )
    yield from optional_choice(f"{path}.recursiveReadOnly", mount.recursive_read_only, _RECURSIVE)
    if mount.recursive_read_only in ("IfPossible", "Enabled"):
        path = f"{path}.recursiveReadOnly"
        yield from problem_if(path, "needs readOnly: true", not mount.read_only)
        yield from problem_if(
            path, "needs mountPropagation: None", mount.mount_propagation not in (None, "None")
        )


def _check_restarts(path: str, container: Container) -> Problems:
    rules = container.restart_policy_rules
    yield from optional_choice(
        f"{path}.restartPolicy", container.restart_policy, ("Always", "OnFailure", "Never")
    )
    yield from problem_if(
        f"{path}.restartPolicy",
        "must be set with restartPolicyRules",
        rules and container.restart_policy is None,
    )
    yield from problem_if(
        f"{path}.restartPolicyRules", f"must be at most {_MAX_RULES}", len(rules) > _MAX_RULES
    )
    for index, rule in enumerate(rules):
        field_path = f"{path}.restartPolicyRules[{index}]"
        yield from choice(f"{field_path}.action", rule.action, ("Restart", "RestartAllContainers"))
        if rule.exit_codes is None:
            yield Problem(f"{field_path}.exitCodes", "must be set")
        else:
            source = len(rule.exit_codes.values) > _MAX_EXIT_CODES
            yield from problem_if(
                f"{field_path}.exitCodes.values", f"must be at most {_MAX_EXIT_CODES}", source
            )
