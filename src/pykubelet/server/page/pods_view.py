"""List of pods: failing ones first, each with reason and remedy; filter and sort. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import pod_limits, pod_requests
from pykubelet.server.page.drawings import sparkline
from pykubelet.server.page.facts import PageSettings, PodFacts
from pykubelet.server.page.history import History, Key
from pykubelet.server.page.html import UNKNOWN, Html, badge, card, cores, count, size, table, tag
from pykubelet.server.page.parts import pod_link
from pykubelet.status.columns import format_age, pod_creation_time, ready_count, restart_count
from pykubelet.status.diagnosis import summary_status

LEVELS = {"": "all", "bad": "failing", "busy": "starting", "ok": "running", "off": "finished"}
SORTS = {
    "": "state",
    "name": "name",
    "cpu": "CPU",
    "memory": "memory",
    "restarts": "restarts",
    "ready": "readiness",
    "age": "age",
}
_LONGEST_QUERY = 100
_RANK = {"bad": 0, "busy": 1, "ok": 2, "off": 3}
_SPARK_SLOTS = 90


@dataclass(frozen=True, slots=True)
class PodQuery:
    """Filter and order of the list."""

    text: str = ""
    level: str = ""
    sort: str = ""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> PodQuery:
        """Return the query of a URL; unknown values are ignored."""
        level, sort = query.get("state", ""), query.get("sort", "")
        return cls(
            query.get("q", "").strip()[:_LONGEST_QUERY],
            level if level in LEVELS else "",
            sort if sort in SORTS else "",
        )


EVERYTHING = PodQuery()


def select(pods: Sequence[PodFacts], query: PodQuery) -> list[PodFacts]:
    """Return the pods that match, in order."""
    text = query.text.lower()
    found = [
        each
        for each in pods
        if (not query.level or _level(each) == query.level)
        and (not text or text in each.pod.full_name.lower() or text in _status(each).lower())
    ]
    return sorted(found, key=lambda each: (*_ORDERS[query.sort](each), each.pod.full_name))


def pods_form(query: PodQuery) -> Html:
    """Return the form of filter and order, which works without JavaScript."""

    def options(names: Mapping[str, str], chosen: str) -> Html:
        return Html(
            "".join(
                tag("option", name, value=value, selected=value == chosen) for value, name in names.items()
            )
        )

    return tag(
        "form",
        tag(
            "label",
            tag("span", "Filter"),
            tag(
                "input",
                type="search",
                name="q",
                value=query.text,
                id="filter",
                maxlength=_LONGEST_QUERY,
                placeholder="name, namespace, status",
            ),
        ),
        tag("label", tag("span", "State"), tag("select", options(LEVELS, query.level), name="state")),
        tag("label", tag("span", "Sort by"), tag("select", options(SORTS, query.sort), name="sort")),
        tag("button", "Apply", type="submit"),
        class_="filters wide",
        method="get",
        action="/pods",
        role="search",
    )


def pods_section(settings: PageSettings, rows: Sequence[Html], total: int) -> Html:
    """Return the table with the rows of the selected pods, of `total` ones."""
    headings = (
        "Pod",
        "Status",
        tag("span", "Ready", class_="number"),
        tag("span", "Restarts", class_="number"),
        tag("span", "CPU", class_="number"),
        tag("span", "Memory", class_="number"),
        tag("span", "Age", class_="number"),
    )
    if not rows:
        text = (
            "No pod matches."
            if total
            else "No pods. Put a manifest into the static pod directory to start one."
        )
        return card(
            "Pods", tag("p", text, class_="empty"), id="pods", command=settings.command("ps"), kind="wide"
        )
    title = count(total, "pod") if len(rows) == total else f"{len(rows)} of {count(total, 'pod')}"
    return card(
        title,
        table(headings, rows, label="Pods", kind="pods"),
        id="pods",
        command=settings.command("ps -o wide"),
        kind="wide",
    )


def pod_row(each: PodFacts, history: History, now: float) -> Html:
    """Return the row of a pod."""
    pod, problem = each.pod, each.diagnosis.problem
    status, level = summary_status(pod, each.state, each.diagnosis)
    why = []
    if problem is not None and each.diagnosis.needs_attention:
        where = f"{problem.container}: " if problem.container else ""
        why = [
            tag("p", f"{where}{problem.message}", class_="clamp"),
            tag("p", problem.remedy, class_="remedy") if problem.remedy else None,
        ]
    ready, total = ready_count(pod)
    created = pod_creation_time(pod)
    limits, requests = pod_limits(pod), pod_requests(pod)
    cpu_limit, memory_limit = limits.get("cpu"), limits.get("memory")
    cpu_request, memory_request = requests.get("cpu"), requests.get("memory")
    restarts = restart_count(pod)
    return tag(
        "tr",
        tag("td", pod_link(pod), tag("small", pod.metadata.namespace), class_="name"),
        tag("td", badge(status, level), *why, class_="status"),
        tag("td", f"{ready}/{total}", class_="number"),
        tag("td", str(restarts), class_="number" + (" some" if restarts else "")),
        _usage(
            cores(each.cpu),
            _bound(cpu_limit, cpu_request, lambda amount: cores(amount.nanos / 1e9)),
            history.read(Key(pod.uid, "", "cpu"), now, _SPARK_SLOTS),
            cpu_limit.nanos / 1e9 if cpu_limit else None,
            cpu_request.nanos / 1e9 if cpu_request else None,
            "CPU of the last 15 minutes",
        ),
        _usage(
            size(each.memory),
            _bound(memory_limit, memory_request, lambda amount: size(int(amount))),
            history.read(Key(pod.uid, "", "memory"), now, _SPARK_SLOTS),
            int(memory_limit) if memory_limit else None,
            int(memory_request) if memory_request else None,
            "Memory of the last 15 minutes",
        ),
        tag("td", format_age(created, datetime.now(UTC)) if created else UNKNOWN, class_="number"),
        data_text=f"{pod.full_name} {status}".lower(),
    )


def _usage(
    value: str,
    bound: str,
    values: Sequence[float] | None,
    limit: float | None,
    request: float | None,
    label: str,
) -> Html:
    return tag(
        "td",
        tag("span", value, class_="value"),
        tag("small", bound) if bound else None,
        sparkline(values, label, limit=limit, request=request),
        class_="number usage",
    )


def _bound(limit: Quantity | None, request: Quantity | None, shown: Callable[[Quantity], str]) -> str:
    if limit is not None:
        return f"of {shown(limit)}"
    return f"requests {shown(request)}" if request is not None else ""


def _level(each: PodFacts) -> str:
    return summary_status(each.pod, each.state, each.diagnosis)[1]


def _status(each: PodFacts) -> str:
    return summary_status(each.pod, each.state, each.diagnosis)[0]


def _ready_share(pod: Pod) -> float:
    ready, total = ready_count(pod)
    return ready / total if total else 1.0


def _age(pod: Pod) -> float:
    created = pod_creation_time(pod)
    return created.timestamp() if created is not None else 0.0


_ORDERS: Mapping[str, Callable[[PodFacts], tuple[float, ...]]] = {
    "": lambda each: (_RANK[_level(each)],),
    "name": lambda each: (),
    "cpu": lambda each: (-(each.cpu or 0.0),),
    "memory": lambda each: (-(each.memory or 0),),
    "restarts": lambda each: (-restart_count(each.pod),),
    "ready": lambda each: (_ready_share(each.pod),),
    "age": lambda each: (-_age(each.pod),),
}
