"""`pykubelet events`: events of all pods, of one pod, or of the node, once or as they occur.

The kubelet keeps the events since its start (`podconfig/event_log`). Following survives a restart of the
kubelet: the events of the new process are then all new.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from pykubelet.cli.client import (
    KIND_PREFIX,
    KubeletNotRunning,
    NodeClient,
    NodeError,
    choose_pod,
    manifest_name,
    run_command,
)
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, print_listing
from pykubelet.cli.printers import escape_unprintable, format_age
from pykubelet.podconfig.event_log import EventPage, LoggedEvent

PROGRAM = "pykubelet events"
HEADING = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")
WIDE_HEADING = ("FIRST SEEN", "LAST SEEN", "COUNT", "TYPE", "REASON", "OBJECT", "FIELD", "MESSAGE")
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Options of `pykubelet events`."""

    pod: str | None = None
    node: bool = False
    """Only events of the node itself."""
    follow: bool = False
    warnings: bool = False
    since: float | None = None
    """Maximum age of the last occurrence, in seconds."""
    output: Output = Output.TABLE


def run_events(selection: NodeSelection, options: EventOptions) -> int:
    """Print the events; return the exit code."""

    def work() -> int:
        client = select_node(selection).client
        page = client.events()
        is_shown = _filter(client, page, options)
        shown = [event for event in page.events if is_shown(event)]
        if options.follow:
            return _follow(client, page, shown, is_shown, options.output)
        now = time.time()
        wide = options.output is Output.WIDE
        print_listing(
            options.output,
            document=lambda: {"events": [msgspec.to_builtins(event) for event in shown]},
            names=(about(event) for event in shown),
            heading=WIDE_HEADING if wide else HEADING,
            rows=[_cells(event, now, wide) for event in shown],
            empty="No events since the kubelet started.",
        )
        return 0

    return run_command(PROGRAM, work)


def about(event: LoggedEvent) -> str:
    """Return the object of an event: `pod/NAMESPACE/NAME`, or `node`."""
    return f"pod/{event.namespace}/{event.pod}" if event.uid or event.pod else "node"


def event_line(event: LoggedEvent) -> str:
    """Return an event as one line of a followed log, with its local time."""
    moment = datetime.fromtimestamp(event.last, UTC).astimezone()
    times = f" (x{event.count})" if event.count > 1 else ""
    text = f"{moment:%H:%M:%S}  {event.type:<7}  {event.reason}  {about(event)}  {event.message}{times}"
    return escape_unprintable(text, lines=False)


def _filter(client: NodeClient, page: EventPage, options: EventOptions) -> Callable[[LoggedEvent], bool]:
    oldest = time.time() - options.since if options.since is not None else 0.0
    chosen = _choose(client, page, options.pod) if options.pod is not None else None

    def is_shown(event: LoggedEvent) -> bool:
        return (
            event.last >= oldest
            and (not options.warnings or event.type == "Warning")
            and (not options.node or not event.uid)
            and (chosen is None or event.uid in chosen.uids or (event.namespace, event.pod) in chosen.names)
        )

    return is_shown


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The pod whose events are shown; a changed manifest gives it a new uid."""

    uids: frozenset[str] = frozenset()
    names: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name; empty if it was selected by its uid."""


def _choose(client: NodeClient, page: EventPage, text: str) -> _Chosen:
    """Return a pod, which may have been removed. Raises SelectionError."""
    for name in dict.fromkeys((text, text.removeprefix(KIND_PREFIX))):
        namespace, slash, short = name.rpartition("/")
        former = frozenset(
            (event.namespace, event.pod)
            for event in page.events
            if event.uid and event.pod == short and (not slash or event.namespace == namespace)
        )
        if former:
            return _Chosen(names=former)
    node = client.pods()
    pod = choose_pod(node.pods, text, node.states)
    if text.rpartition("/")[2] in (pod.metadata.name, manifest_name(pod)):
        return _Chosen(names=frozenset({(pod.metadata.namespace, pod.metadata.name)}))
    return _Chosen(uids=frozenset({pod.uid}))


def _cells(event: LoggedEvent, now: float, wide: bool) -> Sequence[str]:
    moment = datetime.fromtimestamp(now, UTC)
    last = format_age(datetime.fromtimestamp(event.last, UTC), moment)
    message = " ".join(event.message.split())
    if not wide:
        times = f" (x{event.count})" if event.count > 1 else ""
        return (last, event.type, event.reason, about(event), f"{message}{times}")
    first = format_age(datetime.fromtimestamp(event.first, UTC), moment)
    return (first, last, str(event.count), event.type, event.reason, about(event), event.field, message)


def _follow(
    client: NodeClient,
    page: EventPage,
    shown: Iterable[LoggedEvent],
    is_shown: Callable[[LoggedEvent], bool],
    output: Output,
) -> int:
    """Print events until interrupted, also across restarts of the kubelet."""
    _print_events(shown, output)
    problem = ""
    while True:
        try:
            page = client.events(page.log, page.cursor, wait=True)
        except NodeError as err:
            if str(err) != problem:
                problem = str(err)
                print(f"{PROGRAM}: {problem}; waiting for it", file=sys.stderr, flush=True)
            if not isinstance(err, KubeletNotRunning):
                time.sleep(_RETRY_SECONDS)
            time.sleep(_RETRY_SECONDS)
            continue
        problem = ""
        _print_events(filter(is_shown, page.events), output)


def _print_events(events: Iterable[LoggedEvent], output: Output) -> None:
    for event in events:
        if output is Output.JSON:
            # ASCII: msgspec does not escape the C1 control characters.
            import json

            print(json.dumps(msgspec.to_builtins(event)), flush=True)
        else:
            print(event_line(event), flush=True)
