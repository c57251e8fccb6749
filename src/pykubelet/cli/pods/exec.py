"""`pykubelet exec` and `pykubelet attach`: a command in a container, or its main process, with its streams.

The streams are prepared with the CRI calls Exec and Attach (`transport/remote_command`).

With a terminal, raw mode sends every key, Ctrl-C included, to the command; the terminal's settings are
restored however the process ends, except by SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Container, Pod
from pykubelet.cli.client import choose_container, choose_pod, run_command
from pykubelet.cli.errors import print_error
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.offline import node_pods
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.logs import container_status
from pykubelet.cli.printers import escape_unprintable, termination_reason
from pykubelet.transport.errors import CriError
from pykubelet.transport.remote_command import RemoteCommand, Result, StreamError, connect
from pykubelet.util.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.cri.client import RuntimeClient

_BLOCK = 32 * 1024


@contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Put a terminal into raw mode; restore its settings on exit."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def terminal_sizes(fd: int) -> AsyncIterator[bytes]:
    """Yield the terminal's size, initially and after each change, as JSON of the remote-command protocol."""
    changed = asyncio.Event()
    changed.set()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while await changed.wait():
            changed.clear()
            size = os.get_terminal_size(fd)
            yield json.dumps({"Width": size.columns, "Height": size.lines}).encode()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def read_input(fd: int) -> AsyncIterator[bytes]:
    """Yield the data read from a terminal, pipe or file, until its end."""
    while True:
        await _readable(fd)
        try:
            data = os.read(fd, _BLOCK)
        except BlockingIOError:
            continue
        if not data:
            return
        yield data


async def _readable(fd: int) -> None:
    """Wait until the descriptor is readable; it stays blocking, because the parent shell may share it."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:
        return  # epoll rejects regular files, which are always readable
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all data; block until it is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


EXEC, ATTACH = "pykubelet exec", "pykubelet attach"
MAX_OUTPUT_BYTES = 64 * 1024
"""Size of what `exec_output` returns."""
_CALL_TIMEOUT = Duration.from_seconds(30)
_FILES = {"stdout": 1, "stderr": 2}


class NotRunning(Exception):
    """Raised when the container is not running; the text contains its state."""


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """Options of `pykubelet exec`."""

    pod: str
    command: Sequence[str]
    container: str | None = None
    stdin: bool = False
    tty: bool = False


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Options of `pykubelet attach`."""

    pod: str
    container: str | None = None
    stdin: bool = False
    tty: bool = False


def run_exec(selection: NodeSelection, options: ExecOptions) -> int:
    """Run the command; return its exit code, or 1 if it could not be requested."""

    def work() -> int:
        node = select_node(selection)
        pod, container = _chosen(EXEC, node, options.pod, options.container)
        container_id = running_id(pod, container.name)
        raw = options.tty and _can_have_terminal(EXEC, options.stdin)

        async def prepare(runtime: RuntimeClient) -> str:
            from pykubelet.cri import runtime_pb2 as pb

            return await runtime.exec(
                pb.ExecRequest(
                    container_id=container_id,
                    cmd=options.command,
                    tty=raw,
                    stdin=options.stdin,
                    stdout=True,
                    stderr=not raw,
                )
            )

        streams = _streams(options.stdin, raw)
        return _run(_session(EXEC, node, prepare, streams, raw=raw))

    return run_command(EXEC, work, NotRunning, StreamError, CriError)


def run_attach(selection: NodeSelection, options: AttachOptions) -> int:
    """Attach to the main process of a container; return its exit code, or 1 if that is not possible."""

    def work() -> int:
        node = select_node(selection)
        pod, container = _chosen(ATTACH, node, options.pod, options.container)
        container_id = running_id(pod, container.name)
        stdin = options.stdin and container.stdin
        if options.stdin and not stdin:
            _warn(ATTACH, f"going on without input: container {container.name} has no `stdin: true`")
        raw = options.tty and container.tty and _can_have_terminal(ATTACH, stdin)
        if options.tty and not container.tty:
            _warn(ATTACH, f"going on without a terminal: container {container.name} has no `tty: true`")

        async def prepare(runtime: RuntimeClient) -> str:
            from pykubelet.cri import runtime_pb2 as pb

            # The TTY of the process was fixed when it was started.
            return await runtime.attach(
                pb.AttachRequest(
                    container_id=container_id,
                    tty=container.tty,
                    stdin=stdin,
                    stdout=True,
                    stderr=not container.tty,
                )
            )

        streams = _streams(stdin, container.tty)
        return _run(_session(ATTACH, node, prepare, streams, raw=raw))

    return run_command(ATTACH, work, NotRunning, StreamError, CriError)


def _chosen(program: str, node: Node, pod_name: str, container_name: str | None) -> tuple[Pod, Container]:
    found = node_pods(node, program)
    pod = choose_pod(found.pods, pod_name, found.states)
    container, is_default = choose_container(pod, container_name)
    if is_default and sys.stderr.isatty():
        print(f"Container {container.name} (choose another with -c)", file=sys.stderr)
    return pod, container


def running_id(pod: Pod, container: str) -> str:
    """Return the runtime's ID of a running container. Raises NotRunning."""
    status = container_status(pod, container)
    if status is not None and status.state.running is not None and status.container_id:
        return status.container_id.partition("://")[2]
    if status is not None and status.state.terminated is not None:
        state = f"it has ended ({termination_reason(status.state.terminated)})"
    else:
        waiting = status.state.waiting if status is not None else None
        state = f"it is waiting ({waiting.reason})" if waiting is not None and waiting.reason else "not yet"
    raise NotRunning(f"container {container} of pod {pod.metadata.name} does not run: {state}")


def _can_have_terminal(program: str, stdin: bool) -> bool:
    if stdin and sys.stdin.isatty():
        return True
    reason = "the input is not a terminal" if stdin else "a terminal needs -i, too"
    _warn(program, f"going on without a terminal: {reason}")
    return False


def _warn(program: str, text: str) -> None:
    print(f"{program}: {text}", file=sys.stderr)


def _streams(stdin: bool, tty: bool) -> list[str]:
    return [*(["stdin"] if stdin else []), "stdout", "resize" if tty else "stderr"]


def _run(session: Awaitable[int]) -> int:
    async def main() -> int:
        return await session

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


async def _session(
    program: str,
    node: Node,
    prepare: Callable[[RuntimeClient], Awaitable[str]],
    streams: Sequence[str],
    *,
    raw: bool,
) -> int:
    async with runtime_client(node) as runtime:
        url = await prepare(runtime)
    with ExitStack() as stack:
        if raw:
            # Ctrl-C goes to the command; other signals must still restore the terminal.
            _cancel_on(signal.SIGTERM, signal.SIGHUP)
            stack.enter_context(raw_mode(0))
        else:
            # There is no state to restore, and a blocked pipe must not delay signals.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
        result = await _run_streams(url, streams, raw=raw)
    if result.message:
        print_error(program, " ".join(escape_unprintable(result.message).split()))
    return result.exit_code


@asynccontextmanager
async def runtime_client(node: Node) -> AsyncIterator[RuntimeClient]:
    """Connect to the runtime of this node. Raises CriError."""
    # Imported here: loading gRPC takes longer than most commands run.
    from prometheus_client import CollectorRegistry

    from pykubelet.cri.channel import CriMetrics
    from pykubelet.cri.connect import connect as connect_runtime

    metrics = CriMetrics(CollectorRegistry())
    async with await connect_runtime(node.endpoint, timeout=_CALL_TIMEOUT, metrics=metrics) as cri:
        yield cri.runtime


async def exec_output(node: Node, container_id: str, command: Sequence[str]) -> tuple[Result, bytes]:
    """Run a command without input; return its result, and the beginning of what it wrote.

    Raises CriError and StreamError.
    """
    # Imported here: loading gRPC takes longer than most commands run.
    from pykubelet.cri import runtime_pb2 as pb

    async with runtime_client(node) as runtime:
        url = await runtime.exec(
            pb.ExecRequest(container_id=container_id, cmd=command, stdout=True, stderr=True)
        )
    written = bytearray()
    async with connect(url, ["stdout", "stderr"]) as running:
        async for _, data in running.output():
            written += data[: MAX_OUTPUT_BYTES - len(written)]
    return running.result, bytes(written)


async def _run_streams(url: str, streams: Sequence[str], *, raw: bool) -> Result:
    try:
        async with connect(url, streams) as command, TaskScope() as tasks:
            if "stdin" in streams:
                tasks.start(_send_input(command), name="input")
            if raw:
                tasks.start(_send_sizes(command), name="sizes")
            async for stream, data in command.output():
                if stream in _FILES:
                    await asyncio.to_thread(write_all, _FILES[stream], data)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return command.result


async def _send_input(command: RemoteCommand) -> None:
    async for data in read_input(0):
        await command.send("stdin", data)
    await command.send("stdin", b"", last=True)


async def _send_sizes(command: RemoteCommand) -> None:
    async for size in terminal_sizes(0):
        await command.send("resize", size)


def _cancel_on(*signals: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
