"""Validation of pods before they are started.

The API server validates its own pods; a pod from a file or a URL is validated here, by the same rules as far
as they concern a node. In particular, no value that becomes part of a path, a command or a name on the host
may escape from it. Defaults must have been set before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pykubelet.api.names import (
    dns_label_problem,
    dns_subdomain_problem,
    label_value_problem,
    qualified_name_problem,
)
from pykubelet.api.pod import Pod, PodDNSConfig, PodSpec, Toleration, TopologySpreadConstraint
from pykubelet.api.selector import LabelSelector
from pykubelet.api.volume import Volume
from pykubelet.config.errors import Problem
from pykubelet.objects.references import object_references
from pykubelet.podconfig.validate_container import (
    Problems,
    address,
    check_container,
    check_pod_resources,
    check_pod_security,
    choice,
    host_port_conflicts,
    in_range,
    named,
    no_steps_back,
    optional_choice,
    problem_if,
    required,
    unique,
)
from pykubelet.util.text import quoted

MAX_ANNOTATION_BYTES = 256 * 1024
MAX_NAMESERVERS = 3
MAX_SEARCHES = 32
MAX_SEARCH_CHARACTERS = 2048
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
_INTEGER = re.compile(r"0|[1-9][0-9]{0,9}|-[0-9]{1,20}", re.ASCII)
"""Integer without a plus sign or, unless it is negative, leading zeros."""
_UID = re.compile(r"[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,126}[A-Za-z0-9])?", re.ASCII)
_SEARCH_LABEL = r"_?[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?"
_SEARCH = re.compile(rf"{_SEARCH_LABEL}(?:\.{_SEARCH_LABEL})*")
_HOST_PATH_TYPES = (
    "",
    "DirectoryOrCreate",
    "Directory",
    "FileOrCreate",
    "File",
    "Socket",
    "CharDevice",
    "BlockDevice",
)


@dataclass(frozen=True, slots=True)
class PodValidationOptions:
    """Rules that depend on feature gates; the defaults are those of the gates."""

    strict_ips: bool = True
    """Whether addresses with leading zeros and IPv4-mapped ones are rejected (`StrictIPCIDRValidation`)."""
    deletion_cost: bool = True
    """Whether the annotation with the cost of a deletion must be valid (`PodDeletionCost`)."""
    merged_label_keys: bool = True
    """Whether the selector of a topology spread constraint may have a key of its `matchLabelKeys` once.

    The API server adds these to the selector (`MatchLabelKeysInPodTopologySpreadSelectorMerge`).
    """


DEFAULT_OPTIONS = PodValidationOptions()


def validate_pod(
    pod: Pod, *, served: frozenset[str] | None = None, options: PodValidationOptions = DEFAULT_OPTIONS
) -> list[Problem]:
    """Return all problems of a pod; the paths are fields such as `spec.containers[0].image`.

    `served` are the kinds of API objects that are available to the pod (`configmaps`, `secrets`, ...: see
    `references.py`). None means all; a static pod, which has no API server, is validated with what the node
    itself serves, by default nothing.
    """
    return [
        *_check_metadata(pod, options),
        *_check_spec(pod.spec),
        *_check_volumes(pod.spec.volumes),
        *_check_containers(pod.spec),
        *_check_topology_spread(pod.spec.topology_spread_constraints, options),
        *_check_network(pod.spec, options),
        *check_pod_security(pod.spec),
        *check_pod_resources(pod.spec),
        *_check_references(pod, served),
    ]


def is_uid(text: str) -> bool:
    """Return whether a pod may have this UID, which names directories and cgroups."""
    return _UID.fullmatch(text) is not None


def _check_metadata(pod: Pod, options: PodValidationOptions) -> Problems:
    meta = pod.metadata
    yield from named("metadata.name", meta.name, dns_subdomain_problem)
    yield from named("metadata.namespace", meta.namespace, dns_label_problem)
    if not is_uid(meta.uid):
        yield Problem("metadata.uid", "must be letters, digits, '-', '_' or '.', or left out")
    for key, value in meta.labels.items():
        yield from named(f"metadata.labels[{quoted(key)}]", key, qualified_name_problem)
        if message := label_value_problem(value):
            yield Problem(f"metadata.labels[{quoted(key)}]", f"{quoted(value)} {message}")
    for key in meta.annotations:
        yield from named(f"metadata.annotations[{quoted(key)}]", key.lower(), qualified_name_problem)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in meta.annotations.items())
    yield from problem_if(
        "metadata.annotations",
        f"are {size} bytes long, but at most {MAX_ANNOTATION_BYTES} are allowed",
        size > MAX_ANNOTATION_BYTES,
    )
    cost = meta.annotations.get(DELETION_COST_ANNOTATION)
    if options.deletion_cost and cost is not None:
        is_good = _INTEGER.fullmatch(cost) and -(2**31) <= int(cost) < 2**31
        yield from problem_if(
            f"metadata.annotations[{quoted(DELETION_COST_ANNOTATION)}]",
            f"{quoted(cost)} must be a 32bit integer",
            not is_good,
        )


def _check_spec(spec: PodSpec) -> Problems:
    for field, value, allowed in (
        ("restartPolicy", spec.restart_policy, ("Always", "OnFailure", "Never")),
        ("dnsPolicy", spec.dns_policy, ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")),
        ("preemptionPolicy", spec.preemption_policy, ("PreemptLowerPriority", "Never")),
        ("os.name", spec.os.name if spec.os else None, ("linux", "windows")),
    ):
        yield from optional_choice(f"spec.{field}", value, allowed)
    for field, name, problem in (
        ("hostname", spec.hostname, dns_label_problem),
        ("subdomain", spec.subdomain, dns_label_problem),
        ("hostnameOverride", spec.hostname_override, dns_subdomain_problem),
        ("nodeName", spec.node_name, dns_subdomain_problem),
        ("serviceAccountName", spec.service_account_name, dns_subdomain_problem),
        ("priorityClassName", spec.priority_class_name, dns_subdomain_problem),
        ("runtimeClassName", spec.runtime_class_name, dns_subdomain_problem),
    ):
        if name:
            yield from named(f"spec.{field}", name, problem)
    yield from in_range("spec.activeDeadlineSeconds", spec.active_deadline_seconds, 1)
    yield from in_range(
        "spec.terminationGracePeriodSeconds", spec.termination_grace_period_seconds, 0, 2**63 - 1
    )
    for index, gate in enumerate(spec.readiness_gates):
        yield from named(
            f"spec.readinessGates[{index}].conditionType", gate.condition_type, qualified_name_problem
        )
    for index, toleration in enumerate(spec.tolerations):
        yield from _check_toleration(f"spec.tolerations[{index}]", toleration)


def _check_toleration(path: str, toleration: Toleration) -> Problems:
    if toleration.key:
        yield from named(f"{path}.key", toleration.key, qualified_name_problem)
    yield from choice(f"{path}.operator", toleration.operator, ("", "Equal", "Exists"))
    yield from choice(
        f"{path}.effect", toleration.effect, ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
    )
    exists = toleration.operator == "Exists"
    yield from problem_if(
        f"{path}.operator", "must be Exists without a key", not toleration.key and not exists
    )
    yield from problem_if(f"{path}.value", "must be empty with operator Exists", exists and toleration.value)
    yield from problem_if(
        f"{path}.effect",
        "must be NoExecute with tolerationSeconds",
        toleration.toleration_seconds is not None and toleration.effect != "NoExecute",
    )


def _check_topology_spread(
    constraints: list[TopologySpreadConstraint], options: PodValidationOptions
) -> Problems:
    seen = set()
    for index, constraint in enumerate(constraints):
        path = f"spec.topologySpreadConstraints[{index}]"
        yield from in_range(f"{path}.maxSkew", constraint.max_skew, 1)
        yield from required(f"{path}.topologyKey", constraint.topology_key)
        action = constraint.when_unsatisfiable
        yield from choice(f"{path}.whenUnsatisfiable", action, ("DoNotSchedule", "ScheduleAnyway"))
        pair = constraint.topology_key, action
        message = f"must not be equal to those of another constraint: {', '.join(map(quoted, pair))}"
        yield from problem_if(f"{path}.{{topologyKey, whenUnsatisfiable}}", message, pair in seen)
        seen.add(pair)
        if constraint.min_domains is not None:
            yield from in_range(f"{path}.minDomains", constraint.min_domains, 1)
            yield from problem_if(
                f"{path}.minDomains", "needs whenUnsatisfiable DoNotSchedule", action != "DoNotSchedule"
            )
        for field, policy in (
            ("nodeAffinityPolicy", constraint.node_affinity_policy),
            ("nodeTaintsPolicy", constraint.node_taints_policy),
        ):
            yield from optional_choice(f"{path}.{field}", policy, ("Honor", "Ignore"))
        yield from _check_match_label_keys(path, constraint, options)
        if constraint.label_selector is not None:
            yield from _check_selector(f"{path}.labelSelector", constraint.label_selector)


def _check_match_label_keys(
    path: str, constraint: TopologySpreadConstraint, options: PodValidationOptions
) -> Problems:
    selector, keys = constraint.label_selector, constraint.match_label_keys
    if keys and selector is None:
        yield Problem(f"{path}.matchLabelKeys", "must not be set without labelSelector")
        return
    selected = list(selector.match_labels) if selector is not None else []
    selected += [each.key for each in selector.match_expressions] if selector is not None else []
    allowed = 1 if options.merged_label_keys else 0
    for index, key in enumerate(keys):
        yield from named(f"{path}.matchLabelKeys[{index}]", key, qualified_name_problem)
        message = f"{quoted(key)} must not be in labelSelector as well"
        yield from problem_if(f"{path}.matchLabelKeys[{index}]", message, selected.count(key) > allowed)


def _check_selector(path: str, selector: LabelSelector) -> Problems:
    for key, value in selector.match_labels.items():
        yield from named(f"{path}.matchLabels[{quoted(key)}]", key, qualified_name_problem)
        if message := label_value_problem(value):
            yield Problem(f"{path}.matchLabels[{quoted(key)}]", f"{quoted(value)} {message}")
    for index, each in enumerate(selector.match_expressions):
        at = f"{path}.matchExpressions[{index}]"
        yield from named(f"{at}.key", each.key, qualified_name_problem)
        yield from choice(f"{at}.operator", each.operator, ("In", "NotIn", "Exists", "DoesNotExist"))
        if each.operator in ("In", "NotIn"):
            yield from problem_if(f"{at}.values", f"must not be empty with {each.operator}", not each.values)
        elif each.operator in ("Exists", "DoesNotExist"):
            yield from problem_if(f"{at}.values", f"must be empty with {each.operator}", each.values)
        for position, value in enumerate(each.values):
            if message := label_value_problem(value):
                yield Problem(f"{at}.values[{position}]", f"{quoted(value)} {message}")


def _check_volumes(volumes: list[Volume]) -> Problems:
    for index, volume in enumerate(volumes):
        path = f"spec.volumes[{index}]"
        yield from named(f"{path}.name", volume.name, dns_label_problem)
        match volume.kinds:
            case ():
                yield Problem(path, "must have a kind, such as emptyDir")
            case (_, _, *_):
                yield Problem(path, f"has {' and '.join(volume.kinds)}, but must have only one kind")
        if volume.empty_dir is not None and volume.empty_dir.size_limit is not None:
            yield from problem_if(
                f"{path}.emptyDir.sizeLimit", "must not be negative", volume.empty_dir.size_limit.nanos < 0
            )
        if volume.host_path is not None:
            yield from required(f"{path}.hostPath.path", volume.host_path.path)
            yield from no_steps_back(f"{path}.hostPath.path", volume.host_path.path)
            yield from optional_choice(f"{path}.hostPath.type", volume.host_path.type, _HOST_PATH_TYPES)
    yield from unique((f"spec.volumes[{index}].name", volume.name) for index, volume in enumerate(volumes))


def _check_containers(spec: PodSpec) -> Problems:
    yield from problem_if("spec.containers", "must have at least one container", not spec.containers)
    yield from problem_if(
        "spec.ephemeralContainers",
        "cannot be in a manifest: add them to a running pod",
        spec.ephemeral_containers,
    )
    containers = [
        *((f"spec.containers[{index}]", container, False) for index, container in enumerate(spec.containers)),
        *(
            (f"spec.initContainers[{index}]", container, True)
            for index, container in enumerate(spec.init_containers)
        ),
    ]
    yield from unique((f"{path}.name", container.name) for path, container, _ in containers)
    for path, container, is_init in containers:
        yield from check_container(path, container, spec, is_init=is_init)
        if is_init:  # Init containers run sequentially and may share a port.
            yield from host_port_conflicts([(path, container)])
    yield from host_port_conflicts(
        [(path, container) for path, container, is_init in containers if not is_init]
    )


def _check_network(spec: PodSpec, options: PodValidationOptions) -> Problems:
    for index, alias in enumerate(spec.host_aliases):
        yield from address(f"spec.hostAliases[{index}].ip", alias.ip, strict=options.strict_ips)
        for position, hostname in enumerate(alias.hostnames):
            yield from named(
                f"spec.hostAliases[{index}].hostnames[{position}]", hostname, dns_subdomain_problem
            )
    config = spec.dns_config or PodDNSConfig()
    yield from problem_if(
        "spec.dnsConfig.nameservers",
        "must have at least one address with dnsPolicy None",
        spec.dns_policy == "None" and not config.nameservers,
    )
    for field, values, limit in (
        ("nameservers", config.nameservers, MAX_NAMESERVERS),
        ("searches", config.searches, MAX_SEARCHES),
    ):
        message = f"has {len(values)} entries, but at most {limit} are allowed"
        yield from problem_if(f"spec.dnsConfig.{field}", message, len(values) > limit)
    for index, server in enumerate(config.nameservers):
        yield from address(f"spec.dnsConfig.nameservers[{index}]", server, strict=options.strict_ips)
    yield from problem_if(
        "spec.dnsConfig.searches",
        f"must not be longer than {MAX_SEARCH_CHARACTERS} characters in all",
        len(" ".join(config.searches)) > MAX_SEARCH_CHARACTERS,
    )
    for index, search in enumerate(config.searches):
        good = search == "." or (len(search) <= 254 and _SEARCH.fullmatch(search.removesuffix(".")))
        message = f"{quoted(search)} must be a DNS name such as example.com"
        yield from problem_if(f"spec.dnsConfig.searches[{index}]", message, not good)
    for index, option in enumerate(config.options):
        yield from required(f"spec.dnsConfig.options[{index}].name", option.name)
    if spec.hostname_override is not None:
        path = "spec.hostnameOverride"
        yield from problem_if(path, "must not be set with setHostnameAsFQDN", spec.set_hostname_as_fqdn)
        yield from problem_if(path, "must not be set with hostNetwork", spec.host_network)
        yield from problem_if(path, "must not be longer than 64 characters", len(spec.hostname_override) > 64)
        yield from required(path, spec.hostname_override)


def _check_references(pod: Pod, served: frozenset[str] | None) -> Problems:
    if served is None:
        return
    for path, kind in object_references(pod):
        if kind not in served:
            yield Problem(
                path, f"refers to {kind}, which only an API server has: remove it from the manifest"
            )
