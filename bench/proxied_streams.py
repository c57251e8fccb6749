"""Streams through a real API server: followed logs, the output of a command, a forwarded port.

kubectl is the client, as in use; the API server connects to the kubelet. The logs of all containers are
followed by one kubectl. Their lines are appended to the log files by the measurement, so that each round has
the same work and the containers use no CPU. Each round has a kubelet process of its own.

CPU seconds are comparable between runs on a busy host, durations are not. Sockets are those of the kubelet
while all logs are followed: with HTTP/1.1 each request in flight has a connection of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.node import bare_runtime, data_dir
from bench.plane import NODE, Agent, control_plane
from bench.processes import cpu_seconds, pss_mb
from bench.results import Result
from bench.watched_pods import watched_pods
from pykubelet.devcluster.binaries import find_programs
from pykubelet.devcluster.cluster import DevCluster
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.standalone.instance import Instance

_PODS, _CONTAINERS = 10, 10
_ROUNDS = 3
_BURSTS, _BURST_LINES, _BURST_SECONDS = 20, 100, 0.5
_LINE = f"2026-01-02T03:04:05.678901234Z stdout F {'lorem ' * 16}end\n"
_BYTES = 100_000_000
_PORT = 8080
_SETTLE = 5.0
_TIMEOUT_SECONDS = 300.0
_COLLECTION = "/api/v1/namespaces/default/pods"
_QUIET = ["sleep", "100000"]
_SERVE = ["sh", "-c", f"while true; do head -c {_BYTES} /dev/zero | nc -l -p {_PORT}; done"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Cost of one kind of stream in one round."""

    seconds: float
    cpu: float
    """CPU seconds of the kubelet."""
    pss: float
    """PSS of the kubelet in MB, while the stream is open or just after it."""
    sockets: int


def proxied_streams() -> list[Result]:
    """Measure streams through the API server; the median round counts."""
    try:
        programs = find_programs(lambda text: print(f"     {text}", flush=True))
    except NotAvailable as err:
        print(f"     streams through the API server are not measured: {err}")
        return []
    rounds: list[dict[str, Sample]] = []
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        instance = Instance.at(path)
        names = [f"streams-{number}" for number in range(_PODS)]
        agent = Agent(plane, instance)
        try:
            agent.start()
            _create(plane, image, names)
            for number in range(_ROUNDS):
                agent.stop()
                for log in _logs(instance):
                    os.truncate(log, 0)
                agent.start()
                time.sleep(_SETTLE)
                rounds.append(_measure(plane, instance, agent, names[0]))
                _print(number, rounds[-1])
            with watched_pods(plane) as pods:
                pods.delete(names)
                pods.wait_gone(names)
        finally:
            agent.stop()
    middle = {
        kind: statistics.median(one[kind].cpu for one in rounds) for kind in ("logs", "exec", "port-forward")
    }
    pss = statistics.median(one["logs"].pss for one in rounds)
    megabytes = _BYTES // 1_000_000
    return [
        Result(f"{_PODS * _CONTAINERS} logs through the API server: CPU", middle["logs"], "s", 3),
        Result(f"{_PODS * _CONTAINERS} logs through the API server: memory (PSS)", pss, "MB", 80),
        Result(f"exec of {megabytes} MB through the API server: CPU", middle["exec"], "s", 2),
        Result(f"port-forward of {megabytes} MB through the API server: CPU", middle["port-forward"], "s", 1),
    ]


def _create(plane: DevCluster, image: str, names: list[str]) -> None:
    """Create the pods and wait until they run; the first container of each serves the port."""
    with watched_pods(plane) as pods:
        for name in names:
            plane.api.request("POST", _COLLECTION, _pod(image, name), timeout=60)
        pods.wait_running(names)


def _pod(image: str, name: str) -> dict[str, Any]:
    containers = [
        {
            "name": f"c{number}",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": _QUIET if number else _SERVE,
        }
        for number in range(_CONTAINERS)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"bench": "streams"}},
        "spec": {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": 1,
            "dnsPolicy": "Default",
            "containers": containers,
        },
    }


def _logs(instance: Instance) -> list[Path]:
    found = sorted(instance.pod_logs.glob("default_streams-*/*/0.log"))
    assert len(found) == _PODS * _CONTAINERS, f"{len(found)} log files"
    return found


def _measure(plane: DevCluster, instance: Instance, agent: Agent, pod: str) -> dict[str, Sample]:
    return {
        "logs": _follow(plane, agent.pid, _logs(instance)),
        "exec": _exec(plane, agent.pid, pod),
        "port-forward": _forward(plane, agent.pid, pod),
    }


def _follow(plane: DevCluster, pid: int, logs: list[Path]) -> Sample:
    expected = len(logs) * _BURSTS * _BURST_LINES
    burst = (_LINE * _BURST_LINES).encode()
    before, began = cpu_seconds(pid), time.monotonic()
    flags = ("-f", "-l", "bench=streams", "--all-containers", "--tail=-1", f"--max-log-requests={len(logs)}")
    with _kubectl(plane, "logs", *flags) as process:
        assert process.stdout is not None
        output, lines, bursts = process.stdout.fileno(), 0, 0
        os.set_blocking(output, False)
        while lines < expected:
            now = time.monotonic() - began
            if bursts < _BURSTS and now >= bursts * _BURST_SECONDS:
                for log in logs:
                    with log.open("ab") as file:
                        file.write(burst)
                bursts += 1
            data = b""
            try:
                data = os.read(output, 1024 * 1024)
            except BlockingIOError:
                time.sleep(0.01)
            if process.poll() is not None or now > _TIMEOUT_SECONDS:
                raise RuntimeError(f"kubectl logs returned {lines} of {expected} lines")
            lines += data.count(b"\n")
        seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - before
        return Sample(seconds, cpu, pss_mb(pid), _sockets(pid))


def _exec(plane: DevCluster, pid: int, pod: str) -> Sample:
    before, began = cpu_seconds(pid), time.monotonic()
    command = ("head", "-c", str(_BYTES), "/dev/zero")
    with _kubectl(plane, "exec", pod, "-c", "c1", "--", *command) as process:
        assert process.stdout is not None
        _read(process.stdout.fileno())
        seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - before
        return Sample(seconds, cpu, pss_mb(pid), _sockets(pid))


def _forward(plane: DevCluster, pid: int, pod: str) -> Sample:
    before, began = cpu_seconds(pid), time.monotonic()
    with _kubectl(plane, "port-forward", pod, f":{_PORT}") as process:
        assert process.stdout is not None
        found = re.search(rb"127\.0\.0\.1:(\d+) ->", process.stdout.readline())
        assert found is not None
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=_TIMEOUT_SECONDS) as connection:
            connection.settimeout(None)
            _read(connection.fileno())
        seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - before
        return Sample(seconds, cpu, pss_mb(pid), _sockets(pid))


@contextlib.contextmanager
def _kubectl(plane: DevCluster, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    kubeconfig = plane.layout.kubeconfig("admin")
    command = [str(plane.programs.kubectl), f"--kubeconfig={kubeconfig}", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _read(file: int) -> None:
    left = _BYTES
    while left > 0:
        data = os.read(file, 1024 * 1024)
        if not data:
            raise RuntimeError(f"the stream ended {left} bytes early")
        left -= len(data)


def _sockets(pid: int) -> int:
    links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


def _print(number: int, samples: dict[str, Sample]) -> None:
    for kind, one in samples.items():
        print(
            f"     round {number}, {kind}: {one.seconds:.2f} s, CPU {one.cpu:.2f} s, PSS {one.pss:.1f} MB, "
            f"{one.sockets} sockets",
            flush=True,
        )
