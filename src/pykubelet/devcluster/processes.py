"""The control plane's processes: starting them, finding them again, ending them.

They are found by what they were started with, not by pid files, so a cluster whose starter was
killed in the middle, or that lost one of its processes, is seen as it is. A process is signalled
through a pidfd: never another one that got its pid.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pykubelet.devcluster.commands import mark
from pykubelet.devcluster.errors import DevClusterError
from pykubelet.devcluster.layout import Component, Layout
from pykubelet.host.processes import Process, environment, find_process, list_processes

_KILL_TIMEOUT = 10.0


def running(layout: Layout) -> dict[Component, Process]:
    """Give the components of this cluster that run now."""
    found = {}
    marks = {component: mark(component, layout) for component in Component}
    for process in list_processes():
        for component, argument in marks.items():
            if argument in process.argv and Path(process.argv[0]).name == component:
                found[component] = process
    return found


def spawn(command: Sequence[str], log: Path, *, owned: bool) -> subprocess.Popen[bytes]:
    """Start a component, with what it says appended to its log.

    Owned ones are killed when the thread that started them ends, in whatever way; the others have a
    session of their own and outlive everybody.
    """
    tied = ["setpriv", "--pdeathsig", "KILL", "--"] if owned else []
    # The control plane talks to itself and to nodes; a proxy for the world outside is none for that.
    env = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*tied, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=env,
                start_new_session=True,
            )
    except OSError as err:
        raise DevClusterError(f"{Path(command[0]).name} cannot be started: {err.strerror or err}") from err


def end(process: Process, *, grace: float) -> bool:
    """Ask a process to end, kill it after `grace` seconds (at once with 0); returns whether it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        current = find_process(process.pid)
        if current is None or current.start != process.start:
            return True
        if grace > 0 and _signal(fd, signal.SIGTERM, grace):
            return True
        return _signal(fd, signal.SIGKILL, _KILL_TIMEOUT)
    finally:
        os.close(fd)


def last_words(log: Path, limit: int = 500) -> str:
    """Give in one line what a component said last, complaints before chatter."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it said nothing"
    spoken = [line.strip() for line in lines if line.strip()]
    complaints = [line for line in spoken if line[0] in "EF" or '"level":"fatal"' in line or "rror:" in line]
    return (complaints or spoken or ["it said nothing"])[-1][-limit:]


def _signal(fd: int, number: signal.Signals, timeout: float) -> bool:
    """Signal a process and say whether it ends within the time."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
