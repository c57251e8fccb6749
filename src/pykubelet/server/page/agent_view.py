"""View of the kubelet itself: lag of its event loop, latency of its calls, memory, tasks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pykubelet.server.page.facts import AgentFacts, Calls, PageSettings
from pykubelet.server.page.history import AGENT, History
from pykubelet.server.page.html import (
    UNKNOWN,
    Child,
    Html,
    Section,
    card,
    card_header,
    count,
    fields,
    seconds,
    size,
    table,
    tag,
)
from pykubelet.server.page.parts import chart
from pykubelet.status.columns import format_duration

SERIES = ("lag", "cri", "api", "rss", "cpu")
_MOST_TASKS = 30


def agent_sections(settings: PageSettings, agent: AgentFacts, history: History, now: float) -> list[Section]:
    """Return the cards of the view."""
    pss = f", {size(agent.pss)} proportional (PSS)" if agent.pss else ""
    no_api = "" if agent.api_server else "No API server, or no calls yet"
    up = max(now - settings.started, 1.0)
    facts: dict[str, Child] = {
        "Version": settings.version,
        "Process": str(agent.pid),
        "Up for": format_duration(up),
        "Runtime": agent.runtime,
        "Memory": f"{size(agent.rss)} resident{pss}",
        "Processor": f"{agent.cpu_seconds:.1f} s, {agent.cpu_seconds / up * 100:.2f} % of a core on average",
        "Loop lag": f"{seconds(agent.loop_lag)}, the longest of the last seconds",
        "Open files": str(agent.open_files),
        "Threads": str(agent.threads),
        "Page": count(agent.clients, "connected client"),
    }
    return [
        tag("section", tag("h1", "Kubelet"), class_="summary wide"),
        (
            card("Process", fields(facts), id="process", command=settings.command("top --node")),
            _tasks(agent),
        ),
        (
            _calls(settings, "Container runtime", "cri", agent.cri),
            _calls(settings, "API server", "api", agent.api_server),
        ),
        tag(
            "section",
            card_header("Last 30 minutes", settings.command("top --calls -w")),
            tag(
                "div",
                chart("lag", "Loop lag", "seconds", history, AGENT, now),
                chart("rss", "Memory", "bytes", history, AGENT, now),
                chart("cri", "Latency of the container runtime", "seconds", history, AGENT, now),
                chart("api", "Latency of the API server", "seconds", history, AGENT, now, none=no_api),
                class_="charts",
            ),
            class_="card wide",
        ),
    ]


def _calls(settings: PageSettings, title: str, id: str, calls: Sequence[Calls]) -> Html:
    if not calls:
        return tag("section", id=id, data_live=True, hidden=True)
    rows = [
        tag(
            "tr",
            tag("th", call.operation, scope="row"),
            tag("td", f"{call.count:,}", class_="number"),
            tag("td", seconds(call.seconds / call.count) if call.count else UNKNOWN, class_="number"),
            tag("td", "" if call.errors is None else f"{call.errors:,}", class_="number"),
        )
        for call in sorted(calls, key=lambda call: -call.seconds)
    ]
    headings = ("Call", *(tag("span", name, class_="number") for name in ("Count", "Mean", "Errors")))
    return card(
        title,
        table(headings, rows, label=f"Calls to the {title}"),
        id=id,
        command=settings.command("top --calls"),
    )


def _tasks(agent: AgentFacts) -> Html:
    tasks = sorted(agent.tasks.items(), key=lambda item: (-item[1], item[0]))
    items = [
        tag("li", tag("span", name), tag("span", str(number), class_="number"))
        for name, number in tasks[:_MOST_TASKS]
    ]
    more = sum(number for _, number in tasks[_MOST_TASKS:])
    return card(
        count(sum(agent.tasks.values()), "task"),
        tag("ul", *items, class_="tasks", aria_label="Tasks of the kubelet"),
        tag("p", f"and {more} more", class_="more") if more else None,
        id="tasks",
    )
