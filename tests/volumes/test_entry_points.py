"""Kinds of volumes that others bring."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumePlugin, VolumeToMount
from pykubelet.volumes.registry import GROUP, make_kinds, others_kinds
from tests.volumes.conftest import Node, Shelf


class Cloud(BaseVolumePlugin):
    folder = "example.com~cloud"

    def __init__(self, given: VolumeHost) -> None:
        self.given = given

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        return MountedVolume("/cloud")


def broken(given: VolumeHost) -> VolumePlugin:
    raise RuntimeError("no cloud today")


@dataclass
class Entry:
    name: str
    made_by: Any
    value: str = "cloud:Cloud"

    def load(self) -> Callable[[VolumeHost], VolumePlugin]:
        if isinstance(self.made_by, Exception):
            raise self.made_by
        maker: Callable[[VolumeHost], VolumePlugin] = self.made_by
        return maker


@pytest.fixture
def given(tmp_path: Path, shelf: Shelf) -> VolumeHost:
    return VolumeHost(tmp_path, shelf, Node(), lambda pod: None, 1, True)


def test_a_new_kind(given: VolumeHost) -> None:
    kinds = others_kinds(given, {}, [Entry("cloud", Cloud)])
    assert isinstance(kinds["cloud"], Cloud)
    assert kinds["cloud"].given is given


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Entry("cloud", broken), "Failed to load volume plugin"),
        (Entry("cloud", ImportError("no module")), "Failed to load volume plugin"),
        (Entry("cloud", lambda given: object()), "Ignored invalid volume plugin"),
        (Entry("emptyDir", Cloud), "of an already supported type"),
    ],
)
def test_what_is_wrong_is_told_by_name_and_passed_over(
    given: VolumeHost, caplog: pytest.LogCaptureFixture, entry: Entry, said: str
) -> None:
    own = make_kinds(given)
    kinds = others_kinds(given, own, [entry, Entry("fine", Cloud)])
    assert kinds.keys() == {"fine"}
    told = next(record for record in caplog.records if said in record.message)
    assert f"'kind': '{entry.name}'" in str(told.__dict__)


def test_one_folder_has_one_kind(given: VolumeHost, caplog: pytest.LogCaptureFixture) -> None:
    kinds = others_kinds(given, {}, [Entry("one", Cloud), Entry("two", Cloud)])
    assert kinds.keys() == {"one"}
    assert "with a duplicate directory" in caplog.text


def test_an_installed_one_is_found(tmp_path: Path) -> None:
    """As pip lays a package out: its folder, and beside it what it offers."""
    info = tmp_path / "cloudy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nglusterfs = cloudy:Kind\nnfs = cloudy:Kind\n")
    (tmp_path / "cloudy.py").write_text(
        "from pykubelet.volumes.plugin import BaseVolumePlugin\n"
        "class Kind(BaseVolumePlugin):\n"
        "    folder = 'example.com~vapour'\n"
        "    def __init__(self, given): pass\n"
        "    async def set_up(self, wanted): raise OSError\n"
    )
    program = (
        "import json; from pathlib import Path\n"
        "from pykubelet.volumes.plugin import VolumeHost\n"
        "from pykubelet.volumes.registry import make_kinds\n"
        "kinds = make_kinds(VolumeHost(Path('/'), None, None, None, 0, True))\n"
        "print(json.dumps({name: type(kind).__module__ for name, kind in kinds.items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    kinds = json.loads(done.stdout)
    assert kinds["glusterfs"] == "cloudy", "what the agent refuses, others may give"
    assert kinds["nfs"] == "pykubelet.volumes.plugins.nfs", "what the agent gives stays its own"
    assert "already supported type" in done.stderr
