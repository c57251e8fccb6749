"""`pykubelet exec`: a command in a running container, with its input, output and exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.cli.choose import choose_container, choose_pod
from pykubelet.cli.client import NodeClient
from pykubelet.cli.complain import complain
from pykubelet.cli.guard import guarded
from pykubelet.cli.log_places import container_status
from pykubelet.cli.pod_words import ended_word
from pykubelet.cli.remote_command import RemoteCommand, Result, StreamError, connect
from pykubelet.cli.tables import visible
from pykubelet.cli.terminal import input_of, raw_mode, sizes, write_all
from pykubelet.cri.errors import CriError
from pykubelet.embedded.instance import Instance
from pykubelet.tasks import TaskScope

PROGRAM = "pykubelet exec"
_PATIENCE = Duration.of(30)
_FILES = {"stdout": 1, "stderr": 2}


class NotRunning(Exception):
    """The container does not run; the text says what it does instead."""


@dataclass(frozen=True, slots=True)
class ExecWish:
    """What a person wants to run, and where."""

    pod: str
    command: Sequence[str]
    container: str | None = None
    stdin: bool = False
    tty: bool = False


def run_exec(data_dir: Path, wish: ExecWish) -> int:
    """Run the command; returns its exit code, or 1 when it could not be run."""

    def work() -> int:
        instance = Instance.at(data_dir)
        node = NodeClient(instance).pods()
        pod = choose_pod(node.pods, wish.pod, node.states)
        container, guessed = choose_container(pod, wish.container)
        if guessed and sys.stderr.isatty():
            print(f"Container {container.name} (choose another with -c)", file=sys.stderr)
        tty = wish.tty and _can_have_terminal(wish)
        try:
            return asyncio.run(_exec(_endpoint(instance), running_id(pod, container.name), wish, tty))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM

    return guarded(PROGRAM, work, NotRunning, StreamError, CriError)


def running_id(pod: Pod, container: str) -> str:
    """The runtime's id of a container that runs; raises NotRunning."""
    status = container_status(pod, container)
    if status is not None and status.state.running is not None and status.container_id:
        return status.container_id.partition("://")[2]
    if status is not None and status.state.terminated is not None:
        how = f"it has ended ({ended_word(status.state.terminated)})"
    else:
        waiting = status.state.waiting if status is not None else None
        how = f"it is waiting ({waiting.reason})" if waiting is not None and waiting.reason else "not yet"
    raise NotRunning(f"container {container} of pod {pod.metadata.name} does not run: {how}")


def _can_have_terminal(wish: ExecWish) -> bool:
    if wish.stdin and sys.stdin.isatty():
        return True
    why = "the input is not a terminal" if wish.stdin else "a terminal needs -i, too"
    print(f"{PROGRAM}: going on without a terminal: {why}", file=sys.stderr)
    return False


def _endpoint(instance: Instance) -> str:
    """Where this node's runtime listens: `up` writes down which one it uses."""
    import yaml

    try:
        written = yaml.safe_load((instance.data_dir / "kubelet.yaml").read_bytes())
        return str(written["containerRuntimeEndpoint"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return instance.endpoint


async def _exec(endpoint: str, container_id: str, wish: ExecWish, tty: bool) -> int:
    streams = ["stdin"] if wish.stdin else []
    streams += ["stdout", "resize"] if tty else ["stdout", "stderr"]
    url = await _prepare(endpoint, container_id, wish, tty)
    with ExitStack() as stack:
        if tty:
            # Ctrl-C is the command's; an end from outside must still give the terminal back.
            _cancel_on(signal.SIGTERM, signal.SIGHUP)
            stack.enter_context(raw_mode(0))
        else:
            # Nothing of ours needs to be undone, and a blocked pipe must not hold up Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        result = await _converse(url, streams)
    if result.message:
        complain(PROGRAM, " ".join(visible(result.message).split()))
    return result.exit_code


async def _converse(url: str, streams: Sequence[str]) -> Result:
    try:
        async with connect(url, streams) as command, TaskScope() as pumps:
            if "stdin" in streams:
                pumps.start(_send_input(command), name="input")
            if "resize" in streams:
                pumps.start(_send_sizes(command), name="sizes")
            async for stream, data in command.output():
                if stream in _FILES:
                    await asyncio.to_thread(write_all, _FILES[stream], data)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return command.result


async def _prepare(endpoint: str, container_id: str, wish: ExecWish, tty: bool) -> str:
    # Imported here: gRPC takes longer to load than most commands take to run.
    from prometheus_client import CollectorRegistry

    from pykubelet.cri import runtime_pb2 as pb
    from pykubelet.cri.connect import connect as connect_runtime
    from pykubelet.cri.metrics import CriMetrics

    request = pb.ExecRequest(
        container_id=container_id, cmd=wish.command, tty=tty, stdin=wish.stdin, stdout=True, stderr=not tty
    )
    metrics = CriMetrics(CollectorRegistry())
    async with await connect_runtime(endpoint, timeout=_PATIENCE, metrics=metrics) as cri:
        return await cri.runtime.exec(request)


async def _send_input(command: RemoteCommand) -> None:
    async for data in input_of(0):
        await command.send("stdin", data)
    await command.send("stdin", b"", last=True)


async def _send_sizes(command: RemoteCommand) -> None:
    async for size in sizes(0):
        await command.send("resize", size)


def _cancel_on(*signals: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
