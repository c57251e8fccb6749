"""Node view: one sentence, what needs attention, resources against capacity and thresholds, health. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pykubelet.eviction.report import PressureReport, SignalReport
from pykubelet.server.page.drawings import Mark, bar
from pykubelet.server.page.facts import DiskFacts, NodeFacts, PageSettings, PodFacts
from pykubelet.server.page.history import NODE, History, own_interfaces
from pykubelet.server.page.html import (
    EMPTY,
    UNKNOWN,
    Child,
    Html,
    Section,
    badge,
    card,
    card_header,
    cores,
    fields,
    percent,
    size,
    table,
    tag,
)
from pykubelet.server.page.parts import chart, latest, pod_link
from pykubelet.stats.samples import Psi
from pykubelet.status.columns import format_duration
from pykubelet.status.diagnosis import node_sentence, summary_status

EXPIRES_SOON_SECONDS = 7 * 86400.0
"""Remaining lifetime below which a certificate is a problem of the node."""
_MOST_SHOWN = 5
"""Pods that need attention; the list of pods has all of them."""
_MOST_INTERFACES = 12


def node_problems(node: NodeFacts) -> list[str]:
    """Return what is wrong with the node itself, one phrase each."""
    problems = [f"{name}: {reason}" for name, reason in node.checks.items() if reason is not None]
    if node.pressure is not None:
        problems += [f"{condition} is set, pods may be evicted" for condition in node.pressure.conditions]
    for name, left in node.certificates.items():
        if left <= 0:
            problems.append(f"the {name} certificate has expired")
        elif left < EXPIRES_SOON_SECONDS:
            problems.append(f"the {name} certificate expires in {format_duration(left)}")
    return problems


def node_sections(
    settings: PageSettings, node: NodeFacts, pods: Sequence[PodFacts], history: History, now: float
) -> list[Section]:
    """Return the cards of the node view."""
    pressure = [chart("pressure-cpu pressure-memory pressure-io", "Pressure", "share", history, "", now)]
    return [
        _summary(settings, node, pods, now),
        _resources(settings, node, latest(history, NODE, ("received", "sent"), now)),
        _attention(settings, pods),
        tag(
            "section",
            card_header("Last 30 minutes", settings.command("top --node -w")),
            tag(
                "div",
                chart("cpu", "CPU", "cores", history, "", now, limit=node.cores),
                chart("memory", "Memory", "bytes", history, "", now, limit=node.memory),
                chart("received sent", "Network", "rate", history, "", now),
                *(pressure if _has_pressure(node) else ()),
                class_="charts" if _has_pressure(node) else "charts three",
            ),
            class_="card wide",
        ),
        (_health(settings, node), _stalls(settings, node), _network(settings, node)),
        (_host(settings, node),),
        _evictions(settings, node.pressure),
    ]


def _has_pressure(node: NodeFacts) -> bool:
    """Return whether the kernel reports pressure stall information."""
    usage = node.usage
    return usage is not None and any(
        psi.some.total for psi in (usage.cpu_psi, usage.memory_psi, usage.io_psi)
    )


def _summary(settings: PageSettings, node: NodeFacts, pods: Sequence[PodFacts], now: float) -> Html:
    failing = [each.pod.metadata.name for each in pods if each.diagnosis.needs_attention]
    problems = node_problems(node)
    level = "bad" if problems or failing else "ok"
    levels = [summary_status(each.pod, each.state, each.diagnosis)[1] for each in pods]
    counts = {
        "running": levels.count("ok"),
        "starting or stopping": levels.count("busy"),
        "failing": levels.count("bad"),
        "finished": levels.count("off"),
    }
    shown = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    facts = [
        f"{len(pods)} of {node.max_pods} pods" + (f": {shown}" if shown else ""),
        f"kubelet up for {format_duration(max(now - settings.started, 0))}",
        settings.version,
    ]
    return tag(
        "section",
        tag("p", node_sentence(problems, failing), class_=f"sentence {level}", role="status"),
        tag("p", *(tag("span", fact) for fact in facts), class_="facts"),
        class_="summary wide",
        id="summary",
        data_live=True,
    )


def _attention(settings: PageSettings, pods: Sequence[PodFacts]) -> Html:
    failing = [each for each in pods if each.diagnosis.needs_attention]
    rows = []
    for each in failing[:_MOST_SHOWN]:
        problem = each.diagnosis.problem
        assert problem is not None
        rows.append(
            tag(
                "tr",
                tag("td", pod_link(each.pod), tag("small", each.pod.metadata.namespace)),
                tag("td", badge(problem.reason, "bad"), tag("small", problem.container)),
                tag(
                    "td", tag("p", problem.message, class_="clamp"), tag("p", problem.remedy, class_="remedy")
                ),
            )
        )
    if not rows:
        return tag("section", id="attention", data_live=True, hidden=True)
    more = len(failing) - len(rows)
    return card(
        "Needs attention",
        table(
            ("Pod", "Reason", "What happened, and what to do"),
            rows,
            label="Pods that need attention",
            kind="attention",
        ),
        tag("p", tag("a", f"and {more} more", href="/pods?state=bad"), class_="more") if more else None,
        id="attention",
        command=settings.command("ps"),
        kind="wide",
    )


def _resources(settings: PageSettings, node: NodeFacts, rates: Mapping[str, float]) -> Html:
    """Return the meters; `rates` are the bytes per second that the node receives and sends."""
    used = node.usage.working_set if node.usage is not None else None
    cpu_share = None if node.cpu is None or not node.cores else node.cpu / node.cores
    marks = [Mark(1 - node.reserved_cores / node.cores, f"{cores(node.reserved_cores)} reserved")]
    rows = [
        _row(
            "CPU",
            cpu_share,
            f"{cores(node.cpu)} of {cores(node.cores)} cores",
            marks if node.reserved_cores else [],
        ),
        _row(
            "Memory",
            None if used is None or not node.memory else used / node.memory,
            f"{size(used)} of {size(node.memory)}",
            [
                *(
                    [Mark(1 - node.reserved_memory / node.memory, f"{size(node.reserved_memory)} reserved")]
                    if node.reserved_memory
                    else []
                ),
                *_threshold_marks(node.pressure, "memory.available", node.memory),
            ],
        ),
        *(_disk_row(disk, node.pressure) for disk in node.disks),
        _network_row(node.link_speed, rates),
    ]
    legend = tag(
        "p",
        tag("span", "reserved for the system", class_="key mark")
        if node.reserved_cores or node.reserved_memory
        else None,
        tag("span", "pods are evicted", class_="key threshold"),
        class_="legend",
    )
    return card(
        "Resources",
        tag("div", *rows, class_="meters"),
        legend,
        id="resources",
        command=settings.command("top --node"),
        kind="wide",
    )


def _disk_row(disk: DiskFacts, pressure: PressureReport | None) -> Html:
    share = (disk.capacity - disk.available) / disk.capacity if disk.capacity else None
    numbers = f"{size(disk.capacity - disk.available)} of {size(disk.capacity)}"
    if disk.inodes and disk.inodes_free is not None:
        numbers += f", {percent(1 - disk.inodes_free / disk.inodes)} of the inodes"
    label = {"nodefs": "Disk of the node", "imagefs": "Disk of the images"}.get(disk.name, disk.name)
    return _row(label, share, numbers, _threshold_marks(pressure, f"{disk.name}.available", disk.capacity))


def _network_row(link_speed: int | None, rates: Mapping[str, float]) -> Html:
    """Return the meter of the network; without the speed of the link it has only the rates."""
    received, sent = rates.get("received"), rates.get("sent")
    numbers = f"{size(received)}/s received, {size(sent)}/s sent"
    known = [rate for rate in (received, sent) if rate is not None]
    if link_speed is None:
        return _row("Network", None, numbers if known else UNKNOWN, [])
    # A link has its speed in both directions.
    share = max(known) * 8 / link_speed if known else None
    return _row("Network", share, f"{numbers}, of {link_speed / 1e9:g} Gbit/s", [])


def _row(name: str, share: float | None, numbers: str, marks: Sequence[Mark]) -> Html:
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("span", percent(share) if share is not None else "", class_="share"),
        bar(share, f"{name}: {percent(share)}, {numbers}", marks) if share is not None else None,
        tag("span", numbers, class_="numbers"),
        class_="resource meter",
    )


def _threshold_marks(pressure: PressureReport | None, signal: str, capacity: int) -> list[Mark]:
    if pressure is None or not capacity:
        return []
    return [
        Mark(
            1 - threshold.value / capacity,
            f"{threshold.kind} eviction below {size(threshold.value)}",
            "threshold",
        )
        for report in pressure.signals
        if report.signal == signal
        for threshold in report.thresholds
        if threshold.value
    ]


def _evictions(settings: PageSettings, pressure: PressureReport | None) -> Html:
    if pressure is None or not pressure.signals:
        return tag("section", id="evictions", data_live=True, hidden=True)
    rows = []
    for report in pressure.signals:
        for threshold in report.thresholds:
            victim = report.first_victim
            rows.append(
                tag(
                    "tr",
                    tag("td", report.signal, tag("small", threshold.kind)),
                    tag("td", _amount(report, report.available), class_="number"),
                    tag("td", _amount(report, threshold.value), class_="number"),
                    tag(
                        "td",
                        badge("met", "bad") if threshold.is_met else _amount(report, threshold.distance),
                        class_="number",
                    ),
                    tag(
                        "td",
                        victim.name if victim is not None else UNKNOWN,
                        tag("small", f"built-in order: {report.ranking_problem}")
                        if report.ranking_problem
                        else None,
                    ),
                )
            )
    headings = (
        "Signal",
        _number("Available"),
        _number("Threshold"),
        _number("Distance"),
        "First pod evicted",
    )
    return card(
        "Eviction",
        table(headings, rows, label="Eviction signals and their thresholds", kind="dense"),
        id="evictions",
        command=settings.command("pressure"),
        kind="wide",
    )


def _number(heading: str) -> Html:
    return tag("span", heading, class_="number")


def _amount(report: SignalReport, amount: int | None) -> str:
    if amount is None:
        return UNKNOWN
    return f"{amount:,}" if report.resource in ("inodes", "pids") else size(amount)


def _stalls(settings: PageSettings, node: NodeFacts) -> Html:
    usage = node.usage
    if usage is None or not _has_pressure(node):
        return tag("section", id="stalls", data_live=True, hidden=True)
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", value, class_="number") for value in _stall(psi)))
        for name, psi in (("CPU", usage.cpu_psi), ("Memory", usage.memory_psi), ("I/O", usage.io_psi))
    ]
    headings = ("", *(_number(f"{length}") for length in ("10 s", "1 min", "5 min", "all, 10 s")))
    return card(
        "Tasks waiting (PSI)",
        table(headings, rows, label="Share of the time in which tasks waited for a resource"),
        id="stalls",
        command=settings.command("top --node -o wide"),
    )


def _stall(psi: Psi) -> tuple[str, ...]:
    return tuple(
        f"{value:.1f} %" for value in (psi.some.avg10, psi.some.avg60, psi.some.avg300, psi.full.avg10)
    )


def _network(settings: PageSettings, node: NodeFacts) -> Html:
    rows = []
    for each in list(own_interfaces(node.interfaces))[:_MOST_INTERFACES]:
        errors = each.rx_errors + each.tx_errors + each.rx_dropped + each.tx_dropped
        cells: tuple[Child, ...] = (size(each.rx_bytes), size(each.tx_bytes), f"{errors:,}")
        rows.append(
            tag(
                "tr", tag("th", each.name, scope="row"), *(tag("td", cell, class_="number") for cell in cells)
            )
        )
    if not rows:
        return tag("section", id="network", data_live=True, hidden=True)
    headings = ("Interface", _number("Received"), _number("Sent"), _number("Errors, drops"))
    return card(
        "Network interfaces",
        table(headings, rows, label="Network interfaces of the node", kind="dense"),
        id="network",
        command=settings.command("top --node -o json"),
    )


def _health(settings: PageSettings, node: NodeFacts) -> Html:
    checks: dict[str, Child] = {
        name: badge("ok", "ok") if reason is None else badge(reason, "bad")
        for name, reason in node.checks.items()
    }
    for name, left in node.certificates.items():
        level = "bad" if left < EXPIRES_SOON_SECONDS else "ok"
        until = datetime.fromtimestamp(_wall() + left, UTC).astimezone() if left < 1e10 else None
        shown = "expired" if left <= 0 else f"{format_duration(left)} left"
        checks[f"{name} certificate"] = Html(
            badge(shown, level) + (tag("small", f"{until:%Y-%m-%d}") if until else EMPTY)
        )
    return card("Health", fields(checks), id="health", command=settings.command("certs"))


def _host(settings: PageSettings, node: NodeFacts) -> Html:
    """Return the findings of `doctor`; they keep some pods from running, or none today."""
    rows = [
        tag(
            "tr",
            tag("th", each.area, scope="row"),
            tag("td", each.what, tag("p", each.remedy, class_="remedy")),
        )
        for each in node.host_problems
    ]
    body = (
        table(("Area", "Finding, and what to do"), rows, label="Findings about the host", kind="dense")
        if rows
        else tag("p", "Nothing to look at.", class_="empty")
    )
    return card("Host", body, id="host", command=settings.command("doctor"))


def _wall() -> float:
    return datetime.now(UTC).timestamp()
