"""The volumes of the test driver: directories, or file systems and devices in files by loop devices.

Nothing is remembered but on disk and in the mount table, so the driver may die at any point, and every
call may be repeated, as the protocol demands.
"""

import subprocess
from pathlib import Path

SIZE = 16 << 20
"""Bytes of a volume in a file, unless its attributes say otherwise."""


class Backend:
    """Volumes below a directory: `<handle>` is a directory, `<handle>.img` a file with a disk's content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def directory(self, handle: str) -> Path:
        """The directory that is a volume."""
        path = self.folder / handle
        path.mkdir(exist_ok=True)
        return path

    def device(self, handle: str, size: int = SIZE, *, format_as: str = "") -> str:
        """Ensure the loop device of a volume; a new one gets a file system if told so."""
        image = self.folder / f"{handle}.img"
        fresh = not image.exists()
        if fresh:
            with image.open("wb") as file:
                file.truncate(size)
        if fresh and format_as:
            run("mkfs.ext4", "-q", "-F", str(image))
        if loops := self._loops(image):
            return loops[0]
        return run("losetup", "--find", "--show", str(image)).strip()

    def release(self, handle: str) -> None:
        """Let go of a volume's loop device."""
        for loop in self._loops(self.folder / f"{handle}.img"):
            try:
                run("losetup", "--detach", loop)
            except OSError as err:
                # Two calls at once release the same: the other one was quicker.
                if "No such device" not in str(err):
                    raise

    def grow(self, handle: str, size: int, *, with_files: bool) -> None:
        """Let a volume be larger."""
        image = self.folder / f"{handle}.img"
        if not image.exists():
            return
        with image.open("r+b") as file:
            file.truncate(max(size, image.stat().st_size))
        for loop in self._loops(image):
            run("losetup", "--set-capacity", loop)
            if with_files:
                # Not every machine lets a mounted file system grow; the device has, and that can be seen.
                subprocess.run(["resize2fs", loop], capture_output=True, check=False)

    def _loops(self, image: Path) -> list[str]:
        listed = run("losetup", "--noheadings", "--output", "NAME", "--associated", str(image))
        return listed.split()


def show(source: str, target: Path, *, options: str = "bind", file: bool = False) -> None:
    """Mount something, or bind it, unless something is mounted there."""
    if file:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    else:
        target.mkdir(parents=True, exist_ok=True)
    if not is_mounted(target):
        run("mount", "-o", options, source, str(target))


def hide(target: Path) -> None:
    """Unmount and delete; what is not there is fine."""
    while is_mounted(target):
        run("umount", str(target))
    if target.is_dir():
        target.rmdir()
    else:
        target.unlink(missing_ok=True)


def is_mounted(target: Path) -> bool:
    """Whether something is mounted here."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == str(target) for line in lines)


def run(*command: str) -> str:
    """Run a program; returns its output, raises with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
