"""`pykubelet cp`: files and directories from and to a running container.

The container's root directory is that of its main process, whose pid the runtime reports in its verbose
status; containerd and CRI-O do. So volumes are included as the container sees them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pykubelet.cli.client import choose_container, choose_pod, run_command
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.offline import node_pods
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.copy import CopyError, Tree, copy
from pykubelet.cli.pods.exec import NotRunning, running_id, runtime_client
from pykubelet.cli.pods.usage import format_size
from pykubelet.cli.printers import escape_unprintable
from pykubelet.transport.errors import CriError

PROGRAM = "pykubelet cp"
_MAX_INFO_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of `pykubelet cp`."""

    source: str
    target: str
    container: str | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """A path on this host, or in a container of a pod."""

    path: str
    pod: str | None = None

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse `POD:PATH`, `NAMESPACE/POD:PATH` or a path; one with a colon begins with `./` or `/`."""
        pod, colon, path = text.partition(":")
        if not colon or not pod or text.startswith(("/", "./", "../")):
            return cls(text)
        return cls(path or "/", pod)


def run_cp(selection: NodeSelection, options: CopyOptions) -> int:
    """Copy; return the exit code, 1 also if entries were left out."""

    def work() -> int:
        source, target = Location.parse(options.source), Location.parse(options.target)
        if (source.pod is None) == (target.pod is None):
            raise CopyError("one of the two paths is POD:PATH, the other one is a path on this host")
        if os.geteuid() != 0:
            raise CopyError("only root reaches the files of containers: run it with sudo")
        pod_name = source.pod or target.pod or ""
        node = select_node(selection)
        found = node_pods(node, PROGRAM)
        pod = choose_pod(found.pods, pod_name, found.states)
        container, _ = choose_container(pod, options.container)
        pid = asyncio.run(_main_pid(node, running_id(pod, container.name)))
        with closing(_Root(pid)) as root:
            host = Tree(root.host)
            its = Tree(root.container, root.owner)
            if source.pod is not None:
                copied = copy(its, source.path, host, _absolute(target.path), _warn)
            else:
                copied = copy(host, _absolute(source.path), its, target.path, _warn)
        count = "1 file" if copied.files == 1 else f"{copied.files} files"
        print(f"{count}, {format_size(copied.bytes)}", file=sys.stderr)
        return 1 if copied.skipped else 0

    return run_command(PROGRAM, work, CopyError, NotRunning, CriError)


class _Root:
    """Open root directories of a container's process and of this host."""

    def __init__(self, pid: int) -> None:
        self.host = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.container = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.owner = _mapped_root(pid)
        except OSError as err:
            os.close(self.host)
            raise CopyError(f"the container has just ended ({err.strerror}); try again") from err
        if os.path.samestat(os.fstat(self.container), os.fstat(self.host)):
            self.close()
            raise CopyError("the runtime reports a process of this host, not of a container")

    def close(self) -> None:
        os.close(self.container)
        os.close(self.host)


def _mapped_root(pid: int) -> tuple[int, int]:
    """Return the user and group of this host that are 0 in the container."""
    found = []
    for kind in ("uid_map", "gid_map"):
        ids = 0
        for line in Path(f"/proc/{pid}/{kind}").read_text().splitlines():
            inside, outside, _ = map(int, line.split())
            if inside == 0:
                ids = outside
        found.append(ids)
    return found[0], found[1]


async def _main_pid(node: Node, container_id: str) -> int:
    async with runtime_client(node) as runtime:
        response = await runtime.container_status(container_id, verbose=True)
    text = response.info.get("info", "")
    try:
        pid = json.loads(text)["pid"] if len(text) <= _MAX_INFO_CHARACTERS else 0
    except (ValueError, KeyError, TypeError, RecursionError):
        pid = 0
    if not isinstance(pid, int) or pid <= 1:
        raise CopyError(
            "the container runtime does not report the container's process: "
            "use `pykubelet exec` with tar in the container"
        )
    return pid


def _absolute(path: str) -> str:
    """Return an absolute path; a slash at its end stays, which requires a directory."""
    found = os.path.normpath(Path.cwd() / path)
    return f"{found}/" if path.endswith("/") and found != "/" else found


def _warn(text: str) -> None:
    print(f"{PROGRAM}: {escape_unprintable(text, lines=False)}", file=sys.stderr)
