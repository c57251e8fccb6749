"""Packing of images from executables of this host, without kubeadm."""

import subprocess
from pathlib import Path

import pytest

from pykubelet.standalone.seed_images import Entry
from tests.kubeadm.images import ImageError, pack_images, program_entries
from tests.kubeadm.programs import Programs

BUSYBOX = Path("/bin/busybox")


def extract(entries: list[Entry], root: Path) -> None:
    """Write entries below a directory, as a runtime unpacks an image."""
    for entry in entries:
        path = root / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.link is not None:
            path.symlink_to(entry.link)
        elif entry.data is not None:
            path.write_bytes(entry.data)
            path.chmod(entry.mode)


@pytest.mark.machine
def test_program_entries_dynamic_executable_runs_in_its_own_root(tmp_path: Path) -> None:
    extract(program_entries(Path("/usr/bin/env"), "usr/bin/env", "usr/bin/other"), tmp_path)
    command = ["chroot", str(tmp_path), "/usr/bin/other", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "coreutils" in done.stdout


def test_pack_images_unknown_component_is_named(tmp_path: Path) -> None:
    programs = Programs(*[BUSYBOX] * 8)
    with pytest.raises(ImageError, match=r"registry.k8s.io/kube-new:v1, which has no recipe"):
        pack_images(programs, ["registry.k8s.io/kube-new:v1"], tmp_path)


def test_program_entries_missing_library_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    content = Path("/usr/bin/env").read_bytes()
    program.write_bytes(content.replace(b"libc.so.6\0", b"libq.so.6\0"))
    program.chmod(0o755)
    with pytest.raises(ImageError, match=r"needs libq\.so\.6, which this host does not have"):
        program_entries(program, "program")
