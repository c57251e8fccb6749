"""`pykubelet describe`: everything about one pod on a page, up to why it is as it is."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pykubelet.cli.choose import choose_pod
from pykubelet.cli.client import NodeClient
from pykubelet.cli.describe_text import describe_text
from pykubelet.cli.guard import guarded
from pykubelet.embedded.instance import Instance

PROGRAM = "pykubelet describe"


def run_describe(data_dir: Path, name: str) -> int:
    """Print the page; returns the exit code."""

    def work() -> int:
        client = NodeClient(Instance.at(data_dir))
        node = client.pods()
        pod = choose_pod(node.pods, name, node.states)
        journal = client.journal(pod.uid)
        state = node.states.get(pod.uid, "")
        print("\n".join(describe_text(pod, state, journal, datetime.now(UTC))))
        return 0

    return guarded(PROGRAM, work)
