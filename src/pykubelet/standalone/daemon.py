"""One containerd process: started, awaited until it is ready to run pods, stopped.

It runs in its own session, so that Ctrl-C in a terminal reaches only the kubelet, and has a parent-death
signal, so that it does not outlive a killed kubelet. Containers outlive both: their shims are not children
of either.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.linux.processes import Process, end, environment, list_processes
from pykubelet.logs import get_logger
from pykubelet.standalone.instance import Instance, RuntimeFailed
from pykubelet.standalone.requirements import HostRequirements
from pykubelet.transport.errors import CriError

log = get_logger(__name__)
REQUIRED_CONDITIONS = ("RuntimeReady", "NetworkReady")
"""Conditions without which no pod can run; containerd 2.x has further ones, such as deprecation warnings."""
START_TIMEOUT = 30.0
STOP_GRACE = 10.0
LOG_LIMIT = 10 * 1024 * 1024
_POLL_SECONDS = 0.02
_CALL_TIMEOUT = Duration.from_seconds(60)


class Daemon:
    """The containerd process of a private runtime; can be started again after it exits."""

    def __init__(
        self, instance: Instance, host: HostRequirements, *, start_timeout: float = START_TIMEOUT
    ) -> None:
        self._instance = instance
        self._host = host
        self._start_timeout = start_timeout
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the running process, or None."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start containerd and return when it is ready to run pods.

        A containerd left by an earlier kubelet process is stopped first. Raises RuntimeFailed, with the end
        of its log, when it exits or is not ready in time; it is not running then.
        """
        await stop_orphans(self._instance)
        self._instance.socket.unlink(missing_ok=True)
        rotate_log(self._instance.containerd_log)
        position = _size(self._instance.containerd_log)
        try:
            await self._spawn()
            await self._ready()
        except BaseException as err:
            await self.stop()
            if isinstance(err, RuntimeFailed) and (
                log_end := last_log_problems(self._instance.containerd_log, position)
            ):
                raise RuntimeFailed(f"{err}; its log ends with: {log_end}") from err
            raise

    async def wait(self) -> int:
        """Wait until the process exits and return its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Stop the process and wait until it has exited; containers keep running."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_GRACE):
                await process.wait()
        except TimeoutError:
            log.warning("Private containerd did not stop in time, killing it", pid=process.pid)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def connect(self) -> RuntimeConnection:
        """Return a CRI connection."""
        # These calls must not count in the kubelet's metrics.
        return await connect(
            self._instance.endpoint,
            timeout=_CALL_TIMEOUT,
            metrics=CriMetrics(CollectorRegistry()),
            connect_timeout=Duration.from_seconds(self._start_timeout),
        )

    async def _spawn(self) -> None:
        programs = self._host.programs
        command = [str(programs["setpriv"]), "--pdeathsig", "TERM", "--", str(programs["containerd"])]
        try:
            with self._instance.containerd_log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    *_config_arguments(self._instance),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    cwd="/",
                    env=_environment(programs["containerd"]),
                )
        except OSError as err:
            raise RuntimeFailed(f"containerd cannot be started: {err.strerror or err}") from err

    async def _ready(self) -> None:
        assert self._process is not None
        missing = "it does not listen"
        try:
            async with asyncio.timeout(self._start_timeout):
                while self._process.returncode is None:
                    if self._instance.socket.is_socket():
                        try:
                            missing = await self._unmet_conditions()
                        except CriError as err:
                            if err.code == "Unimplemented":
                                raise RuntimeFailed("containerd runs, but its CRI part does not") from err
                            missing = str(err)
                        if not missing:
                            return
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise RuntimeFailed(
                f"containerd was not ready after {self._start_timeout:g} s: {missing}"
            ) from None
        raise RuntimeFailed(f"containerd ended with status {self._process.returncode} while starting")

    async def _unmet_conditions(self) -> str:
        """Return the runtime conditions that are not met; empty if pods can run."""
        async with await self.connect() as cri:
            status: pb.RuntimeStatus = (await cri.runtime.status()).status
        return "; ".join(
            f"{condition.type}: {condition.reason} {condition.message}"
            for condition in status.conditions
            if condition.type in REQUIRED_CONDITIONS and not condition.status
        )


async def stop_orphans(instance: Instance) -> None:
    """Stop every containerd of this data directory, whichever process started it."""
    for process in find_daemons(instance):
        if process.pid != os.getpid():
            log.info("Stopping orphaned containerd", pid=process.pid)
            await end(process, grace=STOP_GRACE)


def find_daemons(instance: Instance) -> list[Process]:
    """Return every containerd process with this data directory's configuration."""
    arguments = _config_arguments(instance)
    return [process for process in list_processes() if process.argv[-2:] == arguments]


def log_is_long(path: Path, limit: int = LOG_LIMIT) -> bool:
    """Return whether a log exceeds `limit` bytes."""
    return _size(path) > limit


def rotate_log(path: Path, limit: int = LOG_LIMIT) -> None:
    """Rotate a log above `limit` bytes to `…log.1`.

    The log is copied and truncated, not renamed, because containerd keeps it open; it is opened for
    appending, so containerd continues at the new end.
    """
    if log_is_long(path, limit):
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)


def last_log_problems(path: Path, position: int = 0, limit: int = 600) -> str:
    """Return the last warnings and errors of a log after `position` in one line, else its last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(position, _size(path) - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    nonempty_lines = [line for line in lines if line.strip()]
    problems = [line for line in nonempty_lines if "level=info" not in line and "level=debug" not in line]
    selected = problems[-3:] or nonempty_lines[-1:]
    return " | ".join(selected)[-limit:]


def _environment(containerd: Path) -> dict[str, str]:
    """Return the environment of containerd, which finds its shim by PATH: the one beside it comes first."""
    found = environment()
    return {**found, "PATH": f"{containerd.parent}{os.pathsep}{found['PATH']}"}


def _config_arguments(instance: Instance) -> tuple[str, str]:
    return ("--config", str(instance.containerd_config))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
