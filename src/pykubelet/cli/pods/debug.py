"""`pykubelet debug`: a command in an ephemeral container, which the running kubelet adds to a pod.

The container shares the pod's network, and with `--target` sees the processes of a container. It is not in
the manifest: it ends with its command or with the pod, and the kubelet forgets it when it is restarted.

With `-i` its main process is attached to our input, which is closed when we detach. Otherwise its output is
followed until it ends, and Ctrl-C stops it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.client import (
    NodeClient,
    NodeError,
    NotFoundError,
    choose_container,
    choose_pod,
    run_command,
    signals_deferred,
)
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.exec import AttachOptions, NotRunning, run_attach, running_id, runtime_client
from pykubelet.cli.pods.logs import LogOptions, container_status, run_logs
from pykubelet.cli.printers import escape_unprintable
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from pykubelet.transport.errors import CriError

PROGRAM = "pykubelet debug"
FAILURES = frozenset(
    {"ErrImagePull", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError"}
    | {"CreateContainerError", "RunContainerError"}
)
"""Reasons for which the container will most likely never start."""
END_SECONDS = 5.0
"""Time in which the end of the attached process shows in the pod's status."""
STOP_SECONDS = 2
"""Grace period of the container after Ctrl-C."""
_POLL_SECONDS = 0.1
_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class DebugOptions:
    """Options of `pykubelet debug`."""

    pod: str
    command: Sequence[str] = ()
    image: str | None = None
    target: str | None = None
    stdin: bool = False
    tty: bool = False
    timeout: float = 120.0
    """Seconds for the start of the container."""


def run_debug(selection: NodeSelection, options: DebugOptions) -> int:
    """Run the command; return its exit code, or 1 if it did not start."""

    def work() -> int:
        node = select_node(selection)
        found = node.client.pods()
        pod = choose_pod(found.pods, options.pod, found.states)
        if not node.info.standalone:
            raise NodeError("the node has an API server: use `kubectl debug`")
        if options.target is not None:
            choose_container(pod, options.target)
        container = debug_container(options)
        node.client.add_ephemeral_container(pod.uid, container)
        print(f"Container {container.name} of pod {pod.metadata.name}", file=sys.stderr)
        try:
            status = _wait_for_start(node.client, pod, container.name, options.timeout)
        except KeyboardInterrupt:
            print(f"Container {container.name} stays in the pod until it ends.", file=sys.stderr)
            raise
        if status.state.terminated is None and options.stdin:
            if options.tty:
                print("If there is no prompt, press Enter.", file=sys.stderr)
            attached = AttachOptions(pod.uid, container.name, stdin=True, tty=options.tty)
            code = run_attach(selection, attached)
        else:
            code = run_logs(selection, LogOptions(pod.uid, container.name, follow=True))
            if code == _INTERRUPTED:
                with signals_deferred():
                    asyncio.run(_stop(node, pod, container.name))
        return code or _exit_code(node.client, pod, container.name)

    return run_command(PROGRAM, work, CriError)


def debug_container(options: DebugOptions) -> Container:
    """Return the container, with a name that no container of the pod has had."""
    image = options.image or BUSYBOX_IMAGE
    return Container(
        name=f"debugger-{secrets.token_hex(3)}",
        image=image,
        # The seed image comes from no registry.
        image_pull_policy="Never" if image == BUSYBOX_IMAGE else "",
        command=list(options.command),
        stdin=options.stdin,
        # Its end closes the input, so that no shell is left in the pod.
        stdin_once=options.stdin,
        tty=options.tty,
        target_container_name=options.target or "",
    )


def _wait_for_start(client: NodeClient, pod: Pod, name: str, seconds: float) -> ContainerStatus:
    deadline = time.monotonic() + seconds
    state = "it is not in the pod's status"
    while time.monotonic() < deadline:
        status = container_status(client.pod(pod.uid).pods[0], name)
        if status is not None and (status.state.running or status.state.terminated) is not None:
            return status
        if status is not None and (waiting := status.state.waiting) is not None:
            state = escape_unprintable(f"{waiting.reason}: {waiting.message}".strip(": "), lines=False)
            if waiting.reason in FAILURES:
                # The default image comes with the nodes of `pykubelet up`, and from no registry.
                remedy = "; give --image" if waiting.reason == "ErrImageNeverPull" else ""
                raise NodeError(f"container {name} does not start: {state}{remedy}")
        time.sleep(_POLL_SECONDS)
    raise NodeError(f"container {name} has not started after {seconds:g}s: {state}")


async def _stop(node: Node, pod: Pod, name: str) -> None:
    """Stop the container, which nobody follows any more; the kubelet does not start it again."""
    try:
        container_id = running_id(node.client.pod(pod.uid).pods[0], name)
    except (NotRunning, NotFoundError):
        return
    async with runtime_client(node) as runtime:
        await runtime.stop_container(container_id, STOP_SECONDS)


def _exit_code(client: NodeClient, pod: Pod, name: str) -> int:
    """Return the exit code of the container; 0 if it still runs."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        status = container_status(client.pod(pod.uid).pods[0], name)
        if status is not None and status.state.terminated is not None:
            return status.state.terminated.exit_code
        time.sleep(_POLL_SECONDS)
    return 0
