"""The OCI image of the agent: built from a real Debian, its programs run from the unpacked layer."""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from pykubelet import KUBERNETES_VERSION, __version__
from release.image import build_image
from release.sources import find_release
from tests.support.packages import content_of_checkout, filled_once

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def test_image_unpacked_runs_both_programs(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        build_image(find_release(), directory)

    archive = filled_once("image", content_of_checkout(), build) / "pykubelet-image.tar"
    root = tmp_path / "root"
    root.mkdir()
    with tarfile.open(archive) as opened:
        [image] = json.load(opened.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(opened.extractfile(image["Config"]))["config"]  # type: ignore[arg-type]
        layer = opened.extractfile(image["Layers"][0])
        with tarfile.open(fileobj=layer) as files:
            files.extractall(root, filter="fully_trusted")  # its own links, with absolute targets
    assert config["Entrypoint"] == ["/usr/bin/kubelet"]
    version = f"Kubernetes {KUBERNETES_VERSION}+pykubelet{__version__}\n"

    def run(*command: str) -> str:
        done = subprocess.run(
            ["chroot", str(root), *command], capture_output=True, text=True, env=_ENVIRONMENT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(*config["Entrypoint"], "--version") == version
    assert run("/usr/bin/pykubelet", "version") == version
    programs = "for name in mount iptables conntrack mkfs.ext4 ip ethtool modprobe; do command -v $name; done"
    assert len(run("/bin/sh", "-c", programs).split()) == 7
    # Nothing is compiled at the start: the layer has no dates that would invalidate what was compiled.
    assert not [path for path in root.rglob("*.pyc") if path.stat().st_mtime > 0]
