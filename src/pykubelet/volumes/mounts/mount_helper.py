"""Runner of host binaries for volumes: `mount`, `umount`, `iscsiadm`, FlexVolume drivers.

They access servers and devices that may never respond. Each runs as a process of its own with a deadline,
after which it is killed with all its children; a process that the kernel does not end is abandoned. Daemons
that a binary leaves running do not delay the caller either: only the exit of the binary itself counts. A
bounded part of the output is retained.
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
from pykubelet.util.tasks import run_or_undo
from pykubelet.volumes.errors import VolumePluginError

log = get_logger(__name__)
MOUNT_DEADLINE = 150.0
"""Seconds; NFS itself times out after two minutes, with a reason."""
UNMOUNT_DEADLINE = 60.0
"""Seconds after which an unmount is forced."""
_MAX_OUTPUT_BYTES = 64 << 10
_MAX_SUMMARY_LENGTH = 1000
_READ_BYTES = 16 << 10
_KILL_TIMEOUT_SECONDS = 2.0
MOUNTER_TYPES = frozenset(("nfs", "glusterfs", "ceph", "cifs"))
"""File system types that `--experimental-mounter-path` mounts."""
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
"""Debian packages of the binaries."""


class HelperError(VolumePluginError):
    """Raised when a binary fails; the text includes its output in one line."""

    def __init__(self, text: str, *, status: int | None = None, output: str = "") -> None:
        """Initialize with the exit status, None for a binary that did not run to its end."""
        super().__init__(text)
        self.status = status
        self.output = output


class MissingHelper(HelperError):
    """Raised when a binary is not installed on this host."""


class HelperTimeout(HelperError):
    """Raised when a binary does not exit in time."""


def missing_helper_text(binary: str) -> str:
    """Return the error text for a missing binary, with its Debian package."""
    package = _PACKAGES.get(binary, "")
    remedy = f": install the package {package}" if package else ""
    return f"the program {binary} is not on this machine{remedy}"


async def run_helper(*argv: str, deadline: float = MOUNT_DEADLINE, hidden: Collection[str] = ()) -> str:
    """Run a binary to its end and return its output. Raises HelperError.

    `deadline` is in seconds; `hidden` are arguments that are masked in logs and errors. Cancellation kills
    the process.
    """
    path = shutil.which(argv[0], path=search_path())
    if path is None:
        raise MissingHelper(missing_helper_text(argv[0]))
    shown = " ".join("***" if argument in hidden else argument for argument in argv)
    log.v(4).info("Running volume helper", command=shown)
    reader = _OutputReader()
    try:
        status = await _run(path, argv, deadline, reader)
    except OSError as err:
        raise HelperError(f"{argv[0]} could not be started: {err.strerror or err}") from err
    finally:
        output = reader.close()
    summary = " ".join(output.split())[:_MAX_SUMMARY_LENGTH]
    if status is None:
        raise HelperTimeout(
            f"{shown} did not end within {deadline:g} s, and was killed: {summary or 'no word'}"
        )
    if status:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        text = f"{shown} failed: {how}: {summary or 'it gave no reason'}"
        raise HelperError(text, status=status, output=output)
    return output


def join_options(options: Iterable[str], extra: Iterable[str]) -> list[str]:
    """Return mount options in upstream's order: sorted and unique."""
    return sorted({option for option in options if option} | set(extra))


def mount_command(
    fs_type: str,
    source: str,
    target: Path,
    options: Sequence[str],
    *,
    scoped: bool = False,
    mounter: str = "",
) -> list[str]:
    """Return the mount command; `scoped` runs it in a systemd scope apart from the kubelet's service.

    `mounter` is a binary that runs the `mount` of another root directory, for file systems that need one.
    """
    flags = [*(("-t", fs_type) if fs_type else ()), *(("-o", ",".join(options)) if options else ())]
    command = ["mount", *flags, source, str(target)]
    if mounter and fs_type in MOUNTER_TYPES:
        command = [mounter, *command]
    if scoped:
        description = f"--description=Kubernetes transient mount for {target}"
        return ["systemd-run", description, "--scope", "--", *command]
    return command


async def mount_with_helper(
    fs_type: str,
    source: str,
    target: Path,
    options: Sequence[str],
    *,
    scoped: bool = False,
    mounter: str = "",
) -> None:
    """Mount with the host's `mount`, or with `mounter` (`--experimental-mounter-path`). Raises HelperError.

    `scoped`: the file system may need a daemon, which must survive the kubelet's service under systemd.
    """
    scoped = scoped and has_systemd()
    command = mount_command(fs_type, source, target, options, scoped=scoped, mounter=mounter)
    try:
        await run_helper(*command)
    except HelperError as err:
        binary = f"mount.{fs_type}"
        hint = ""
        if not mounter and binary in _PACKAGES and shutil.which(binary, path=search_path()) is None:
            hint = f"; {missing_helper_text(binary)}"
        raise type(err)(f"mount failed: {err}{hint}", status=err.status, output=err.output) from err


async def unmount_with_helper(target: Path) -> None:
    """Unmount with the host's `umount`: if it hangs, with force (`-f`), and if that fails, lazily (`-l`).

    For file systems whose server may be down. A path that is not mounted is fine. Raises HelperError, for
    example if the mount is busy.
    """
    try:
        await run_helper("umount", str(target), deadline=UNMOUNT_DEADLINE)
    except HelperTimeout:
        log.info("Unmount timed out, forcing it", path=target)
    except HelperError as err:
        if not is_mounted(target):
            return
        raise HelperError(f"unmount failed: {err}", status=err.status) from err
    else:
        return
    for option in ("-f", "-l"):
        try:
            await run_helper("umount", option, str(target), deadline=UNMOUNT_DEADLINE)
        except HelperError as err:
            log.error(err, "Failed to force unmount", path=target)
        if not is_mounted(target):
            return
    raise HelperError(f"unmount failed: {target} is mounted still, although unmounting was forced")


def has_systemd() -> bool:
    """Return whether systemd is the host's init system and `systemd-run` is installed."""
    return (
        Path("/run/systemd/system").is_dir() and shutil.which("systemd-run", path=search_path()) is not None
    )


def is_mounted(target: Path) -> bool:
    """Return whether something is mounted at a path, without accessing the path, which may hang."""
    real = target.parent.resolve() / target.name
    return any(mount.point == real for mount in read_mounts(real))


def mounts_of_volume(mounts: Iterable[Mount], volume: Path, sub_paths: Path) -> list[Mount]:
    """Return the mounts of a pod's volume, the latest first: at its path, and its bind-mounted sub-paths.

    The paths are real paths. Sub-paths are recognized by the type and source of their file system.
    """
    all_mounts = list(mounts)
    file_systems = {(mount.kind, mount.source) for mount in all_mounts if mount.point == volume}
    return [
        mount
        for mount in reversed(all_mounts)
        if mount.point == volume
        or (mount.point.is_relative_to(sub_paths) and (mount.kind, mount.source) in file_systems)
    ]


class _OutputReader:
    """Reader of a process's output through a pipe, which drops what exceeds a limit."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.write_fd, True)
        self._output = bytearray()
        self._loop.add_reader(self._read_fd, self._read)

    def close(self) -> str:
        """Return the output, including what is in the pipe; what a daemon writes later is ignored."""
        os.close(self.write_fd)
        for _ in range(_MAX_OUTPUT_BYTES // _READ_BYTES + 1):
            if not self._read():
                break
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        return self._output.decode(errors="replace")

    def _read(self) -> bool:
        """Read what is available; return whether there was anything."""
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._read_fd)
        self._output += data[: _MAX_OUTPUT_BYTES - len(self._output)]
        return bool(data)


async def _run(path: str, argv: Sequence[str], deadline: float, reader: _OutputReader) -> int | None:
    """Return the exit status, negative for a signal; None for a process that was killed at its deadline."""
    process = await run_or_undo(
        asyncio.create_subprocess_exec(
            path,
            *argv[1:],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=reader.write_fd,
            stderr=reader.write_fd,
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


async def _kill(process: asyncio.subprocess.Process, binary: str) -> None:
    with suppress(ProcessLookupError):
        # The whole process group: `mount` itself only waits for the helper that hangs.
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(_KILL_TIMEOUT_SECONDS):
            await process.wait()
    except TimeoutError:
        log.info("Failed to kill volume helper", command=binary, pid=process.pid)
