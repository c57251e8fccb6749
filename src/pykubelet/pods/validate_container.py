"""The checks of one container: image, ports, environment, mounts, restarts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pykubelet.api.names import dns_label_problem, dns_subdomain_problem, qualified_name_problem
from pykubelet.api.pod import (
    Container,
    ContainerPort,
    EnvFromSource,
    EnvVar,
    EnvVarSource,
    PodSpec,
    VolumeMount,
)
from pykubelet.api.quantity import Quantity
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem
from pykubelet.pods.checks import (
    Problems,
    choice,
    exactly_one,
    in_range,
    inside,
    key_problem,
    named,
    no_steps_back,
    optional_choice,
    port_name_problem,
    refused,
    required,
    unique,
    variable_problem,
)
from pykubelet.pods.validate_handlers import check_hooks, check_probes
from pykubelet.pods.validate_resources import check_resources
from pykubelet.pods.validate_security import check_container_security

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
_MOST_RULES = 20
_MOST_EXIT_CODES = 255


def check_container(path: str, container: Container, spec: PodSpec, *, is_init: bool) -> Problems:
    """Give everything that is wrong with a container of this pod; `path` is where it stands."""
    yield from named(f"{path}.name", container.name, dns_label_problem)
    yield from required(f"{path}.image", container.image)
    padded = container.image != container.image.strip()
    yield from refused(f"{path}.image", "must not begin or end with a space", padded)
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
    for index, many in enumerate(container.env_from):
        yield from _check_env_from(f"{path}.envFrom[{index}]", many)
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
            yield from refused(f"{path}.{field}", message, value is not None)
    else:
        yield from check_probes(path, container)
        yield from check_hooks(f"{path}.lifecycle", container, spec)


def host_port_conflicts(containers: Iterable[tuple[str, Container]]) -> Problems:
    """Two containers that run together cannot have the same port of the host."""
    return unique(
        (f"{path}.ports[{index}].hostPort", f"{published.protocol}/{published.host_ip}/{published.host_port}")
        for path, container in containers
        for index, published in enumerate(container.ports)
        if published.host_port
    )


def _check_ports(path: str, ports: list[ContainerPort], spec: PodSpec) -> Problems:
    for index, one in enumerate(ports):
        place = f"{path}[{index}]"
        if one.name:
            yield from named(f"{place}.name", one.name, port_name_problem)
        yield from in_range(f"{place}.containerPort", one.container_port, 1, 65535)
        yield from in_range(f"{place}.hostPort", one.host_port, 0, 65535)
        yield from choice(f"{place}.protocol", one.protocol, ("TCP", "UDP", "SCTP"))
        yield from refused(
            f"{place}.hostPort",
            f"is {one.host_port}, but must be the containerPort with hostNetwork",
            spec.host_network and one.host_port != one.container_port,
        )
    yield from unique((f"{path}[{index}].name", one.name) for index, one in enumerate(ports) if one.name)


def _check_variable(path: str, variable: EnvVar, spec: PodSpec) -> Problems:
    yield from named(f"{path}.name", variable.name, variable_problem)
    if (given := variable.value_from) is None:
        return
    path = f"{path}.valueFrom"
    sources = {
        "fieldRef": given.field_ref,
        "resourceFieldRef": given.resource_field_ref,
        "configMapKeyRef": given.config_map_key_ref,
        "secretKeyRef": given.secret_key_ref,
        "fileKeyRef": given.file_key_ref,
    }
    yield from refused(path, "must not be set together with a value", variable.value)
    yield from exactly_one(path, "a source", sources)
    yield from _check_pod_fields(path, given)
    for field, key in (("configMapKeyRef", given.config_map_key_ref), ("secretKeyRef", given.secret_key_ref)):
        if key is not None:
            yield from named(f"{path}.{field}.name", key.name, dns_subdomain_problem)
            yield from named(f"{path}.{field}.key", key.key, key_problem)
    if (file := given.file_key_ref) is not None:
        path = f"{path}.fileKeyRef"
        yield from named(f"{path}.key", file.key, variable_problem)
        yield from required(f"{path}.path", file.path)
        yield from no_steps_back(f"{path}.path", file.path)
        folders = [volume.name for volume in spec.volumes if volume.empty_dir is not None]
        message = f"{quoted(file.volume_name)} must be an emptyDir volume of the pod"
        yield from refused(f"{path}.volumeName", message, file.volume_name not in folders)


def _check_pod_fields(path: str, given: EnvVarSource) -> Problems:
    if (field := given.field_ref) is not None:
        yield from choice(f"{path}.fieldRef.apiVersion", field.api_version, ("v1",))
        if keyed := _KEYED_FIELD.fullmatch(field.field_path):
            key = keyed[2].lower() if keyed[1] == "metadata.annotations" else keyed[2]
            yield from named(f"{path}.fieldRef.fieldPath", key, qualified_name_problem)
        else:
            yield from choice(f"{path}.fieldRef.fieldPath", field.field_path, _POD_FIELDS)
    if (amount := given.resource_field_ref) is not None:
        path = f"{path}.resourceFieldRef"
        form = _RESOURCE_FIELD.fullmatch(amount.resource)
        message = f"is {quoted(amount.resource)}, but must be a limit or request such as limits.cpu"
        yield from refused(f"{path}.resource", message, form is None)
        try:
            divisor = Quantity.parse(str(amount.divisor))
        except ValueError as err:
            yield Problem(f"{path}.divisor", str(err))
            return
        if form is not None and divisor.nanos:
            yield from choice(
                f"{path}.divisor", str(divisor), _DIVISORS.get(form["resource"], _BYTE_DIVISORS)
            )


def _check_env_from(path: str, many: EnvFromSource) -> Problems:
    if many.prefix:
        yield from named(f"{path}.prefix", many.prefix, variable_problem)
    sources = {"configMapRef": many.config_map_ref, "secretRef": many.secret_ref}
    yield from exactly_one(path, "a source", sources)
    for field, ref in sources.items():
        if ref is not None:
            yield from named(f"{path}.{field}.name", ref.name, dns_subdomain_problem)


def _check_mounts(path: str, container: Container, spec: PodSpec) -> Problems:
    volumes = {volume.name: volume for volume in spec.volumes}
    places = []
    for index, mount in enumerate(container.volume_mounts):
        place = f"{path}.volumeMounts[{index}]"
        places.append((f"{place}.mountPath", mount.mount_path))
        message = f"{quoted(mount.name)} is not the name of a volume of the pod"
        yield from refused(f"{place}.name", message, mount.name not in volumes)
        yield from required(f"{place}.mountPath", mount.mount_path)
        yield from _check_mount_options(place, mount, container)
    for index, device in enumerate(container.volume_devices):
        place = f"{path}.volumeDevices[{index}]"
        places.append((f"{place}.devicePath", device.device_path))
        volume = volumes.get(device.name)
        claimed = volume is not None and {"persistentVolumeClaim", "ephemeral"} & set(volume.kinds)
        message = f"{quoted(device.name)} is not the name of a volume of the pod with a claim"
        yield from refused(f"{place}.name", message, not claimed)
        yield from required(f"{place}.devicePath", device.device_path)
        yield from no_steps_back(f"{place}.devicePath", device.device_path)
        mounted = any(mount.name == device.name for mount in container.volume_mounts)
        yield from refused(f"{place}.name", f"{quoted(device.name)} is already in volumeMounts", mounted)
    yield from unique(places)


def _check_mount_options(path: str, mount: VolumeMount, container: Container) -> Problems:
    yield from inside(f"{path}.subPath", mount.sub_path)
    yield from inside(f"{path}.subPathExpr", mount.sub_path_expr)
    both = mount.sub_path and mount.sub_path_expr
    yield from refused(f"{path}.subPathExpr", "must not be set together with subPath", both)
    yield from optional_choice(f"{path}.mountPropagation", mount.mount_propagation, _PROPAGATIONS)
    privileged = container.security_context is not None and container.security_context.privileged
    yield from refused(
        f"{path}.mountPropagation",
        "Bidirectional is only for privileged containers",
        mount.mount_propagation == "Bidirectional" and not privileged,
    )
    yield from optional_choice(f"{path}.recursiveReadOnly", mount.recursive_read_only, _RECURSIVE)
    if mount.recursive_read_only in ("IfPossible", "Enabled"):
        path = f"{path}.recursiveReadOnly"
        yield from refused(path, "needs readOnly: true", not mount.read_only)
        yield from refused(
            path, "needs mountPropagation: None", mount.mount_propagation not in (None, "None")
        )


def _check_restarts(path: str, container: Container) -> Problems:
    rules = container.restart_policy_rules
    yield from optional_choice(
        f"{path}.restartPolicy", container.restart_policy, ("Always", "OnFailure", "Never")
    )
    yield from refused(
        f"{path}.restartPolicy",
        "must be set with restartPolicyRules",
        rules and container.restart_policy is None,
    )
    yield from refused(
        f"{path}.restartPolicyRules", f"must be at most {_MOST_RULES}", len(rules) > _MOST_RULES
    )
    for index, rule in enumerate(rules):
        place = f"{path}.restartPolicyRules[{index}]"
        yield from choice(f"{place}.action", rule.action, ("Restart", "RestartAllContainers"))
        if rule.exit_codes is None:
            yield Problem(f"{place}.exitCodes", "must be set")
        else:
            many = len(rule.exit_codes.values) > _MOST_EXIT_CODES
            yield from refused(f"{place}.exitCodes.values", f"must be at most {_MOST_EXIT_CODES}", many)
