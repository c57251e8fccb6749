"""Wheel and sdist: metadata, generated code, and an installation without the checkout."""

import subprocess
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from pykubelet import KUBERNETES_VERSION, __version__
from release.environment import SYSTEM_PYTHON
from release.sources import build_wheel, find_release
from tests.support.packages import built_wheel

pytestmark = [pytest.mark.machine, pytest.mark.timeout(600)]


def test_wheel_installed_into_empty_environment_runs_both_programs(tmp_path: Path) -> None:
    wheel, _ = built_wheel()
    uv, environment = find_release().uv, find_release().environment()

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(uv, "venv", "--quiet", "--python", SYSTEM_PYTHON, tmp_path / "venv")
    run(uv, "pip", "install", "--quiet", "--python", tmp_path / "venv", wheel)
    programs = tmp_path / "venv/bin"
    version = f"Kubernetes {KUBERNETES_VERSION}+pykubelet{__version__}\n"
    assert run(programs / "kubelet", "--version") == version
    assert run(programs / "pykubelet", "version") == version
    assert "this machine can be a node" in run(programs / "pykubelet", "doctor")
    assert "staticPodPath" in run(programs / "pykubelet", "config", "print", "--pod-manifest-path=/m")
    modules = "import pykubelet.cri.runtime_pb2, pykubelet.agent.kubelet as k; print(k.__file__)"
    assert run(programs / "python", "-c", modules).startswith(str(tmp_path))


def test_wheel_metadata_has_licence_readme_and_programs() -> None:
    wheel, _ = built_wheel()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = f"pykubelet-{__version__}.dist-info"
        metadata = HeaderParser().parsestr(archive.read(f"{about}/METADATA").decode())
        programs = archive.read(f"{about}/entry_points.txt").decode()
    assert f"{about}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).lstrip().startswith("# pykubelet")
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    assert "kubelet = pykubelet.cli.kubelet:main" in programs
    protos = {name.removesuffix(".proto") for name in names if name.endswith(".proto")}
    assert protos
    assert protos == {name.removesuffix("_pb2.py") for name in names if name.endswith("_pb2.py")}
    assert not [name for name in names if name.startswith(("tests/", "bench/", "release/"))]


def test_wheel_and_sdist_built_twice_are_identical(tmp_path: Path) -> None:
    for first, again in zip(built_wheel(), build_wheel(find_release(), tmp_path), strict=True):
        assert first.name == again.name
        assert first.read_bytes() == again.read_bytes()


def test_sdist_contains_what_the_packages_are_built_from() -> None:
    _, sdist = built_wheel()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "hatch_build.py", "uv.lock", "packaging/deb/control", "release/deb.py"} <= names
    assert not [name for name in names if "/__pycache__/" in name or name.startswith((".venv", "dist/"))]
