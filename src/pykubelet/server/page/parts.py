"""Parts that several views share: links to pods, charts, the chain of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from pykubelet.api.pod import Pod
from pykubelet.images.pull_progress import PullProgress
from pykubelet.server.page.drawings import bar, sparkline
from pykubelet.server.page.facts import LogTail, PageSettings
from pykubelet.server.page.history import SLOT_SECONDS, SLOTS, History, Key
from pykubelet.server.page.html import EMPTY, Html, badge, size, tag, text
from pykubelet.status.diagnosis import Diagnosis

_MOST_LINES = 5
_MOST_CHARACTERS = 300
"""Characters of a line of the log of a run that failed."""
_STEP_NAMES: Mapping[str, str] = {
    "admission": "Admission",
    "volumes": "Volumes",
    "image": "Image",
    "sandbox": "Sandbox",
    "init": "Init containers",
    "containers": "Containers",
    "probes": "Probes",
}


def pod_path(pod: Pod) -> str:
    """Return the path of a pod's page."""
    return f"/pod/{quote(pod.metadata.namespace, safe='')}/{quote(pod.metadata.name, safe='')}"


def pod_link(pod: Pod) -> Html:
    """Return a link to a pod's page."""
    return tag("a", pod.metadata.name, href=pod_path(pod), class_="pod")


def chart(
    names: str,
    title: str,
    unit: str,
    history: History,
    owner: str,
    now: float,
    *,
    limit: float | None = None,
    request: float | None = None,
    none: str = "",
) -> Html:
    """Return a chart of some series; without JavaScript it is a line of the first one.

    `names` are those of the keys in the data of the page, separated by spaces. `none` is shown instead of an
    empty chart.
    """
    first = history.read(_key(owner, names.split(" ")[0]), now)
    return tag(
        "figure",
        tag("figcaption", title),
        tag(
            "div",
            sparkline(first, f"{title}, last 30 minutes", limit=limit, request=request),
            class_="plot",
        ),
        class_="chart",
        data_series=names,
        data_unit=unit,
        data_limit=limit if limit is not None and limit > 0 else None,
        data_request=request if request is not None and request > 0 else None,
        data_none=none or None,
    )


def chart_data(history: History, owner: str, names: Sequence[str], now: float) -> dict[str, object]:
    """Return the data of the charts as a document: times, and values by name; unknown ones are None."""
    last = int(now / SLOT_SECONDS) * SLOT_SECONDS
    series: dict[str, list[float | None]] = {}
    for name in names:
        values = history.read(_key(owner, name), now)
        if values is not None:
            series[name] = [None if math.isnan(value) else float(f"{value:.6g}") for value in values]
    return {"times": [last - SLOT_SECONDS * back for back in range(SLOTS - 1, -1, -1)], "series": series}


def latest(history: History, owner: str, names: Sequence[str], now: float) -> dict[str, float]:
    """Return the current value of each series that has one."""
    found = {}
    for name in names:
        values = history.read(_key(owner, name), now, 2)
        if values is not None and not math.isnan(values[-1]):
            found[name] = float(f"{values[-1]:.6g}")
    return found


def _key(owner: str, name: str) -> Key:
    """Return the key of a series name, which is `NAME` or `NAME@CONTAINER`."""
    series, _, container = name.partition("@")
    return Key(owner, container, series)


def chain(diagnosis: Diagnosis, log: LogTail | None = None, log_command: str = "") -> Html:
    """Return the steps of a pod's start, up to the one that fails, and what to do about it.

    `log` is that of the run that failed; its last lines are shown with the command that prints all of it.
    """
    steps = []
    for step in diagnosis.steps:
        spoken = {"done": "done", "active": "in progress", "failed": "failed", "waiting": "not reached"}[
            step.state
        ]
        steps.append(
            tag(
                "li",
                tag("span", _STEP_NAMES[step.name], class_="step"),
                tag("span", f"{spoken}: ", class_="hidden"),
                tag("span", step.text, class_="result"),
                class_=step.state,
                aria_current="step" if step.state in ("active", "failed") else None,
            )
        )
    problem = diagnosis.problem
    words = EMPTY
    if problem is not None:
        words = tag(
            "div",
            tag(
                "p",
                badge(problem.reason, "busy" if problem.transient else "bad"),
                " ",
                tag("strong", problem.container),
            ),
            tag("p", problem.message, class_="message") if problem.message else None,
            tag("p", problem.remedy, class_="remedy") if problem.remedy else None,
            *_last_lines(log, log_command),
            class_="why",
        )
    return Html(tag("ol", *steps, class_="chain") + words)


def _last_lines(log: LogTail | None, command: str) -> list[Html]:
    if log is None:
        return []
    lines = [tag("span", text(line, _MOST_CHARACTERS)) for line in log.lines[-_MOST_LINES:]]
    what = f"Last lines of {log.container}" + (", the run before this one" if log.previous else "")
    return [
        tag("pre", *lines, class_="log", tabindex=0, role="region", aria_label=what)
        if lines
        else tag("p", log.note, class_="empty"),
        tag("code", command, class_="command", title="The whole log on the command line"),
    ]


def log_command(settings: PageSettings, pod: Pod, log: LogTail, *options: str) -> str:
    """Return the command that prints a log."""
    return pod_command(settings, "logs", pod, f"-c {log.container}", *(["-p"] if log.previous else options))


def pod_command(settings: PageSettings, verb: str, pod: Pod, *more: str) -> str:
    """Return a command about a pod."""
    return settings.command(" ".join((verb, f"{pod.metadata.namespace}/{pod.metadata.name}", *more)))


def pull_row(pull: PullProgress) -> Html:
    """Return the progress of an image pull."""
    share = pull.done_bytes / pull.total_bytes if pull.done_bytes is not None and pull.total_bytes else None
    numbers = f"{size(pull.done_bytes)} of {size(pull.total_bytes)}" if share is not None else "pulling"
    if pull.total_layers:
        numbers += f", {pull.done_layers or 0} of {pull.total_layers} layers"
    return tag(
        "div",
        tag("span", pull.image, class_="name"),
        tag("span", numbers, class_="numbers"),
        bar(share, f"{pull.image}: {numbers}"),
        class_="resource pull",
    )
