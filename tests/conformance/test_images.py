"""Images for the suite: what is in them, and under which names they are pushed."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pykubelet.standalone.seed_images import Platform
from tests.conformance.images import BUILDERS, Programs, mirror_hosts, push_images, split_name
from tests.support.image_registry import running_registry, unpack_archive

PROGRAMS = Programs(
    busybox=b"busybox",
    applets=("busybox", "sh", "cat"),
    shell=b"bash",
    pause=b"pause",
    agnhost=b"agnhost",
    nonewprivs=b"nnp",
    standins=b"standins",
    certificate=b"certificate",
    key=b"key",
    platform=Platform("amd64"),
)


def unpacked(repository: str) -> tuple[bytes, dict[str, Any]]:
    """Return the layer and the configuration of an image."""
    archive = BUILDERS[repository](PROGRAMS).archive("registry.k8s.io/x:1", PROGRAMS.platform)
    entry, blobs = unpack_archive(archive)
    manifest = json.loads(blobs[entry["digest"]])
    config = json.loads(blobs[manifest["config"]["digest"]])
    return blobs[manifest["layers"][0]["digest"]], config["config"]


def member(layer: bytes, path: str) -> tarfile.TarInfo:
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        return tar.getmember(path)


def content(layer: bytes, path: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        file = tar.extractfile(path)
        assert file is not None
        return file.read()


def test_split_name_removes_registry_and_tag() -> None:
    assert split_name("registry.k8s.io/e2e-test-images/agnhost:2.63.0") == (
        "e2e-test-images/agnhost",
        "2.63.0",
    )
    assert split_name("registry.k8s.io/pause:3.10.2") == ("pause", "3.10.2")


def test_mirror_hosts_is_only_server() -> None:
    document = tomllib.loads(mirror_hosts("127.0.0.1:5000"))
    assert document["server"] == "http://127.0.0.1:5000"
    assert [*document["host"]] == ["http://127.0.0.1:5000"]


def test_nonewprivs_image_program_is_setuid() -> None:
    layer, config = unpacked("e2e-test-images/nonewprivs")
    assert member(layer, "usr/local/bin/nnp").mode == 0o4755
    assert config["Cmd"] == ["nnp"]


def test_agnhost_image_shell_is_bash() -> None:
    layer, _ = unpacked("e2e-test-images/agnhost")
    assert member(layer, "bin/sh").linkname == "bash"
    assert content(layer, "bin/bash") == b"bash"


@pytest.mark.machine
@pytest.mark.parametrize(
    ("name", "message"),
    [("A_1", "/bin/sh: can't create /proc/x: "), ("a-1.b", "/bin/sh: line 1: /proc/x: ")],
    ids=["busybox", "bash"],
)
def test_busybox_image_shell_depends_on_names_of_variables(tmp_path: Path, name: str, message: str) -> None:
    script = tmp_path / "sh"
    script.write_bytes(content(unpacked("e2e-test-images/busybox")[0], "bin/sh"))
    script.chmod(0o755)
    command = [str(script), "-c", "env; echo > /proc/x"]
    done = subprocess.run(
        command, env={name: "value", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert f"{name}=value" in done.stdout.splitlines()
    assert done.stderr.startswith(message)


def test_nonroot_image_has_user() -> None:
    assert unpacked("e2e-test-images/nonroot")[1]["User"] == "1234"


def test_agnhost_image_has_second_entrypoint_and_users() -> None:
    layer, config = unpacked("e2e-test-images/agnhost")
    assert config["Entrypoint"] == ["/agnhost"]
    assert member(layer, "agnhost-2").linkname == "agnhost"
    assert b"user-defined-in-image:x:1000:" in content(layer, "etc/passwd")
    assert b"group-defined-in-image:x:50000:user-defined-in-image" in content(layer, "etc/group")


def test_agnhost_image_serves_complete_registry() -> None:
    layer, _ = unpacked("e2e-test-images/agnhost")
    root = "var/registry/pause"
    digest = content(layer, f"{root}/manifests/testing").decode().partition(":")[2]
    manifest = json.loads(content(layer, f"{root}/manifests/sha256/{digest[:2]}/{digest}/data"))
    for descriptor in (manifest["config"], *manifest["layers"]):
        value = descriptor["digest"].partition(":")[2]
        blob = content(layer, f"{root}/blobs/sha256/{value[:2]}/{value}/data")
        assert len(blob) == descriptor["size"]


@pytest.mark.machine
def test_push_images_known_names_have_digests_of_their_own(tmp_path: Path) -> None:
    names = [f"registry.k8s.io/e2e-test-images/agnhost:{tag}" for tag in ("2.55", "2.63.0")]
    with running_registry(tmp_path / "registry") as registry:
        pushed = push_images(registry, PROGRAMS, [*names, "registry.k8s.io/etcd:3.6.8-0"])
    assert [*pushed] == names
    assert len(set(pushed.values())) == 2
