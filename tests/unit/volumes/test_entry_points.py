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

from pykubelet.volumes.plugin import (
    BaseVolumePlugin,
    MemoryLimits,
    MountedVolume,
    VolumeHost,
    VolumePlugin,
    VolumeToMount,
)
from pykubelet.volumes.registry import GROUP, load_plugins, load_third_party_plugins
from tests.support.volumes import Node, Shelf


class Cloud(BaseVolumePlugin):
    directory_name = "example.com~cloud"

    def __init__(self, host: VolumeHost) -> None:
        self.host = host

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        return MountedVolume("/cloud")


def broken(host: VolumeHost) -> VolumePlugin:
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
def host(tmp_path: Path, shelf: Shelf) -> VolumeHost:
    return VolumeHost(tmp_path, shelf, Node(), MemoryLimits(lambda pod: None, 1))


def test_load_third_party_plugins_entry_point_is_loaded(host: VolumeHost) -> None:
    kinds = load_third_party_plugins(host, {}, [Entry("cloud", Cloud)])
    assert isinstance(kinds["cloud"], Cloud)
    assert kinds["cloud"].host is host


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Entry("cloud", broken), "Failed to load volume plugin"),
        (Entry("cloud", ImportError("no module")), "Failed to load volume plugin"),
        (Entry("cloud", lambda host: object()), "Failed to load volume plugin"),
        (Entry("emptyDir", Cloud), "of an already supported type"),
    ],
)
def test_load_third_party_plugins_invalid_entry_point_logged_and_skipped(
    host: VolumeHost, caplog: pytest.LogCaptureFixture, entry: Entry, said: str
) -> None:
    own = load_plugins(host)
    kinds = load_third_party_plugins(host, own, [entry, Entry("fine", Cloud)])
    assert kinds.keys() == {"fine"}
    told = next(record for record in caplog.records if said in record.message)
    assert f"'name': '{entry.name}'" in str(told.__dict__)


def test_load_third_party_plugins_duplicate_directory_is_skipped(
    host: VolumeHost, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = load_third_party_plugins(host, {}, [Entry("one", Cloud), Entry("two", Cloud)])
    assert kinds.keys() == {"one"}
    assert "with a duplicate directory" in caplog.text


def test_load_plugins_installed_distribution_is_found(tmp_path: Path) -> None:
    """As pip lays a package out: its folder, and beside it what it offers."""
    info = tmp_path / "cloudy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nglusterfs = cloudy:Kind\nnfs = cloudy:Kind\n")
    (tmp_path / "cloudy.py").write_text(
        "from pykubelet.volumes.plugin import BaseVolumePlugin\n"
        "class Kind(BaseVolumePlugin):\n"
        "    directory_name = 'example.com~vapour'\n"
        "    def __init__(self, host): pass\n"
        "    async def set_up(self, volume): raise OSError\n"
    )
    program = (
        "import json; from pathlib import Path\n"
        "from pykubelet.volumes.plugin import VolumeHost\n"
        "from pykubelet.volumes.registry import load_plugins\n"
        "kinds = load_plugins(VolumeHost(Path('/'), None, None, None))\n"
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
