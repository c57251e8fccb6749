"""Writing volumes: what readers see, at every moment, whatever happens to the writer."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.linux.mounts import mount, unmount
from pykubelet.volumes import file_projection as atomic_write
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.file_projection import DATA, NEXT, File, checked_path, publish
from tests.support.volumes import mode_of, needs_root, umask

MOMENT = 1_769_860_800.5  # 2026-01-31 12:00:00.5 UTC
Contents = dict[str, bytes]


def put(volume: Path, contents: Contents, mode: int = 0o644, **options: Any) -> bool:
    files = {path: File(data, mode) for path, data in contents.items()}
    return publish(volume, files, moment=MOMENT, **options)


def content(folder: Path) -> Contents:
    """All files below a folder."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def version_of(volume: Path) -> Path:
    """The folder that `..data` leads to."""
    return volume / (volume / DATA).readlink()


def through_links(volume: Path) -> Contents:
    """What a reader finds under the names that it knows."""
    found: Contents = {}
    for entry in volume.iterdir():
        if not entry.name.startswith(".."):
            inner = content(entry) if entry.is_dir() else {"": entry.read_bytes()}
            found |= {f"{entry.name}/{path}".rstrip("/"): data for path, data in inner.items()}
    return found


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    volume = tmp_path / "volume"
    volume.mkdir()
    return volume


class TestVersions:
    def test_publish_empty_volume_creates_version_and_links(self, volume: Path) -> None:
        assert put(volume, {"a": b"1", "deep/er/b": b"2"}) is True
        assert through_links(volume) == {"a": b"1", "deep/er/b": b"2"}
        version = version_of(volume).name
        assert re.fullmatch(r"\.\.2026_01_31_12_00_00\.[0-9]{10}", version)
        assert sorted(path.name for path in volume.iterdir()) == sorted([version, DATA, "a", "deep"])
        assert (volume / "a").readlink() == Path("..data/a")
        assert (volume / "deep").readlink() == Path("..data/deep")

    def test_publish_unchanged_writes_nothing(self, volume: Path) -> None:
        put(volume, {"a": b"1", "b/c": b""})
        before = {path: path.lstat().st_ino for path in volume.rglob("*")}
        assert put(volume, {"b/c": b"", "./a": b"1"}) is False
        assert {path: path.lstat().st_ino for path in volume.rglob("*")} == before

    @pytest.mark.parametrize(
        "after",
        [
            {},
            {"a": b"2", "b/c": b"x"},
            {"a": b"1"},
            {"b/c": b"x"},
            {"a": b"1", "b/c": b"x", "d": b""},
            {"a/x": b"1", "b": b"x"},
            {"a": b"1", "b/c/d": b"x"},
        ],
    )
    def test_publish_changed_replaces_version(self, volume: Path, after: Contents) -> None:
        put(volume, {"a": b"1", "b/c": b"x"})
        first = version_of(volume)
        assert put(volume, after) is True
        assert through_links(volume) == after
        assert not first.exists()
        assert sum(path.name.startswith("..") for path in volume.iterdir()) == 2

    def test_publish_path_outside_volume_writes_nothing(self, volume: Path) -> None:
        for path in ("../x", "/etc/x", "..data", "a/../../x"):
            with pytest.raises(VolumePluginError):
                put(volume, {"good": b"", path: b""})
        assert list(volume.iterdir()) == []

    def test_publish_modes_independent_of_umask(self, volume: Path) -> None:
        files = {"a": File(b"", 0o666), "b/c": File(b"", 0o400), "d": File(b"", 0)}
        with umask(0o077):
            publish(volume, files, moment=MOMENT)
        assert {path: mode_of(volume / DATA / path) for path in ("a", "b", "b/c", "d")} == {
            "a": "0o666",
            "b": "0o755",
            "b/c": "0o400",
            "d": "0o0",
        }
        assert mode_of(version_of(volume)) == "0o755"

    @needs_root
    def test_publish_sets_owner_and_group(self, volume: Path) -> None:
        files = {"a": File(b"", 0o600, user=1234), "b/c": File(b"", 0o604)}
        publish(volume, files, 2000, moment=MOMENT)
        found = {path: (volume / DATA / path).stat() for path in ("a", "b", "b/c", ".")}
        owners = {path: (entry.st_uid, entry.st_gid) for path, entry in found.items()}
        assert owners == {"a": (1234, 2000), "b": (0, 2000), "b/c": (0, 2000), ".": (0, 2000)}
        modes = {path: oct(stat.S_IMODE(entry.st_mode)) for path, entry in found.items()}
        assert modes == {"a": "0o640", "b": "0o2755", "b/c": "0o644", ".": "0o2755"}
        assert (volume / "a").lstat().st_uid == 1234

    def test_publish_keeps_existing_mount_point_directories(self, volume: Path) -> None:
        (volume / "nested/deep").mkdir(parents=True)
        (volume / "a").mkdir()
        put(volume, {"a": b"hidden", "b": b""})
        put(volume, {"c": b""})
        assert (volume / "nested/deep").is_dir()
        assert (volume / "a").is_dir()
        assert not (volume / "b").exists()

    def test_publish_disk_full_keeps_previous_version(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(volume, {"a": b"1", "b": b"1"})

        def full(fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space left"):
                put(volume, {"a": b"2"})
        assert through_links(volume) == {"a": b"1", "b": b"1"}
        assert sum(path.name.startswith("..") for path in volume.iterdir()) == 2


class TestTricks:
    """Containers cannot write here. If one can, it must not matter."""

    @pytest.fixture
    def treasure(self, tmp_path: Path) -> Path:
        treasure = tmp_path / "treasure"
        treasure.mkdir()
        (treasure / "a").write_bytes(b"1")
        return treasure

    def check(self, volume: Path, treasure: Path) -> None:
        put(volume, {"a": b"1"})
        assert through_links(volume) == {"a": b"1"}
        assert version_of(volume).name.startswith("..2026")
        assert content(treasure) == {"a": b"1"}
        assert put(volume, {"b": b"2"})
        assert through_links(volume) == {"b": b"2"}
        assert content(treasure) == {"a": b"1"}

    @pytest.mark.parametrize("target", ["../treasure", ".", "..", "..data", "sub/x", "..gone"])
    def test_publish_data_link_redirected_is_replaced(
        self, volume: Path, treasure: Path, target: str
    ) -> None:
        (volume / DATA).symlink_to(target)
        self.check(volume, treasure)

    def test_publish_version_is_symlink_is_not_followed(self, volume: Path, treasure: Path) -> None:
        (volume / "..version").symlink_to(treasure)
        (volume / DATA).symlink_to("..version")
        self.check(volume, treasure)

    def test_publish_files_are_symlinks_are_replaced(self, volume: Path, treasure: Path) -> None:
        put(volume, {"a": b"1", "b/a": b"1"})
        version = version_of(volume)
        (version / "a").unlink()
        (version / "a").symlink_to(treasure / "a")
        assert put(volume, {"a": b"1", "b/a": b"1"}) is True
        version = version_of(volume)
        (version / "b/a").unlink()
        (version / "b").rmdir()
        (version / "b").symlink_to(treasure)
        assert put(volume, {"a": b"1", "b/a": b"1"}) is True
        self.check(volume, treasure)

    def test_publish_files_are_fifos_does_not_block(self, volume: Path, treasure: Path) -> None:
        put(volume, {"a": b""})
        version = version_of(volume)
        (version / "a").unlink()
        os.mkfifo(version / "a")
        os.mkfifo(volume / NEXT)
        self.check(volume, treasure)

    def test_publish_user_visible_link_redirected_is_replaced(self, volume: Path, treasure: Path) -> None:
        (volume / "a").symlink_to(treasure / "a")
        self.check(volume, treasure)

    def test_publish_volume_is_symlink_raises(self, volume: Path, treasure: Path) -> None:
        link = volume.parent / "link"
        link.symlink_to(treasure)
        with pytest.raises(OSError, match=r"directory|symbolic"):
            put(link, {"a": b"2"})
        assert content(treasure) == {"a": b"1"}

    @pytest.mark.machine
    @needs_root
    @pytest.mark.parametrize("bound", [False, True])
    def test_publish_mount_inside_old_version_is_not_deleted(
        self, volume: Path, treasure: Path, bound: bool
    ) -> None:
        put(volume, {"a": b"1", "b/c": b""})
        point = version_of(volume) / "b"
        if bound:
            subprocess.run(["mount", "--bind", treasure, point], check=True)
        else:
            mount("tmpfs", point, "tmpfs")
            (point / "a").write_bytes(b"1")
        try:
            with pytest.raises(OSError, match="mounted here"):
                put(volume, {"a": b"2"})
            assert content(point) == {"a": b"1"}
            assert content(volume / DATA) == {"a": b"2"}, "the new version is there all the same"
        finally:
            unmount(point)
        put(volume, {"a": b"2"})
        assert sum(path.name.startswith("..") for path in volume.iterdir()) == 2


class Killed(BaseException):
    """The writer is no more."""


class Mortal(ModuleType):
    """The system's calls, of which each that changes something may be the writer's last.

    What happens between two calls cannot be told from what happens before the second.
    """

    CHANGES = ("mkdir", "symlink", "rename", "unlink", "rmdir", "write", "fchmod", "fchown", "chown")

    def __init__(self, last: int, watch: Callable[[], None]) -> None:
        super().__init__("os")
        self.left = last
        self.watch = watch

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        return self._counted(call) if name in self.CHANGES else call

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            self._step()
        return os.open(path, flags, *args, **options)

    def write(self, fd: int, data: memoryview) -> int:
        self._step()
        return os.write(fd, data[: max(1, len(data) // 2)])

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._step()
            return call(*args, **options)

        return counted

    def _step(self) -> None:
        self.watch()
        if self.left == 0:
            raise Killed
        self.left -= 1


names = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join)
payloads = st.dictionaries(names, st.binary(max_size=3), max_size=4).filter(
    lambda files: not any(other.startswith(f"{path}/") for path in files for other in files)
)
steps = st.tuples(payloads, st.none() | st.integers(0, 30))


class TestKills:
    @settings(max_examples=60)
    @given(st.lists(steps, min_size=1, max_size=5), payloads)
    def test_publish_killed_readers_see_old_or_new_version(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        steps: list[tuple[Contents, int | None]],
        last: Contents,
    ) -> None:
        volume = tmp_path_factory.mktemp("volume")
        seen: list[Contents | None] = [None]

        def visible() -> Contents | None:
            return content(volume / DATA) if (volume / DATA).is_symlink() else None

        for wanted, last_step in [*steps, (last, None)]:

            def watch(wanted: Contents = wanted) -> None:
                assert visible() in (seen[-1], wanted)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(atomic_write, "os", Mortal(1000 if last_step is None else last_step, watch))
                try:
                    put(volume, wanted)
                except Killed:
                    watch()
                else:
                    assert visible() == wanted
                    assert through_links(volume) == wanted
                    hidden = [path.name for path in volume.iterdir() if path.name.startswith("..")]
                    assert sorted(hidden) == sorted([DATA, version_of(volume).name])
            seen.append(visible())

    def test_publish_killed_at_each_step_next_publish_completes(self, tmp_path: Path) -> None:
        """From a version to a very different one, killed at each step in turn, and then finished."""
        before, after = {"a": b"1", "b/c": b"1", "d": b"1"}, {"a/x": b"2", "b/c": b"2", "e/f/g": b"2"}
        outcomes = set()
        for last_step in range(100):
            volume = tmp_path / str(last_step)
            volume.mkdir()
            put(volume, before)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(atomic_write, "os", Mortal(last_step, lambda: None))
                try:
                    put(volume, after)
                    break
                except Killed:
                    found = content(volume / DATA)
                    assert found in (before, after)
                    outcomes.add(found == after)
            put(volume, after)
            assert through_links(volume) == after
            assert sum(path.name.startswith("..") for path in volume.iterdir()) == 2
        else:
            pytest.fail("more steps than were tried")
        assert outcomes == {False, True}

    def test_publish_process_killed_readers_see_single_version(self, volume: Path) -> None:
        """A process that writes as fast as it can is killed again and again while we read."""
        program = (
            "import sys, itertools\n"
            "from pathlib import Path\n"
            "from pykubelet.volumes.file_projection import publish\n"
            "from pykubelet.volumes.file_projection import File\n"
            "for number in itertools.count(int(sys.argv[2])):\n"
            "    files = {name: File(str(number).encode() * 500, 0o644) for name in ('a', 'b/c', 'd')}\n"
            "    publish(Path(sys.argv[1]), files, moment=0)\n"
        )
        versions: set[bytes] = set()
        for attempt in range(6):
            start = str((attempt + 1) * 1_000_000)
            with subprocess.Popen([sys.executable, "-c", program, str(volume), start]) as writer:
                try:
                    self.wait_for(volume, start)
                    begin, before = time.monotonic(), len(versions)
                    end = begin + 0.05 + attempt / 50
                    while time.monotonic() < end or len(versions) < before + 3:
                        assert time.monotonic() < begin + 60, "the writer does not go on"
                        versions |= self.read_one_version(volume)
                finally:
                    writer.send_signal(signal.SIGKILL)
            versions |= self.read_one_version(volume)
        assert len(versions) > 10
        put(volume, {"z": b"the end"})
        assert through_links(volume) == {"z": b"the end"}
        assert sum(path.name.startswith("..") for path in volume.iterdir()) == 2

    def wait_for(self, volume: Path, start: str) -> None:
        deadline = time.monotonic() + 60
        while not any(int(found[:7]) >= int(start) for found in self.read_one_version(volume)):
            assert time.monotonic() < deadline, "the writer never wrote"
            time.sleep(0.005)

    def read_one_version(self, volume: Path) -> set[bytes]:
        """Read three files of one version; empty when it was replaced meanwhile, or none is there."""
        try:
            folder = os.open(volume / DATA, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return set()
        try:
            found = set()
            for name in ("a", "b/c", "d"):
                file = os.open(name, os.O_RDONLY, dir_fd=folder)
                try:
                    found.add(os.read(file, 10_000))
                finally:
                    os.close(file)
        except FileNotFoundError:
            return set()
        finally:
            os.close(folder)
        assert len(found) == 1, "files of two versions"
        return found


@given(st.dictionaries(st.text(max_size=12), st.binary(max_size=5), max_size=4))
@settings(max_examples=60)
def test_publish_any_names_writes_exact_files_or_none(
    tmp_path_factory: pytest.TempPathFactory, contents: Contents
) -> None:
    """Whatever the names are: exactly these files, or a refusal and none."""
    outside = tmp_path_factory.mktemp("outside")
    volume = outside / "volume"
    volume.mkdir()
    try:
        put(volume, contents)
    except VolumePluginError:
        assert list(volume.iterdir()) == []
    else:
        cleaned = {checked_path(path): data for path, data in contents.items()}
        assert through_links(volume) == cleaned
    assert list(outside.iterdir()) == [volume]
