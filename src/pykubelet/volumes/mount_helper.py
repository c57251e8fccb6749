"""The machine's own programs for volumes: `mount`, `umount`, `iscsiadm`, drivers of FlexVolume.

They talk to servers and devices that may never answer. So each runs as a process of its own with a
deadline, after which it is killed with all that it started; one that the kernel does not let go is left
behind, and nobody waits for it. Daemons that a program leaves running do not hold us up either: what
counts is that the program itself has ended. Of what it says a bounded piece is kept.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pykubelet.linux.mounts import Mount, read_mounts
from pykubelet.linux.processes import environment, search_path
from pykubelet.logs import get_logger
from pykubelet.util.tasks import begun
from pykubelet.volumes.errors import VolumePluginError

log = get_logger(__name__)
MOUNT_DEADLINE = 150.0
"""Seconds: NFS itself gives up after two minutes, and says why."""
UNMOUNT_DEADLINE = 60.0
"""Seconds, after which an unmount is forced."""
_MOST_SAID = 64 << 10
_MOST_SHOWN = 1000
_BITE = 16 << 10
_DYING = 2.0
_PACKAGES = {
    "blkid": "util-linux",
    "blockdev": "util-linux",
    "fsck": "util-linux",
    "iscsiadm": "open-iscsi",
    "mkfs.btrfs": "btrfs-progs",
    "mkfs.ext3": "e2fsprogs",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mount": "mount",
    "mount.nfs": "nfs-common",
    "multipath": "multipath-tools",
    "umount": "mount",
}
"""The Debian packages that bring the programs."""


class HelperError(VolumePluginError):
    """A program did not do what it was asked; the text has its own words, in one line."""

    def __init__(self, text: str, *, status: int | None = None, output: str = "") -> None:
        """Take the exit status, None for a program that did not come to its end."""
        super().__init__(text)
        self.status = status
        self.output = output


class MissingHelper(HelperError):
    """There is no such program on this machine."""


class HelperTimeout(HelperError):
    """A program did not end in time."""


def missing(program: str) -> str:
    """Say that a program is missing, and where Debian has it."""
    package = _PACKAGES.get(program, "")
    remedy = f": install the package {package}" if package else ""
    return f"the program {program} is not on this machine{remedy}"


async def run_helper(*argv: str, deadline: float = MOUNT_DEADLINE, hidden: Collection[str] = ()) -> str:
    """Run a program to its end, and give what it said; raises HelperError.

    `deadline` is in seconds; `hidden` are arguments that are told to nobody else. Cancelling kills it.
    """
    path = shutil.which(argv[0], path=search_path())
    if path is None:
        raise MissingHelper(missing(argv[0]))
    shown = " ".join("***" if word in hidden else word for word in argv)
    log.v(4).info("Running a program for a volume", command=shown)
    ears = _Ears()
    try:
        status = await _run(path, argv, deadline, ears)
    except OSError as err:
        raise HelperError(f"{argv[0]} could not be started: {err.strerror or err}") from err
    finally:
        said = ears.close()
    words = " ".join(said.split())[:_MOST_SHOWN]
    if status is None:
        raise HelperTimeout(
            f"{shown} did not end within {deadline:g} s, and was killed: {words or 'no word'}"
        )
    if status:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        text = f"{shown} failed: {how}: {words or 'it gave no reason'}"
        raise HelperError(text, status=status, output=said)
    return said


def join_options(wanted: Iterable[str], own: Iterable[str]) -> list[str]:
    """Give mount options in the reference's order: sorted, each once."""
    return sorted({option for option in wanted if option} | set(own))


def mount_command(
    kind: str, source: str, target: Path, options: Sequence[str], *, scoped: bool = False
) -> list[str]:
    """Give the command that mounts; `scoped` for what systemd shall keep apart from the agent's service."""
    flags = [*(("-t", kind) if kind else ()), *(("-o", ",".join(options)) if options else ())]
    command = ["mount", *flags, source, str(target)]
    if scoped:
        what = f"--description=Kubernetes transient mount for {target}"
        return ["systemd-run", what, "--scope", "--", *command]
    return command


async def mount_with_helper(
    kind: str, source: str, target: Path, options: Sequence[str], *, scoped: bool = False
) -> None:
    """Have the machine's `mount` do it; raises HelperError.

    `scoped`: the file system may need a daemon, which shall outlive the agent where systemd is.
    """
    scoped = scoped and has_systemd()
    try:
        await run_helper(*mount_command(kind, source, target, options, scoped=scoped))
    except HelperError as err:
        program = f"mount.{kind}"
        hint = ""
        if program in _PACKAGES and shutil.which(program, path=search_path()) is None:
            hint = f"; {missing(program)}"
        raise type(err)(f"mount failed: {err}{hint}", status=err.status, output=err.output) from err


async def unmount_with_helper(target: Path) -> None:
    """Have the machine's `umount` do it: if it hangs, with force, and if that is no use, later.

    For file systems whose server may be gone. What is not mounted is fine. Raises HelperError, when
    somebody uses it for one.
    """
    try:
        await run_helper("umount", str(target), deadline=UNMOUNT_DEADLINE)
    except HelperTimeout:
        log.info("Unmounting takes too long, so it is forced", path=target)
    except HelperError as err:
        if not is_mounted(target):
            return
        raise HelperError(f"unmount failed: {err}", status=err.status) from err
    else:
        return
    for way in ("-f", "-l"):
        try:
            await run_helper("umount", way, str(target), deadline=UNMOUNT_DEADLINE)
        except HelperError as err:
            log.error(err, "Unmounting failed, although it was forced", path=target)
        if not is_mounted(target):
            return
    raise HelperError(f"unmount failed: {target} is mounted still, although unmounting was forced")


def has_systemd() -> bool:
    """Whether systemd runs this machine."""
    return (
        Path("/run/systemd/system").is_dir() and shutil.which("systemd-run", path=search_path()) is not None
    )


def is_mounted(target: Path) -> bool:
    """Whether something is mounted at a path; asks no server, as looking at the path itself would."""
    real = target.parent.resolve() / target.name
    return any(mount.point == real for mount in read_mounts(real))


def mounts_of_volume(mounts: Iterable[Mount], volume: Path, sub_paths: Path) -> list[Mount]:
    """Give the mounts of a pod's volume, the youngest first: at its path, and its bound sub-paths.

    The paths are real ones. Sub-paths are found by what is mounted there.
    """
    all_mounts = list(mounts)
    kinds = {(mount.kind, mount.source) for mount in all_mounts if mount.point == volume}
    return [
        mount
        for mount in reversed(all_mounts)
        if mount.point == volume
        or (mount.point.is_relative_to(sub_paths) and (mount.kind, mount.source) in kinds)
    ]


class _Ears:
    """Hears what a program says, and drops what is too much."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writing, True)
        self._said = bytearray()
        self._loop.add_reader(self._reading, self._hear)

    def close(self) -> str:
        """Give what was said: what is in the pipe counts, what a daemon says later does not."""
        os.close(self.writing)
        for _ in range(_MOST_SAID // _BITE + 1):
            if not self._hear():
                break
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        return self._said.decode(errors="replace")

    def _hear(self) -> bool:
        """Take what there is; gives whether there was something."""
        try:
            data = os.read(self._reading, _BITE)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._reading)
        self._said += data[: _MOST_SAID - len(self._said)]
        return bool(data)


async def _run(path: str, argv: Sequence[str], deadline: float, ears: _Ears) -> int | None:
    """Give the exit status, negative for a signal; None for a program that was killed because it hung."""
    process = await begun(
        asyncio.create_subprocess_exec(
            path,
            *argv[1:],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=ears.writing,
            stderr=ears.writing,
            env=environment(),
            start_new_session=True,
        ),
        lambda process: _kill(process, argv[0]),
    )
    try:
        async with asyncio.timeout(deadline):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            await _kill(process, argv[0])


async def _kill(process: asyncio.subprocess.Process, program: str) -> None:
    with suppress(ProcessLookupError):
        # The whole session: `mount` itself only waits for the program that hangs.
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(_DYING):
            await process.wait()
    except TimeoutError:
        log.info("A program for a volume cannot be killed", program=program, pid=process.pid)
