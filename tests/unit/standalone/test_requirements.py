"""Which containerd and runc are used when a host has several."""

import os
from pathlib import Path

import pytest

from pykubelet.standalone import requirements
from pykubelet.standalone.requirements import (
    UNKNOWN_VERSION,
    Version,
    find_newest,
    parse_version,
    read_version,
)


def install(directory: Path, name: str, output: str, status: int = 0) -> Path:
    """Write an executable that prints its version."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", (1, 6, 20)),
        ("containerd github.com/containerd/containerd/v2 2.4.2+unknown", (2, 4, 2)),
        ("containerd github.com/containerd/containerd/v2 v2.5.0-beta.1 0a1b2c3", (2, 5, 0)),
        ("runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1\nspec: 1.0.2-dev\ngo: go1.19.8", (1, 1, 5)),
        ("runc version 1.5.2\nspec: 1.3.0", (1, 5, 2)),
        ("containerd", UNKNOWN_VERSION),
        ("", UNKNOWN_VERSION),
    ],
)
def test_parse_version_output_of_programs_returns_numbers(output: str, version: Version) -> None:
    assert parse_version(output) == version


def test_find_newest_several_installed_returns_newest_wherever_it_is(tmp_path: Path) -> None:
    install(tmp_path / "a", "containerd", "containerd x 1.6.20~ds1")
    newest = install(tmp_path / "b", "containerd", "containerd x 2.4.2")
    install(tmp_path / "c", "containerd", "containerd x 2.4.2")
    install(tmp_path / "d", "containerd", "containerd x 9.9.9", status=1)
    path = os.pathsep.join(str(tmp_path / name) for name in "abcd")
    assert find_newest("containerd", path) == (newest, (2, 4, 2))


def test_find_newest_not_installed_returns_none(tmp_path: Path) -> None:
    install(tmp_path, "containerd", "containerd x 2.4.2")
    assert find_newest("runc", str(tmp_path)) is None


def test_inspect_host_newer_containerd_used_with_programs_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in requirements.PROGRAMS:
        install(tmp_path / "old", name, f"{name} x 1.6.20~ds1")
    for name in ("containerd", "ctr"):
        install(tmp_path / "local", name, f"{name} x 2.4.2")
    install(tmp_path / "cni", "bridge", "")
    monkeypatch.setattr(requirements, "search_path", lambda: str(tmp_path / "old"))
    monkeypatch.setattr(requirements, "_FURTHER_DIRS", (str(tmp_path / "local"),))
    monkeypatch.setattr(requirements, "CNI_PLUGINS", ("bridge",))
    monkeypatch.setattr(requirements, "CNI_PLUGIN_DIRS", (tmp_path / "cni",))
    found = requirements.inspect_host()
    assert found.containerd_version == (2, 4, 2)
    directories = {name: path.parent.name for name, path in found.programs.items()}
    assert {name for name, directory in directories.items() if directory == "local"} == {"containerd", "ctr"}


def test_read_version_program_fails_or_hangs_returns_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "_VERSION_TIMEOUT_SECONDS", 0.2)
    hangs = install(tmp_path, "hangs", "")
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    assert read_version(hangs) == UNKNOWN_VERSION
    assert read_version(install(tmp_path, "fails", "1.2.3", status=3)) == UNKNOWN_VERSION
    assert read_version(tmp_path / "absent") == UNKNOWN_VERSION
