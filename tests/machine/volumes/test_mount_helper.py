"""Programs that mount: how they are called, and that none of them can hold anybody up."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.mounts import MS_BIND, Mount, mount, parse_mountinfo, unmount
from pykubelet.volumes.mounts import mount_helper
from pykubelet.volumes.mounts.mount_helper import (
    HelperError,
    HelperTimeout,
    MissingHelper,
    is_mounted,
    join_options,
    mount_command,
    mount_with_helper,
    mounts_of_volume,
    run_helper,
    unmount_with_helper,
)
from tests.support.volume_programs import StandIns, stand_ins
from tests.support.volumes import needs_root

TARGET = Path("/r/pods/u/volumes/kubernetes.io~nfs/v")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[StandIns]:
    with stand_ins(tmp_path / "bin") as made:
        yield made


@pytest.mark.parametrize(
    ("wanted", "own", "joined"),
    [
        ([], [], []),
        (["vers=4", "hard", "", "hard"], ["ro"], ["hard", "ro", "vers=4"]),
        (["ro"], ["ro"], ["ro"]),
    ],
)
def test_join_options_deduplicates_and_sorts(wanted: list[str], own: list[str], joined: list[str]) -> None:
    assert join_options(wanted, own) == joined


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("nfs", ["/opt/mounter", "mount", "-t", "nfs", "s:/x", str(TARGET)]),
        ("ext4", ["mount", "-t", "ext4", "s:/x", str(TARGET)]),
    ],
)
def test_mount_command_mounter_is_used_for_network_file_systems(kind: str, command: list[str]) -> None:
    """Verify `--experimental-mounter-path`."""
    assert mount_command(kind, "s:/x", TARGET, [], mounter="/opt/mounter") == command


@pytest.mark.parametrize(
    ("kind", "options", "scoped", "command"),
    [
        ("nfs", ["hard", "ro"], False, "mount -t nfs -o hard,ro s:/x {t}"),
        ("nfs", [], False, "mount -t nfs s:/x {t}"),
        ("", [], False, "mount s:/x {t}"),
        (
            "ext4",
            ["defaults"],
            True,
            "systemd-run --description=Kubernetes transient mount for {t} --scope -- "
            "mount -t ext4 -o defaults s:/x {t}",
        ),
    ],
)
def test_mount_command_returns_arguments_and_systemd_scope(
    kind: str, options: list[str], scoped: bool, command: str
) -> None:
    given = mount_command(kind, "s:/x", TARGET, options, scoped=scoped)
    assert " ".join(given) == command.format(t=TARGET)


class TestRunning:
    async def test_run_helper_returns_output(self, programs: StandIns) -> None:
        programs.add("speak", "print('one', flush=True); print('two', file=sys.stderr)")
        assert await run_helper("speak", "a b", "c") == "one\ntwo\n"
        assert programs.calls == [["speak", "a b", "c"]]

    async def test_run_helper_nonzero_exit_raises_with_masked_arguments(self, programs: StandIns) -> None:
        programs.add("fail", "print('one\\ntwo'); sys.exit(32)")
        with pytest.raises(HelperError) as caught:
            await run_helper("fail", "secret", "x", hidden={"secret"})
        assert str(caught.value) == "fail *** x failed: exit status 32: one two"
        assert (caught.value.status, caught.value.output) == (32, "one\ntwo\n")

    async def test_run_helper_killed_by_signal_raises(self, programs: StandIns) -> None:
        programs.add("die", "os.kill(os.getpid(), 9)")
        with pytest.raises(HelperError, match=r"^die failed: signal 9: it gave no reason$"):
            await run_helper("die")

    @pytest.mark.parametrize(
        ("program", "message"),
        [
            ("iscsiadm", "the program iscsiadm is not on this machine: install the package open-iscsi"),
            ("no-such", "the program no-such is not on this machine"),
        ],
    )
    async def test_run_helper_binary_missing_names_package(
        self, program: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mount_helper, "search_path", lambda: "/nowhere")
        with pytest.raises(MissingHelper, match=f"^{message}$"):
            await run_helper(program)

    async def test_run_helper_interpreter_missing_raises(self, programs: StandIns) -> None:
        (programs.folder / "bad").write_text("#!/no/such/interpreter\n")
        (programs.folder / "bad").chmod(0o755)
        with pytest.raises(HelperError, match=r"^bad could not be started: No such file"):
            await run_helper("bad")

    async def test_run_helper_long_output_is_truncated(self, programs: StandIns) -> None:
        programs.add("talk", "for _ in range(100): print('word ' * 4000)\nsys.exit(1)")
        with pytest.raises(HelperError) as caught:
            await run_helper("talk")
        assert len(str(caught.value)) < 1100
        assert len(caught.value.output) == 64 << 10

    async def test_run_helper_hangs_with_child_kills_both_at_deadline(
        self, programs: StandIns, tmp_path: Path
    ) -> None:
        script = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("waiting for the server", flush=True)
child.wait()
"""
        programs.add("hang", script)
        with pytest.raises(HelperTimeout, match=r"^hang did not end within 6 s, and was killed: waiting for"):
            await run_helper("hang", deadline=6)
        child = int((tmp_path / "pid").read_text())
        await _until(lambda: not _runs(child))

    async def test_run_helper_cancelled_kills_process(self, programs: StandIns, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        programs.add("hang", f"open({str(pid)!r}, 'w').write(str(os.getpid()))\nimport time; time.sleep(600)")
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(run_helper("hang"))
            await _until(lambda: pid.exists() and bool(pid.read_text()))
            task.cancel()
        assert not _runs(int(pid.read_text()))

    async def test_run_helper_daemon_left_running_returns_immediately(
        self, programs: StandIns, tmp_path: Path
    ) -> None:
        script = f"""
import subprocess
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(daemon.pid))
print("started")
"""
        programs.add("start", script)
        begin = time.monotonic()
        assert await run_helper("start", deadline=60) == "started\n"
        daemon = int((tmp_path / "pid").read_text())
        try:
            assert time.monotonic() - begin < 50
            assert _runs(daemon)
        finally:
            os.kill(daemon, 9)

    async def test_run_helper_leaves_no_open_descriptors(self, programs: StandIns) -> None:
        programs.add("speak", "print('word')")
        await run_helper("speak")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            await run_helper("speak")
        await _until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


class TestMounting:
    async def test_mount_with_helper_file_system_helper_missing_names_package(
        self, programs: StandIns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        programs.add("mount", "sys.exit('bad option')")
        monkeypatch.setattr(mount_helper, "search_path", lambda: str(programs.folder))
        with pytest.raises(HelperError) as caught:
            await mount_with_helper("nfs", "s:/x", TARGET, ["ro"])
        assert str(caught.value) == (
            f"mount failed: mount -t nfs -o ro s:/x {TARGET} failed: exit status 1: bad option; "
            "the program mount.nfs is not on this machine: install the package nfs-common"
        )

    def test_mounts_of_volume_returns_volume_and_sub_paths(self) -> None:
        table = parse_mountinfo(
            "1 0 0:1 / / rw - ext4 /dev/vda rw\n"
            "2 1 0:2 / /r/pods/u/volumes/kubernetes.io~nfs/v rw - nfs4 s:/x rw\n"
            "3 1 0:2 /a /r/pods/u/volume-subpaths/v/main/0 rw - nfs4 s:/x rw\n"
            "4 1 0:3 / /r/pods/u/volume-subpaths/w/main/0 rw - tmpfs tmpfs rw\n"
            "5 1 0:2 /a /r/pods/other/volume-subpaths/v/main/0 rw - nfs4 s:/x rw\n"
        )
        found: list[Mount] = mounts_of_volume(table, TARGET, Path("/r/pods/u/volume-subpaths"))
        assert [one.id for one in found] == [3, 2]


@pytest.mark.machine
@needs_root
class TestUnmounting:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Path]:
        place = tmp_path / "a place"
        place.mkdir()
        mount(str(place), place, "", flags=MS_BIND)
        yield place
        while unmount(place, detach=True):
            pass

    async def test_unmount_with_helper_unmounts_and_is_idempotent(self, place: Path) -> None:
        assert is_mounted(place)
        await unmount_with_helper(place)
        assert not is_mounted(place)
        await unmount_with_helper(place)

    async def test_unmount_with_helper_busy_raises(self, place: Path) -> None:
        opened = os.open(place, os.O_RDONLY)
        try:
            with pytest.raises(HelperError, match=r"unmount failed: .*busy"):
                await unmount_with_helper(place)
        finally:
            os.close(opened)

    async def test_unmount_with_helper_hangs_tries_force_then_lazy(
        self, place: Path, programs: StandIns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """First asked, then forced, and in the end only taken out of sight."""
        programs.add(
            "umount",
            """
import subprocess, time
if sys.argv[1] == "-l":
    subprocess.run(["/usr/bin/umount", sys.argv[2]], check=True)
else:
    time.sleep(600)
""",
        )
        monkeypatch.setattr(mount_helper, "UNMOUNT_DEADLINE", 5)
        await unmount_with_helper(place)
        assert not is_mounted(place)
        assert programs.calls == [["umount", *way, str(place)] for way in ([], ["-f"], ["-l"])]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


async def _until(holds: object, seconds: float = 30) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
