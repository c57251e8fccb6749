"""One containerd process: started, awaited until it really works, stopped.

It gets a session of its own, so that Ctrl-C in a terminal reaches only the agent, and a
parent-death signal, so that it does not outlive an agent that was killed. Containers outlive both:
their shims are nobody's children.
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
START_TIMEOUT = 30.0
STOP_GRACE = 10.0
LOG_LIMIT = 10 * 1024 * 1024
_ASK_AGAIN = 0.02
_CALL_TIMEOUT = Duration.of(60)


class Daemon:
    """The containerd of a private runtime; may be started again after it ended."""

    def __init__(
        self, instance: Instance, machine: HostRequirements, *, start_timeout: float = START_TIMEOUT
    ) -> None:
        self._instance = instance
        self._machine = machine
        self._start_timeout = start_timeout
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The running process; None when there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it and return when it can run pods.

        A containerd that an earlier agent left behind is replaced. Raises RuntimeFailed, with the
        last words of its log, when it ends or is not ready in time; nothing is running then.
        """
        await stop_strays(self._instance)
        self._instance.socket.unlink(missing_ok=True)
        bound_log(self._instance.containerd_log)
        position = _size(self._instance.containerd_log)
        try:
            await self._spawn()
            await self._ready()
        except BaseException as err:
            await self.stop()
            if isinstance(err, RuntimeFailed) and (
                words := last_words(self._instance.containerd_log, position)
            ):
                raise RuntimeFailed(f"{err}; its log ends with: {words}") from err
            raise

    async def wait(self) -> int:
        """Wait until it ends and give its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """End it, and return when it has ended; containers go on."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_GRACE):
                await process.wait()
        except TimeoutError:
            log.warning("containerd does not stop: killing it", pid=process.pid)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def connect(self) -> RuntimeConnection:
        """Give a connection to it."""
        # Our own calls are not the agent's: they must not show in its metrics.
        return await connect(
            self._instance.endpoint,
            timeout=_CALL_TIMEOUT,
            metrics=CriMetrics(CollectorRegistry()),
            connect_timeout=Duration.of(self._start_timeout),
        )

    async def _spawn(self) -> None:
        programs = self._machine.programs
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
                    env=environment(),
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
                            missing = await self._ask()
                        except CriError as err:
                            if err.code == "Unimplemented":
                                raise RuntimeFailed("containerd runs, but its CRI part does not") from err
                            missing = str(err)
                        if not missing:
                            return
                    await asyncio.sleep(_ASK_AGAIN)
        except TimeoutError:
            raise RuntimeFailed(
                f"containerd was not ready after {self._start_timeout:g} s: {missing}"
            ) from None
        raise RuntimeFailed(f"containerd ended with status {self._process.returncode} while starting")

    async def _ask(self) -> str:
        """Give what is missing before pods can run; nothing when all is well."""
        async with await self.connect() as cri:
            status: pb.RuntimeStatus = (await cri.runtime.status()).status
        return "; ".join(f"{it.type}: {it.reason} {it.message}" for it in status.conditions if not it.status)


async def stop_strays(instance: Instance) -> None:
    """End every containerd of this data directory, whoever started it."""
    for process in find_daemons(instance):
        if process.pid != os.getpid():
            log.info("Stopping a containerd that was left behind", pid=process.pid)
            await end(process, grace=STOP_GRACE)


def find_daemons(instance: Instance) -> list[Process]:
    """Give every containerd that runs with this data directory's configuration."""
    arguments = _config_arguments(instance)
    return [process for process in list_processes() if process.argv[-2:] == arguments]


def log_is_long(path: Path, limit: int = LOG_LIMIT) -> bool:
    """Whether `bound_log` would do something."""
    return _size(path) > limit


def bound_log(path: Path, limit: int = LOG_LIMIT) -> None:
    """Keep a log from growing: beyond `limit` bytes it becomes `…log.1` and starts over.

    It is copied and emptied, not renamed, because containerd keeps it open; it appends, so it goes
    on at the new beginning.
    """
    if log_is_long(path, limit):
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)


def last_words(path: Path, position: int = 0, limit: int = 600) -> str:
    """Give the end of a log after `position` in one line: its complaints, else its last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(position, _size(path) - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    spoken = [line for line in lines if line.strip()]
    complaints = [line for line in spoken if "level=info" not in line and "level=debug" not in line]
    chosen = complaints[-3:] or spoken[-1:]
    return " | ".join(chosen)[-limit:]


def _config_arguments(instance: Instance) -> tuple[str, str]:
    return ("--config", str(instance.containerd_config))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
