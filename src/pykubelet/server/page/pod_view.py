"""Page of one pod: why it does not run, its life on one time axis above charts, events, logs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cm.qos import pod_limits, pod_requests
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.podconfig.wait_for import WAITING
from pykubelet.probes.types import ProbeHistory
from pykubelet.server.page.drawings import dots, time_axis
from pykubelet.server.page.facts import LogTail, PageSettings, PodDetails
from pykubelet.server.page.history import SLOT_SECONDS, SLOTS, History
from pykubelet.server.page.html import (
    EMPTY,
    Child,
    Html,
    Section,
    badge,
    card,
    card_header,
    count,
    fields,
    seconds,
    size,
    table,
    tag,
)
from pykubelet.server.page.life import lanes, start_end, start_of
from pykubelet.server.page.parts import chain, chart, log_command, pod_command, pull_row
from pykubelet.status.columns import (
    format_age,
    format_duration,
    pod_creation_time,
    ready_count,
    restart_count,
    termination_reason,
)
from pykubelet.status.diagnosis import summary_status

SHORTEST_SECONDS = 300.0
_MOST_LABELS = 20
_MOST_EVENTS = 50
_ORDINARY_WAITS = frozenset({"Waiting", "ContainerCreating", "PodInitializing", WAITING})
_HIDDEN_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration", "kubernetes.io/config.")
"""The first repeats the values of environment variables; the others are the kubelet's own."""


def series_of(pod: Pod) -> list[str]:
    """Return the names of the series on the pod's page."""
    names = [container.name for container in pod.spec.containers]
    per_container = [f"{kind}@{name}" for kind in ("cpu", "memory", "throttled") for name in names]
    return ["cpu", "memory", "received", "sent", *per_container]


def pod_sections(settings: PageSettings, details: PodDetails, history: History, now: float) -> list[Section]:
    """Return the cards of a pod."""
    pod = details.facts.pod
    limits, requests = pod_limits(pod), pod_requests(pod)
    cpu, memory = limits.get("cpu"), limits.get("memory")
    cpu_request, memory_request = requests.get("cpu"), requests.get("memory")
    is_limited = any("cpu" in container.resources.limits for container in pod.spec.containers)
    names = [container.name for container in pod.spec.containers]
    charts = tag(
        "section",
        card_header("Usage", pod_command(settings, "top", pod, "-w")),
        tag(
            "div",
            chart(
                _series("cpu", names),
                "CPU",
                "cores",
                history,
                pod.uid,
                now,
                limit=cpu.nanos / 1e9 if cpu else None,
                request=cpu_request.nanos / 1e9 if cpu_request else None,
            ),
            chart(
                _series("memory", names),
                "Memory",
                "bytes",
                history,
                pod.uid,
                now,
                limit=float(int(memory)) if memory else None,
                request=float(int(memory_request)) if memory_request else None,
            ),
            chart(
                " ".join(f"throttled@{name}" for name in names),
                "CPU throttled",
                "share",
                history,
                pod.uid,
                now,
                none="" if is_limited else "No CPU limit",
            ),
            chart("received sent", "Network", "rate", history, pod.uid, now),
            class_="charts",
            data_from=int(_window(start_of(pod, details.events, details.timeline, now), now)),
        ),
        class_="card wide",
    )
    failing, failed_log = details.facts.diagnosis.needs_attention, details.failed_log
    command = log_command(settings, pod, failed_log) if failed_log is not None else ""
    logs = [_log(settings, pod, log) for log in details.logs]
    return [
        _title(details, now),
        card(
            "Why not running" if failing else "Start",
            chain(details.facts.diagnosis, failed_log, command),
            *map(pull_row, details.pulls),
            id="chain",
            kind="wide",
            command=pod_command(settings, "describe", pod),
        ),
        _axis(settings, details, now),
        *(logs if failing else ()),
        charts,
        *(_container(pod, container, kind, details) for kind, container in _containers(pod)),
        _facts(settings, details, kind="wide" if len(_containers(pod)) % 2 == 0 else ""),
        _probe_history(settings, pod, details.probes, now),
        _events(settings, pod, details.events, now),
        *(() if failing else logs),
        _timeline(details.timeline, pod_command(settings, "describe", pod)),
    ]


def _series(kind: str, names: Sequence[str]) -> str:
    return kind if len(names) < 2 else " ".join([kind, *(f"{kind}@{name}" for name in names)])


def _title(details: PodDetails, now: float) -> Html:
    facts, pod = details.facts, details.facts.pod
    status, level = summary_status(pod, facts.state, facts.diagnosis)
    ready, total = ready_count(pod)
    created = pod_creation_time(pod)
    restarts = restart_count(pod)
    kills = sum(details.oom_kills.values())
    texts = [
        pod.metadata.namespace,
        f"{ready} of {count(total, 'container')} ready",
        count(restarts, "restart"),
        count(kills, "OOM kill") if kills else "",
        f"{format_age(created, datetime.fromtimestamp(now, UTC))} old" if created else "",
        pod.status.pod_ip,
        pod.status.qos_class,
    ]
    return tag(
        "section",
        tag("h1", pod.metadata.name, " ", badge(status, level)),
        tag("p", *(tag("span", text) for text in texts if text), class_="facts"),
        class_="summary wide",
        id="title",
        data_live=True,
    )


def _window(start: float, now: float) -> float:
    """Return where the time axis and the charts begin: five minutes ago at least, half an hour at most."""
    return min(max(now - SLOTS * SLOT_SECONDS, start - 30), now - SHORTEST_SECONDS)


def _axis(settings: PageSettings, details: PodDetails, now: float) -> Html:
    pod, events, timeline = details.facts.pod, details.events, details.timeline
    start = start_of(pod, events, timeline, now)
    found = lanes(pod, events, timeline, start, now)
    end = min(max(start_end(pod, start, now), start + 1), now)
    window = _window(start, now)
    legend = tag(
        "p",
        *(
            tag("span", text, class_=f"key {kind}")
            for kind, text in (
                ("queued", "queued"),
                ("volumes", "volumes"),
                ("setup", "sandbox"),
                ("pull", "image pull"),
                ("unready", "runs, not ready"),
                ("ready", "ready"),
                ("failed", "ended by a failure"),
                ("ended", "completed"),
            )
        ),
        class_="legend",
    )
    body: list[Child] = [tag("h3", f"Start, {format_seconds(end - start)}"), time_axis(found, start, end)]
    if now - end > 20:
        body += [tag("h3", f"Last {format_duration(now - window)}"), time_axis(found, window, now)]
    return card("Life", *body, legend, id="life", kind="wide", command=pod_command(settings, "describe", pod))


def format_seconds(length: float) -> str:
    """Format the duration of a start: `850 ms`, `2.4 s`, `3m20s`."""
    if length < 1:
        return f"{length * 1000:.0f} ms"
    return f"{length:.1f} s" if length < 60 else format_duration(length)


def _containers(pod: Pod) -> list[tuple[str, Container]]:
    spec = pod.spec
    return [
        *(("Init container", container) for container in spec.init_containers),
        *(("Container", container) for container in spec.containers),
        *(("Ephemeral container", container) for container in spec.ephemeral_containers),
    ]


def _container(pod: Pod, container: Container, kind: str, details: PodDetails) -> Html:
    status = _status(pod, container.name)
    requests, limits = container.resources.requests, container.resources.limits
    pairs: dict[str, Child] = {"State": _state(status)}
    if status is not None:
        last = status.last_state.terminated
        pairs["Last state"] = f"{termination_reason(last)}, exit code {last.exit_code}" if last else ""
        pairs["Ready"] = "yes" if status.ready else "no"
        pairs["Restarts"] = str(status.restart_count)
    kills = details.oom_kills.get(container.name, 0)
    pairs |= {
        "OOM kills": str(kills) if kills else "",
        "Image": container.image,
        "Requests": ", ".join(f"{name} {amount}" for name, amount in requests.items()),
        "Limits": ", ".join(f"{name} {amount}" for name, amount in limits.items()),
        "Ports": ", ".join(f"{port.container_port}/{port.protocol or 'TCP'}" for port in container.ports),
        "Probes": ", ".join(_probes(container)),
        "Environment": f"{count(len(container.env), 'variable')}, values are not shown"
        if container.env
        else "",
    }
    return card(container.name, fields(pairs), id=f"container-{container.name}", kind="container")


def _status(pod: Pod, name: str) -> ContainerStatus | None:
    status = pod.status
    found = (
        *status.container_statuses,
        *status.init_container_statuses,
        *status.ephemeral_container_statuses,
    )
    return next((each for each in found if each.name == name), None)


def _state(status: ContainerStatus | None) -> Html:
    if status is None:
        return badge("not reported yet", "busy")
    state = status.state
    if state.running is not None:
        return badge("Running", "ok" if status.ready else "busy")
    if state.terminated is not None:
        ended = state.terminated
        text = f"{termination_reason(ended)}, exit code {ended.exit_code}"
        return badge(text, "off" if ended.exit_code == 0 else "bad")
    reason = state.waiting.reason if state.waiting is not None and state.waiting.reason else "Waiting"
    return badge(reason, "busy" if reason in _ORDINARY_WAITS else "bad")


def _probes(container: Container) -> list[str]:
    named = (
        ("startup", container.startup_probe),
        ("liveness", container.liveness_probe),
        ("readiness", container.readiness_probe),
    )
    return [f"{name} every {probe.period_seconds} s" for name, probe in named if probe is not None]


def _probe_history(settings: PageSettings, pod: Pod, probes: Sequence[ProbeHistory], now: float) -> Html:
    """Return the last results of the probes; without probes it is hidden."""
    if not probes:
        return tag("section", id="probes", data_live=True, hidden=True)
    rows = []
    for probe in probes:
        runs = len(probe.passed)
        told = f"{sum(probe.passed)} of the last {count(runs, 'run')} passed" if runs else "not run yet"
        rows.append(
            tag(
                "tr",
                tag("th", probe.kind, tag("small", probe.container), scope="row"),
                tag("td", dots(probe.passed, told) if runs else "", tag("small", told)),
                tag("td", f"{format_duration(max(now - probe.last_run, 0))} ago" if runs else ""),
                tag("td", seconds(probe.seconds) if runs else "", class_="number"),
                tag("td", tag("p", probe.failure, class_="clamp") if probe.failure else ""),
            )
        )
    headings = ("Probe", "Results", "Last run", tag("span", "Took", class_="number"), "Last failure")
    return card(
        "Probes",
        table(headings, rows, label="Last results of the probes"),
        id="probes",
        kind="wide",
        command=pod_command(settings, "describe", pod),
    )


def _events(settings: PageSettings, pod: Pod, events: Sequence[Event], now: float) -> Html:
    rows = []
    for event in sorted(events, key=lambda event: -event.last)[:_MOST_EVENTS]:
        times = f"{event.count} times" if event.count > 1 else ""
        rows.append(
            tag(
                "tr",
                tag("td", format_duration(max(now - event.last, 0)), tag("small", times), class_="number"),
                tag("td", badge(event.reason, "bad" if event.kind == "Warning" else "off")),
                tag("td", event.where.partition("{")[2].rstrip("}")),
                tag("td", tag("p", event.message, class_="clamp")),
            )
        )
    body = (
        table(
            (tag("span", "Age", class_="number"), "Reason", "Container", "Message"),
            rows,
            label="Events of the pod",
        )
        if rows
        else tag("p", "No events since the kubelet has started.", class_="empty")
    )
    return card("Events", body, id="events", kind="wide", command=pod_command(settings, "events", pod))


def _log(settings: PageSettings, pod: Pod, log: LogTail) -> Html:
    lines = [tag("span", line) for line in log.lines]
    command = log_command(settings, pod, log, "-f")
    return card(
        f"Log of {log.container}",
        tag("p", log.note, class_="empty") if log.note else None,
        tag("pre", *lines, class_="log", tabindex=0, role="region", aria_label=f"Log of {log.container}")
        if lines
        else None,
        id=f"log-{log.container}",
        kind="wide",
        command=command,
    )


def _facts(settings: PageSettings, details: PodDetails, kind: str) -> Html:
    pod = details.facts.pod
    meta, spec = pod.metadata, pod.spec
    annotations = {
        key: value for key, value in meta.annotations.items() if not key.startswith(_HIDDEN_ANNOTATIONS)
    }
    used = {volume.name: volume for volume in details.volumes}
    volumes = [
        f"{volume.name} ({', '.join(volume.kinds) or 'emptyDir'}"
        + (f", {size(used[volume.name].used)} used)" if volume.name in used else ")")
        for volume in spec.volumes
    ]
    pairs: dict[str, Child] = {
        "UID": meta.uid,
        "Worker": details.facts.state,
        "Source": meta.annotations.get("kubernetes.io/config.source", ""),
        "Restart policy": spec.restart_policy,
        "Service account": spec.service_account_name,
        "Volumes": _list(volumes),
        "Labels": _list([f"{key}={value}" for key, value in meta.labels.items()]),
        "Annotations": _list([f"{key}={value}" for key, value in annotations.items()]),
    }
    return card(
        "Specification",
        fields(pairs),
        id="facts",
        kind=kind,
        command=pod_command(settings, "describe", pod),
    )


def _list(texts: Sequence[str]) -> Html:
    shown = [tag("span", text[:200], class_="item") for text in texts[:_MOST_LABELS]]
    if len(texts) > _MOST_LABELS:
        shown.append(tag("span", f"and {len(texts) - _MOST_LABELS} more", class_="item"))
    return Html("".join(shown))


def _timeline(timeline: Sequence[TimelineEntry], command: str) -> Html:
    if not timeline:
        return EMPTY
    rows, before = [], timeline[0].time
    for entry in timeline:
        shown = datetime.fromtimestamp(entry.time, UTC).astimezone()
        rows.append(
            tag(
                "tr",
                tag("td", f"{shown:%H:%M:%S}.{shown.microsecond // 1000:03}", class_="number"),
                tag("td", f"+{entry.time - before:.3f} s", class_="number"),
                tag("td", entry.component),
                tag("td", entry.text),
            )
        )
        before = entry.time
    headings = (
        tag("span", "Time", class_="number"),
        tag("span", "After", class_="number"),
        "Component",
        "Decision",
    )
    body = tag(
        "details",
        tag("summary", count(len(timeline), "decision")),
        table(headings, rows, label="Timeline of the pod"),
    )
    return tag("section", card_header("Timeline", command), body, class_="card wide")
