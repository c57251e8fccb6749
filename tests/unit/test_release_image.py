"""The OCI image of the agent: layout, digests, configuration and what its layer leaves out.

The Debian and the Python environment are replaced by a small tree; the real ones are in
tests/machine/packages/test_image.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pykubelet.standalone.seed_images import machine_platform
from release import image
from release.environment import PREFIX, Environment
from release.image import image_name, write_image
from release.sources import BuildError, Release

RELEASE = Release("1.2.3", 1_700_000_000)


def make_root(root: Path, python: str = "3.99") -> None:
    """Make a tree with files that an image has, and files that it must not have."""
    files = {
        f"usr/bin/python{python}": "python",
        f"usr/lib/python{python}/os.py": "import sys",
        "usr/share/doc/a/copyright": "licence",
        "usr/share/doc/a/README": "text",
        "usr/share/man/man1/a.1": "manual",
        "var/cache/apt/archives/a.deb": "archive",
        "var/log/dpkg.log": "log",
        "etc/hostname": "builder",
        "etc/machine-id": "0123",
        "etc/resolv.conf": "nameserver 192.0.2.1",
        "tmp/left": "x",
        "usr/bin/su": "su",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if "/bin/" in name else 0o644)
    (root / "usr/bin/su").chmod(0o4755)
    (root / "var/tmp").mkdir()
    (root / "bin").symlink_to("usr/bin")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an archive that was built from the tree."""
    replace_builders(monkeypatch, "3.99")
    root = tmp_path / "root"
    make_root(root)
    return write_image(RELEASE, root, tmp_path / "out")


def replace_builders(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    def build_environment(release: Release, wheel: Path, root: Path) -> Environment:
        programs = root / PREFIX.lstrip("/") / "bin"
        programs.mkdir(parents=True)
        for name in ("kubelet", "pykubelet"):
            (programs / name).write_text("#!/usr/lib/pykubelet/bin/python\n")
            (programs / name).chmod(0o755)
        return Environment(root, python)

    monkeypatch.setattr(image, "build_wheel", lambda release, out: (out / "a.whl", out / "a.tar.gz"))
    monkeypatch.setattr(image, "build_environment", build_environment)
    monkeypatch.setattr(image, "compile_modules", lambda release, directory, root: None)


def blobs_of(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive by name."""
    found = {}
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if member.isfile():
                file = opened.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


def blob(blobs: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """Return the blob of a descriptor, whose digest and size are verified."""
    algorithm, _, digest = descriptor["digest"].partition(":")
    data = blobs[f"blobs/{algorithm}/{digest}"]
    assert (algorithm, hashlib.sha256(data).hexdigest(), len(data)) == ("sha256", digest, descriptor["size"])
    return data


def test_image_is_an_oci_layout_with_verifiable_digests(built: Path) -> None:
    blobs = blobs_of(built)
    assert built.name == "pykubelet-image.tar"
    assert [path.name for path in built.parent.iterdir()] == [built.name]
    assert json.loads(blobs["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    [descriptor] = json.loads(blobs["index.json"])["manifests"]
    expected = machine_platform(platform.machine()).document()
    assert descriptor["platform"] == expected
    assert descriptor["annotations"] == {
        "io.containerd.image.name": "pykubelet.local/pykubelet:1.2.3",
        "org.opencontainers.image.ref.name": "1.2.3",
    }
    manifest = json.loads(blob(blobs, descriptor))
    config = json.loads(blob(blobs, manifest["config"]))
    [layer] = manifest["layers"]
    blob(blobs, layer)
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"]]}
    assert (config["os"], config["architecture"]) == ("linux", expected["architecture"])
    assert len([name for name in blobs if name.startswith("blobs/")]) == 3
    [docker] = json.loads(blobs["manifest.json"])
    assert docker["RepoTags"] == [image_name(RELEASE)]
    assert docker["Config"] in blobs
    assert docker["Layers"] == [f"blobs/{layer['digest'].replace(':', '/')}"]


def test_image_config_starts_the_kubelet(built: Path) -> None:
    blobs = blobs_of(built)
    [descriptor] = json.loads(blobs["index.json"])["manifests"]
    config = json.loads(blob(blobs, json.loads(blob(blobs, descriptor))["config"]))["config"]
    assert config["Entrypoint"] == ["/usr/bin/kubelet"]
    assert "Cmd" not in config
    assert "User" not in config
    assert "LANG=C.UTF-8" in config["Env"]
    assert next(value for value in config["Env"] if value.startswith("PATH=")).count(":") == 5
    assert config["Labels"]["org.opencontainers.image.version"] == "1.2.3"


def test_image_layer_has_programs_and_nothing_of_the_build_host(built: Path) -> None:
    blobs = blobs_of(built)
    [descriptor] = json.loads(blobs["index.json"])["manifests"]
    layer = blob(blobs, json.loads(blob(blobs, descriptor))["layers"][0])
    with tarfile.open(fileobj=io.BytesIO(layer)) as opened:
        members = {member.name: member for member in opened.getmembers()}
    assert {(member.uid, member.gid, member.mtime) for member in members.values()} == {(0, 0, 0)}
    assert members["usr/bin/kubelet"].linkname == "../lib/pykubelet/bin/kubelet"
    assert members["usr/bin/pykubelet"].linkname == "../lib/pykubelet/bin/pykubelet"
    assert members["usr/lib/pykubelet/bin/kubelet"].mode == 0o755
    assert members["bin"].linkname == "usr/bin"
    assert members["usr/bin/su"].mode == 0o755  # not set-user-ID
    assert {members[name].mode for name in ("tmp", "var/tmp")} == {0o1777}
    assert "usr/share/doc/a/copyright" in members
    for name in (
        "usr/share/doc/a/README",
        "usr/share/man/man1",
        "var/cache/apt",
        "var/log/dpkg.log",
        "etc/hostname",
        "etc/machine-id",
        "etc/resolv.conf",
        "tmp/left",
    ):
        assert name not in members
    assert {"usr/share/man", "var/cache", "var/log", "proc"} & members.keys() >= {"var/log", "var/cache"}


def test_image_built_twice_is_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    replace_builders(monkeypatch, "3.99")
    root = tmp_path / "again"
    make_root(root)
    assert write_image(RELEASE, root, tmp_path / "second").read_bytes() == built.read_bytes()


def test_image_of_another_python_is_an_error_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_builders(monkeypatch, "3.98")
    make_root(tmp_path / "root")
    with pytest.raises(BuildError, match=r"is Python 3\.98"):
        write_image(RELEASE, tmp_path / "root", tmp_path / "out")
    assert not (tmp_path / "out").exists()
