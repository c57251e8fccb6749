"""The commands of the tutorials, run as an operator would, on a node that `pykubelet up` has started."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_dir import short_dir, take_down
from tests.support.node import BIN, Node, running, up_node
from tests.support.ports import free_port
from tests.support.tutorials import Tutorial, steps

pytestmark = pytest.mark.machine
EXAMPLES = Path(__file__).parents[3] / "examples"
PAGES = ("edge.md", "from-compose.md", "migrating.md", "troubleshooting.md")
"""Pages on one node; `start.md` starts and removes its own."""


def tutorial(node: Node, directory: Path) -> Tutorial:
    """Return the runner of blocks on a node."""
    data_dir = str(node.instance.data_dir)
    ports = dict(flag.removeprefix("--").split("=") for flag in node.command if "-port=" in flag)
    replaced = {
        "/var/lib/pykubelet": data_dir,
        "/srv/site": str(directory / "site"),
        ":10248": f":{ports['healthz-port']}",
        ":10255": f":{ports['read-only-port']}",
        "8080": str(free_port()),
    }
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYKUBELET_DATA_DIR": data_dir}
    runner = Tutorial(directory, replaced, env)
    shutil.copytree(EXAMPLES, directory / "examples")
    for path in (directory / "examples").rglob("*.yaml"):
        path.write_text(runner.translate(path.read_text()))
    return runner


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A node that `pykubelet up` has started."""
    with short_dir() as data_dir, running(up_node(data_dir)) as started:
        yield started


@pytest.mark.parametrize("page", PAGES)
def test_tutorial_commands_have_the_described_outcome(node: Node, page: str, tmp_path: Path) -> None:
    runner = tutorial(node, tmp_path)
    try:
        for step in steps(page):
            runner.run(step)
    finally:
        node.clear()


def test_tutorial_start_runs_from_up_to_down(tmp_path: Path) -> None:
    found = steps("start.md")
    with short_dir() as data_dir:
        made = up_node(data_dir)
        assert (found[0].rule, found[-1].rule) == ("node", "down")
        # Ports and directory are the test's; the rest of the command is the page's.
        assert shlex.split(found[0].text) == [Path(made.command[0]).name, made.command[1]]
        assert shlex.split(found[-1].text) == ["pykubelet", "down"]
        with running(made):
            runner = tutorial(made, tmp_path)
            for step in found[1:-1]:
                runner.run(step)
        take_down(data_dir)
