"""SELinux as files tell of it: here it is made up, no machine of ours has it."""

from pathlib import Path

import pytest

from pykubelet.linux.kernel import has_selinux, label_for_containers


class Attributes:
    """Remembers what is set."""

    def __init__(self, problem: OSError | None = None) -> None:
        self.written: list[tuple[Path, str, bytes]] = []
        self._problem = problem

    def write(self, path: Path, name: str, value: bytes) -> None:
        self.written.append((path, name, value))
        if self._problem is not None:
            raise self._problem


@pytest.fixture
def fs(tmp_path: Path) -> Path:
    (tmp_path / "selinux").mkdir()
    (tmp_path / "selinux" / "enforce").write_text("0")
    return tmp_path / "selinux"


def test_has_selinux_follows_selinuxfs(tmp_path: Path, fs: Path) -> None:
    assert has_selinux(fs), "also where it only warns"
    assert not has_selinux(tmp_path / "nothing")


def test_label_for_containers_sets_container_file_label(tmp_path: Path, fs: Path) -> None:
    found = Attributes()
    label_for_containers(tmp_path, fs, found.write)
    assert found.written == [(tmp_path, "security.selinux", b"system_u:object_r:container_file_t:s0")]


def test_label_for_containers_without_selinux_is_noop(tmp_path: Path) -> None:
    found = Attributes()
    label_for_containers(tmp_path, tmp_path / "nothing", found.write)
    assert found.written == []


def test_label_for_containers_failure_is_logged_not_raised(
    tmp_path: Path, fs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Attributes(OSError(95, "Operation not supported"))
    label_for_containers(tmp_path, fs, found.write)
    assert len(found.written) == 1
    assert "unprivileged plugins may not work" in caplog.text
