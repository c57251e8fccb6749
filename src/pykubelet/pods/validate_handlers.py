"""The checks of what the agent asks of a running container: probes, hooks, the signal that ends it."""

from __future__ import annotations

import re
from signal import Signals

from pykubelet.api.pod import Container, LifecycleHandler, PodSpec, Probe
from pykubelet.api.text import quoted
from pykubelet.pods.checks import Problems, choice, exactly_one, in_range, port, refused, required

_HEADER = re.compile(r"[-A-Za-z0-9]+")
_REAL_TIME_SIGNAL = re.compile(r"SIGRTMIN\+(?:[1-9]|1[0-5])|SIGRTMAX-(?:[1-9]|1[0-4])")


def check_probes(path: str, container: Container) -> Problems:
    """Give everything that is wrong with a container's probes."""
    for field, probe in (
        ("livenessProbe", container.liveness_probe),
        ("readinessProbe", container.readiness_probe),
        ("startupProbe", container.startup_probe),
    ):
        if probe is not None:
            yield from _check_probe(f"{path}.{field}", probe, counts_up=field == "readinessProbe")


def check_hooks(path: str, container: Container, spec: PodSpec) -> Problems:
    """Give everything that is wrong with a container's hooks and stop signal."""
    if (lifecycle := container.lifecycle) is None:
        return
    for field, hook in (("postStart", lifecycle.post_start), ("preStop", lifecycle.pre_stop)):
        if hook is None:
            continue
        place = f"{path}.{field}"
        given = {
            "exec": hook.exec,
            "httpGet": hook.http_get,
            "tcpSocket": hook.tcp_socket,
            "sleep": hook.sleep,
        }
        yield from exactly_one(place, "a handler", given)
        yield from _check_handler(place, hook)
        if hook.sleep is not None:
            most = spec.termination_grace_period_seconds or 0
            yield from in_range(f"{place}.sleep.seconds", hook.sleep.seconds, 0, most)
    if lifecycle.stop_signal is not None:
        yield from refused(f"{path}.stopSignal", "needs spec.os.name", spec.os is None)
        name = lifecycle.stop_signal
        known = name in Signals.__members__ or _REAL_TIME_SIGNAL.fullmatch(name)
        message = f"{quoted(name)} is not a signal such as SIGTERM"
        yield from refused(f"{path}.stopSignal", message, not known)


def _check_probe(path: str, probe: Probe, *, counts_up: bool) -> Problems:
    handler = LifecycleHandler(exec=probe.exec, http_get=probe.http_get, tcp_socket=probe.tcp_socket)
    given = {"exec": probe.exec, "httpGet": probe.http_get, "tcpSocket": probe.tcp_socket, "grpc": probe.grpc}
    yield from exactly_one(path, "a handler", given)
    yield from _check_handler(path, handler)
    if probe.grpc is not None:
        yield from port(f"{path}.grpc.port", probe.grpc.port)
    for field, value in (
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ):
        yield from in_range(f"{path}.{field}", value, 0)
    grace = probe.termination_grace_period_seconds
    if counts_up:
        message = "is only for liveness and startup probes"
        yield from refused(f"{path}.terminationGracePeriodSeconds", message, grace is not None)
    else:
        yield from refused(f"{path}.successThreshold", "must be 1", probe.success_threshold != 1)
        yield from in_range(f"{path}.terminationGracePeriodSeconds", grace, 1, 2**63 - 1)


def _check_handler(path: str, handler: LifecycleHandler) -> Problems:
    if handler.exec is not None:
        yield from required(f"{path}.exec.command", handler.exec.command)
    if handler.tcp_socket is not None:
        yield from port(f"{path}.tcpSocket.port", handler.tcp_socket.port)
    if (request := handler.http_get) is not None:
        yield from port(f"{path}.httpGet.port", request.port)
        yield from choice(f"{path}.httpGet.scheme", request.scheme, ("HTTP", "HTTPS"))
        for index, header in enumerate(request.http_headers):
            message = f"{quoted(header.name)} must be letters, digits or '-', such as X-Name"
            place = f"{path}.httpGet.httpHeaders[{index}].name"
            yield from refused(place, message, not _HEADER.fullmatch(header.name))
