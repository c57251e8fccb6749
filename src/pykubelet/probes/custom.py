"""Probes by third-party code: the entry point group `pykubelet.probes`.

An entry point is a function that probes a container; its name is the name of the handler. A pod selects it
with an annotation, whose key has the kind of the probe and the container:

    metadata:
      annotations:
        liveness.probes.pykubelet.dev/db: replication-lag
    spec:
      containers:
      - name: db
        livenessProbe:
          exec: {command: ["check-lag", "30"]}
          timeoutSeconds: 5

On this kubelet the function replaces the exec handler and receives its command; any other kubelet ignores the
annotation and runs the command. Period, timeout and thresholds are those of the probe. Probes with another
handler ignore the annotation.

The function runs in a thread of its own, not in the container. A call that exceeds the probe's timeout is a
failure, as for a command. A function that raises or returns anything but a `ProbeResult`, or that is not
installed, is an error, which like an unreachable runtime is no evidence about the container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pykubelet.api.pod import Pod, Probe
from pykubelet.logs import get_logger
from pykubelet.probes.types import OUTPUT_LIMIT, BadTarget, Kind, ProbeResult, SelectedHandler, Target
from pykubelet.util.entry_points import EntryPoint
from pykubelet.util.text import quoted
from pykubelet.util.third_party import (
    BoundedFunction,
    CallFailed,
    TooManyCalls,
    load_entry_points,
    require_function,
)

log = get_logger(__name__)
GROUP = "pykubelet.probes"
ANNOTATION_SUFFIX = ".probes.pykubelet.dev/"
RESULTS = ("success", "warning", "failure", "unknown")
MAX_CALLS = 32
"""Calls of one function that may run at the same time, including those that exceeded their timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The container to probe, with copies of what a probe may depend on."""

    namespace: str
    pod: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    container: str
    container_id: str
    ip: str
    """IP address of the pod, or of the host with hostNetwork; empty while it has none."""
    kind: Kind
    command: tuple[str, ...]
    """Command of the probe's exec handler, with variables expanded."""
    timeout: int
    """Seconds after which the result is not used any more."""


ProbeFunction = Callable[[ProbeRequest], ProbeResult]


def selected_handler(pod: Pod, container: str, kind: Kind, probe: Probe) -> SelectedHandler | None:
    """Return the third-party handler that the pod selects; None for the probe's own."""
    if probe.exec is None:
        return None
    handler = pod.metadata.annotations.get(f"{kind}{ANNOTATION_SUFFIX}{container}", "")
    return SelectedHandler(handler, pod, kind) if handler else None


class CustomProbes:
    """The installed probe functions by name, with their limits."""

    def __init__(self, functions: Mapping[str, ProbeFunction], max_calls: int = MAX_CALLS) -> None:
        self._functions = {
            name: BoundedFunction(_checked(function), f"probe-{name}", max_calls)
            for name, function in functions.items()
        }

    async def check(self, target: Target, command: list[str], timeout: int) -> ProbeResult:
        """Run the handler that `target` selects. Raises BadTarget."""
        selected = target.custom
        assert selected is not None
        function = self._functions.get(selected.handler)
        if function is None:
            raise BadTarget(
                f"probe handler {quoted(selected.handler)} is not installed on this node: install a package "
                f"with this entry point of the group {GROUP}, or remove the annotation"
            )
        request = _request(target, selected, command, timeout)
        try:
            found = await function.call(timeout, request)
        except TimeoutError:
            message = f"probe handler {quoted(selected.handler)} timed out after {timeout}s"
            return ProbeResult("failure", message)
        except TooManyCalls as err:
            return ProbeResult("unknown", str(err), errored=True)
        except CallFailed as err:
            message = f"probe handler {quoted(selected.handler)} failed: {err}"
            return ProbeResult("unknown", message[:OUTPUT_LIMIT], errored=True)
        if found is None:
            message = f"probe handler {quoted(selected.handler)} must return a ProbeResult"
            return ProbeResult("unknown", message, errored=True)
        return found


def _checked(function: ProbeFunction) -> Callable[[ProbeRequest], ProbeResult | None]:
    """Return the function with its result as a plain, limited one; None for anything but a ProbeResult."""

    def run(request: ProbeRequest) -> ProbeResult | None:
        found: object = function(request)
        if not isinstance(found, ProbeResult) or found.result not in RESULTS:
            return None
        output = str(found.output)[:OUTPUT_LIMIT]
        return ProbeResult(found.result, output, errored=bool(found.errored))

    return run


def _request(target: Target, selected: SelectedHandler, command: list[str], timeout: int) -> ProbeRequest:
    metadata = selected.pod.metadata
    return ProbeRequest(
        namespace=metadata.namespace,
        pod=metadata.name,
        uid=metadata.uid,
        labels=dict(metadata.labels),
        annotations=dict(metadata.annotations),
        container=target.container.name,
        container_id=target.container_id,
        ip=target.ip,
        kind=selected.kind,
        command=tuple(command),
        timeout=timeout,
    )


def installed_probes(found: Iterable[EntryPoint[ProbeFunction]] | None = None) -> CustomProbes:
    """Return the installed probe functions; an error is logged for each that cannot be loaded."""
    functions: dict[str, ProbeFunction] = {}
    for loaded in load_entry_points(GROUP, "probe handler", found, require_function):
        if loaded.name in functions:
            log.error(
                None,
                "Ignored a second probe handler of the same name",
                name=loaded.name,
                entryPoint=loaded.value,
            )
        elif loaded.result is not None:
            functions[loaded.name] = loaded.result
    return CustomProbes(functions)
