"""`pykubelet restart`: containers of a pod anew, in place; the pod keeps its address and its volumes."""

from __future__ import annotations

from pathlib import Path

from pykubelet.cli.choose import choose_container, choose_pod
from pykubelet.cli.client import NodeClient
from pykubelet.cli.guard import guarded
from pykubelet.embedded.instance import Instance

PROGRAM = "pykubelet restart"


def run_restart(data_dir: Path, name: str, container: str | None) -> int:
    """Ask for the restart; returns the exit code."""

    def work() -> int:
        client = NodeClient(Instance.at(data_dir))
        node = client.pods()
        pod = choose_pod(node.pods, name, node.states)
        if container is not None:
            choose_container(pod, container)
        restarted = client.restart(pod.uid, container)
        print(f"Restarting {', '.join(restarted)} of {pod.metadata.name} in place")
        return 0

    return guarded(PROGRAM, work)
