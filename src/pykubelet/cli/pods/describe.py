"""`pykubelet describe`: spec, container states, usage, conditions, events and timeline of one pod.

The text is a pure function of the pod, its history and its usage. Empty sections are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from pykubelet.api.meta import Resources
from pykubelet.api.pod import (
    Container,
    EnvVar,
    ExecAction,
    GRPCAction,
    HTTPGetAction,
    Pod,
    Probe,
    ProbeAction,
    ResourceRequirements,
    TCPSocketAction,
    is_sidecar,
    probe_handler,
)
from pykubelet.api.pod_status import ContainerState, ContainerStatus
from pykubelet.api.quantity import Quantity
from pykubelet.api.stats import ContainerStats, PodStats
from pykubelet.api.volume import Volume
from pykubelet.cli.client import KubeletNotRunning, all_containers, choose_pod, run_command
from pykubelet.cli.node_access import select_node
from pykubelet.cli.offline import node_pods
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.logs import container_status
from pykubelet.cli.pods.usage import (
    NO_TRAFFIC,
    container_storage,
    format_cpu,
    format_share,
    format_size,
    memory_sparkline,
    nano_cores,
    pod_nano_cores,
    pod_working_set,
    pressure,
    share,
    traffic,
    used_bytes,
    working_set,
)
from pykubelet.cli.printers import (
    escape_unprintable,
    format_age,
    format_columns,
    format_duration,
    pod_creation_time,
    ready_count,
    status_text,
    termination_reason,
)
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.server.pods import PodJournal
from pykubelet.stats.samples import MemoryCurves

Fields = list[tuple[str, str]]
_NO_RESOURCES = ResourceRequirements()
_CONFIG_ANNOTATION_PREFIX = "kubernetes.io/config."


def describe_text(
    pod: Pod,
    state: str,
    journal: PodJournal,
    now: datetime,
    usage: PodStats | None = None,
    curves: MemoryCurves | None = None,
) -> list[str]:
    """Return the description as lines; `state` is that of the pod worker.

    `usage` and `curves` (the memory of the last minutes) are None if they are not reported.
    """
    sections = [
        ("", _fields(_pod_fields(pod, state, now))),
        ("Init containers:", _containers(pod, pod.spec.init_containers, now)),
        ("Containers:", _containers(pod, pod.spec.containers, now)),
        ("Ephemeral containers:", _containers(pod, pod.spec.ephemeral_containers, now)),
        ("Usage:", _usage(pod, usage, now) if usage is not None else []),
        ("Memory of the last minutes:", _memory_curves(pod, curves) if curves is not None else []),
        ("Volumes:", _fields([(volume.name, _volume(volume)) for volume in pod.spec.volumes])),
        ("Conditions:", _conditions(pod, now)),
        ("Events:", _events(journal.events, now)),
        ("Timeline:", _timeline(journal.timeline)),
    ]
    lines: list[str] = []
    for heading, body in sections:
        if body:
            lines += ["", heading] if heading else []
            lines += [f"  {line}" if heading else line for line in body]
    return lines


def probe_text(probe: Probe) -> str:
    """Return the handler, the periods and the thresholds of a probe as text."""
    name, action = probe_handler(probe) or ("nothing", None)
    handler = f"{name.replace('_', '-')} {_action_text(action)}".rstrip()
    seconds = {
        "delay": probe.initial_delay_seconds,
        "timeout": probe.timeout_seconds,
        "period": probe.period_seconds,
    }
    times = " ".join(f"{name}={value}s" for name, value in seconds.items())
    return f"{handler} {times} #success={probe.success_threshold} #failure={probe.failure_threshold}"


def _action_text(action: ProbeAction | None) -> str:
    match action:
        case ExecAction():
            return f"[{' '.join(action.command)}]"
        case HTTPGetAction():
            return _url(action)
        case TCPSocketAction():
            return f"{action.host}:{action.port}"
        case GRPCAction():
            return f":{action.port} {action.service or ''}"
        case None:
            return ""
        case _:  # a newer type of probe
            return " ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(action).items())


def state_text(state: ContainerState, now: datetime) -> str:
    """Return the state of a container in one line."""
    if state.running is not None:
        return f"Running, for {format_age(state.running.started_at, now)}"
    if state.terminated is not None:
        terminated = state.terminated
        parts = [f"Terminated: {termination_reason(terminated)}, exit code {terminated.exit_code}"]
        parts += [f"signal {terminated.signal}"] if terminated.signal else []
        if terminated.started_at is not None and terminated.finished_at is not None:
            parts.append(
                f"after {format_duration((terminated.finished_at - terminated.started_at).total_seconds())}"
            )
        parts += (
            [f"{format_age(terminated.finished_at, now)} ago"] if terminated.finished_at is not None else []
        )
        return ", ".join(parts) + (f": {terminated.message.strip()}" if terminated.message else "")
    if state.waiting is not None and state.waiting.reason:
        message = f": {state.waiting.message}" if state.waiting.message else ""
        return f"Waiting: {state.waiting.reason}{message}"
    return "Waiting"


def _pod_fields(pod: Pod, state: str, now: datetime) -> Fields:
    meta, spec, status = pod.metadata, pod.spec, pod.status
    ready, total = ready_count(pod)
    annotations = {
        key: value for key, value in meta.annotations.items() if not key.startswith(_CONFIG_ANNOTATION_PREFIX)
    }
    host = f" ({status.host_ip})" if status.host_ip else ""
    created_at = pod_creation_time(pod)
    return _nonempty_fields(
        ("Name", meta.name),
        ("Namespace", meta.namespace),
        ("UID", meta.uid),
        ("Status", f"{status_text(pod, state)}, {ready} of {total} containers ready"),
        ("Phase", status.phase),
        ("Worker", state),
        ("Reason", status.reason),
        ("Message", status.message),
        ("Node", f"{spec.node_name}{host}"),
        ("IPs", ", ".join(address.ip for address in status.pod_ips) or status.pod_ip),
        (
            "Since",
            f"{created_at:%Y-%m-%d %H:%M:%S %Z} ({format_age(created_at, now)} ago)" if created_at else "",
        ),
        ("Source", meta.annotations.get(f"{_CONFIG_ANNOTATION_PREFIX}source", "")),
        ("Labels", ", ".join(f"{key}={value}" for key, value in meta.labels.items())),
        ("Annotations", ", ".join(f"{key}={value}" for key, value in annotations.items())),
        ("QoS class", status.qos_class),
        ("Restart policy", spec.restart_policy),
        ("Grace period", _seconds(spec.termination_grace_period_seconds)),
        ("Deadline", _seconds(spec.active_deadline_seconds)),
        ("Host access", ", ".join(_host_access(pod))),
    )


def _host_access(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    for name, shared in (("network", spec.host_network), ("PIDs", spec.host_pid), ("IPC", spec.host_ipc)):
        if shared:
            yield name


def _containers(pod: Pod, containers: Iterable[Container], now: datetime) -> list[str]:
    lines: list[str] = []
    for container in containers:
        fields = _container(container, container_status(pod, container.name), now)
        lines += [f"{container.name}:", *(f"  {line}" for line in _fields(fields))]
    return lines


def _container(container: Container, status: ContainerStatus | None, now: datetime) -> Fields:
    ports = (
        f"{port.container_port}/{port.protocol or 'TCP'}"
        + (f" at {port.host_ip or '*'}:{port.host_port}" if port.host_port else "")
        for port in container.ports
    )
    return _nonempty_fields(
        *_container_state(status, now),
        ("Image", container.image),
        ("Image ID", status.image_id if status is not None else ""),
        ("Command", " ".join(container.command)),
        ("Arguments", " ".join(container.args)),
        ("Ports", ", ".join(ports)),
        ("Restarts", "always (a sidecar)" if is_sidecar(container) else ""),
        ("Startup", probe_text(container.startup_probe) if container.startup_probe else ""),
        ("Liveness", probe_text(container.liveness_probe) if container.liveness_probe else ""),
        ("Readiness", probe_text(container.readiness_probe) if container.readiness_probe else ""),
        ("Requests", _resources(container.resources.requests)),
        ("Limits", _resources(container.resources.limits)),
        ("Environment", ", ".join(map(_variable, container.env))),
        ("Mounts", ", ".join(_mounts(container))),
    )


def _usage(pod: Pod, usage: PodStats, now: datetime) -> list[str]:
    """Return the usage of each measured container, and of the pod."""
    lines: list[str] = []
    declared = {container.name: container for container in all_containers(pod)}
    for stats in usage.containers:
        resources = declared[stats.name].resources if stats.name in declared else _NO_RESOURCES
        lines += _usage_of(stats.name, _container_usage(stats, resources))
    network = traffic(usage.network)
    sizes = f"{format_size(network.received)} received, {format_size(network.sent)} sent"
    time = usage.cpu.time if usage.cpu is not None else None
    return lines + _usage_of(
        "Whole pod",
        _nonempty_fields(
            ("CPU", _cpu_usage(pod_nano_cores(usage), _NO_RESOURCES)),
            ("Memory", _memory_usage(pod_working_set(usage), _NO_RESOURCES)),
            ("Ephemeral storage", _known(used_bytes(usage.ephemeral_storage))),
            ("Network", sizes if network != NO_TRAFFIC else ""),
            ("Measured", f"{format_age(time, now)} ago" if time is not None else ""),
        ),
    )


def _memory_curves(pod: Pod, curves: MemoryCurves) -> list[str]:
    """Return the memory curve of each container that was measured, in one line."""
    declared = {container.name: container.resources.limits.get("memory") for container in all_containers(pod)}
    fields = []
    for curve in curves.containers:
        limit = declared.get(curve.name)
        text = memory_sparkline(curve, curves.slot_seconds, int(limit) if limit is not None else None)
        fields.append((escape_unprintable(curve.name, lines=False), text))
    return _fields(_nonempty_fields(*fields))


def _usage_of(name: str, fields: Fields) -> list[str]:
    if not fields:
        return []
    return [f"{escape_unprintable(name, lines=False)}:", *(f"  {line}" for line in _fields(fields))]


def _container_usage(stats: ContainerStats, resources: ResourceRequirements) -> Fields:
    layer, logs, total = used_bytes(stats.rootfs), used_bytes(stats.logs), container_storage(stats)
    storage = f"{_known(total)} (writable layer {format_size(layer)}, logs {format_size(logs)})"
    waiting = pressure(stats.cpu)
    return _nonempty_fields(
        ("CPU", _cpu_usage(nano_cores(stats.cpu), resources)),
        ("CPU pressure", f"{waiting:.1f}% of the last 10s" if waiting else ""),
        ("Memory", _memory_usage(working_set(stats.memory), resources)),
        ("Ephemeral storage", storage if total is not None else ""),
    )


def _cpu_usage(nanos: int | None, resources: ResourceRequirements) -> str:
    if nanos is None:
        return ""
    bounds = ((name, amounts.get("cpu")) for name, amounts in _bounds(resources))
    shares = [(name, amount, share(nanos, amount.nanos)) for name, amount in bounds if amount is not None]
    return format_cpu(nanos) + _shares(shares)


def _memory_usage(size: int | None, resources: ResourceRequirements) -> str:
    if size is None:
        return ""
    bounds = ((name, amounts.get("memory")) for name, amounts in _bounds(resources))
    shares = [(name, amount, share(size, int(amount))) for name, amount in bounds if amount is not None]
    return format_size(size) + _shares(shares)


def _bounds(resources: ResourceRequirements) -> tuple[tuple[str, Resources], ...]:
    return ("request", resources.requests), ("limit", resources.limits)


def _shares(shares: Iterable[tuple[str, Quantity, float | None]]) -> str:
    texts = [f"{format_share(percent)} of the {name} {amount}" for name, amount, percent in shares]
    return f" ({', '.join(texts)})" if texts else ""


def _known(size: int | None) -> str:
    return "" if size is None else format_size(size)


def _container_state(status: ContainerStatus | None, now: datetime) -> Fields:
    if status is None:
        return [("State", "not reported yet")]
    last = status.last_state
    return [
        ("State", state_text(status.state, now)),
        ("Last state", state_text(last, now) if last != ContainerState() else ""),
        ("Ready", "yes" if status.ready else "no"),
        ("Restart count", str(status.restart_count)),
        ("Container ID", status.container_id or ""),
    ]


def _mounts(container: Container) -> Iterator[str]:
    for mount in container.volume_mounts:
        part = f"/{mount.sub_path or mount.sub_path_expr}" if mount.sub_path or mount.sub_path_expr else ""
        yield f"{mount.mount_path} from {mount.name}{part}" + (" (read-only)" if mount.read_only else "")


def _variable(variable: EnvVar) -> str:
    source = variable.value_from
    if source is None:
        return f"{variable.name}={variable.value}"
    if source.field_ref is not None:
        return f"{variable.name} from {source.field_ref.field_path}"
    if source.resource_field_ref is not None:
        return f"{variable.name} from {source.resource_field_ref.resource}"
    key = source.secret_key_ref or source.config_map_key_ref
    kind = "secret" if source.secret_key_ref is not None else "configMap"
    return (
        f"{variable.name} from {kind} {key.name}/{key.key}"
        if key is not None
        else f"{variable.name} from a file"
    )


def _volume(volume: Volume) -> str:
    if volume.host_path is not None:
        return f"hostPath {volume.host_path.path}"
    return ", ".join(volume.kinds) or "emptyDir"


def _conditions(pod: Pod, now: datetime) -> list[str]:
    rows = [
        (
            found.type,
            found.status,
            format_age(found.last_transition_time, now),
            found.reason or "",
            found.message or "",
        )
        for found in pod.status.conditions
    ]
    return format_columns([("TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"), *rows]) if rows else []


def _events(events: Sequence[Event], now: datetime) -> list[str]:
    rows = []
    for event in sorted(events, key=lambda event: event.last):
        age = format_duration(now.timestamp() - event.last)
        if event.count > 1:
            age += f" (x{event.count} over {format_duration(now.timestamp() - event.first)})"
        rows.append((age, event.kind, event.reason, event.where, event.message))
    return format_columns([("AGE", "TYPE", "REASON", "WHERE", "MESSAGE"), *rows]) if rows else []


def _timeline(entries: Sequence[TimelineEntry]) -> list[str]:
    """Return each entry of the timeline with its time and the time since the previous one."""
    rows, previous_time = [], entries[0].time if entries else 0.0
    for entry in entries:
        local_time = datetime.fromtimestamp(entry.time, UTC).astimezone()
        rows.append(
            (
                f"{local_time:%H:%M:%S}.{local_time.microsecond // 1000:03d}",
                _elapsed(entry.time - previous_time),
                entry.component,
                entry.text,
            )
        )
        previous_time = entry.time
    return format_columns([("TIME", "AFTER", "STATION", "DECISION"), *rows]) if rows else []


def _elapsed(seconds: float) -> str:
    return f"+{seconds:.3f}s" if abs(seconds) < 10 else f"+{format_duration(seconds)}"


def _nonempty_fields(*fields: tuple[str, str]) -> Fields:
    return [(name, value) for name, value in fields if value]


def _fields(fields: Fields) -> list[str]:
    width = max((len(name) for name, _ in fields), default=0) + 1
    return [f"{name + ':':<{width}} {escape_unprintable(value, lines=False)}" for name, value in fields]


def _resources(amounts: Resources) -> str:
    return ", ".join(f"{name} {amount}" for name, amount in amounts.items())


def _seconds(value: int | None) -> str:
    return f"{value}s" if value is not None else ""


def _url(request: HTTPGetAction) -> str:
    return f"{(request.scheme or 'HTTP').lower()}://{request.host}:{request.port}{request.path or '/'}"


PROGRAM = "pykubelet describe"


def run_describe(selection: NodeSelection, name: str) -> int:
    """Print the description; return the exit code."""

    def work() -> int:
        selected = select_node(selection)
        client = selected.client
        node = node_pods(selected, PROGRAM)
        pod = choose_pod(node.pods, name, node.states)
        try:
            journal = client.journal(pod.uid)
        except KubeletNotRunning:
            journal = PodJournal()
        state = node.states.get(pod.uid, "")
        usage = client.pod_usage(brief=False).get(pod.uid)
        curves = client.memory_curves(pod.uid)
        print("\n".join(describe_text(pod, state, journal, datetime.now(UTC), usage, curves)))
        return 0

    return run_command(PROGRAM, work)
