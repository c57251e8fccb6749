"""The architecture page and its figure match the source tree."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import pykubelet
from pykubelet.linux.cgroupfs import Cgroups
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.podworkers.scripted_node import ScriptedNode, container
from tests.unit.podworkers.test_cost_per_pod import cgroups

__all__ = ["cgroups", "v2"]

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name for path in (ROOT / "src/pykubelet").glob("*/__init__.py")}


def test_diagram_check_figure_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/diagram"), "--check"], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr


def test_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert set(re.findall(r"^\| `(\w+)/`", page, re.M)) == PACKAGES


def test_architecture_pages_named_modules_exist() -> None:
    pages = [ROOT / "docs/architecture.md", *(ROOT / "docs/packages").glob("*.md")]
    packages = "|".join(sorted(PACKAGES))
    for page in pages:
        for name in re.findall(rf"`((?:{packages})(?:/\w+)+)[`:]", page.read_text()):
            path = ROOT / "src/pykubelet" / name
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {name}"


ENTRIES = {
    "podconfig/mux": "SourceUpdates.update",
    "podworkers/loop": "SyncLoop.pods",
    "podworkers/pod_admission": "PodAdmission.admit",
    "podworkers/workers": "PodWorkers.sync",
    "podsync/syncer": "NodePodSyncer.sync",
    "kuberuntime/observe": "Observer.observe_pod",
    "kuberuntime/decide": "decide",
    "podsync/stages/base": "StageList.prepare",
    "podsync/stages/sandbox": "SandboxStage.ensure",
    "podsync/stages/containers": "ContainerStage.start",
    "kuberuntime/start": "ContainerStarter.start_container",
    "podsync/reporter": "StatusReporter.report",
    "status/compute": "StatusStore.set",
    "status/manager": "StatusManager.set_status",
}
"""Functions that receive a pod, by the file on its path."""


def path_of_a_pod() -> list[tuple[int, str]]:
    """Return the indentation and the module of each line of the page's path."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## The path of one pod\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^( {4,})(\w+(?:/\w+)+)(?:/\*)? {2,}\S", section, re.M)
    return [(len(indent), name) for indent, name in lines]


def callers_on_the_page(lines: list[tuple[int, str]], number: int) -> set[str]:
    """Return the file that a line is indented under, and those beside it and before it."""
    indent, found = lines[number][0], set()
    for other, name in reversed(lines[:number]):
        if other <= indent:
            found.add(name)
        if other < indent:
            break
    return found


def test_architecture_page_path_of_a_pod_has_at_most_twelve_files() -> None:
    names = [name for _, name in path_of_a_pod()]
    assert names[0] == "podconfig/file_source"
    assert names[-1] == "status/manager"
    for name in names:
        path = ROOT / "src/pykubelet" / name
        assert path.is_dir() or path.with_suffix(".py").exists(), name
    assert len([name for name in names if name != "podsync/stages"]) <= 12


def file_of(module: str) -> str:
    """Return the name of a module on the page: all stages are one, and so are the sources."""
    if module.startswith("podsync/stages/"):
        return "podsync/stages"
    return "podconfig/file_source" if module == "podconfig/api_source" else module


@contextmanager
def recorded_calls() -> Iterator[set[tuple[str, str, str]]]:
    """Record the calls between modules of pykubelet: the caller's module, the function's, the function."""
    source, calls = f"{Path(pykubelet.__file__).parent}/", set[tuple[str, str, str]]()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(source):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(source):
            caller = caller.f_back
        if caller is not None:
            modules = [code.co_filename[len(source) : -3] for code in (caller.f_code, frame.f_code)]
            calls.add((modules[0], modules[1], frame.f_code.co_qualname))

    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.looptime
async def test_architecture_page_path_of_a_pod_is_the_one_that_pods_take(
    tmp_path: Path, cgroups: Cgroups
) -> None:
    """Verify that each file of the page's path is called by its neighbours, with no module in between."""
    node = ScriptedNode(tmp_path / "root", cgroups)
    async with node.running():
        with recorded_calls() as calls:
            node.api.put(containers=[container()])
            await node.until(lambda: node.api.status()["phase"] == "Running")
    lines = path_of_a_pod()
    assert set(map(file_of, ENTRIES)) == {name for _, name in lines[1:]}
    for number, (_, name) in enumerate(lines[1:], 1):
        neighbours = callers_on_the_page(lines, number)
        for module, function in ENTRIES.items():
            if file_of(module) != name:
                continue
            callers = {caller for caller, called, what in calls if (called, what) == (module, function)}
            assert neighbours & set(map(file_of, callers)), f"{module}: {function} is called by {callers}"
