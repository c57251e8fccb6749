"""Paths in volumes: any tree of folders, files and links, any path, and nobody ever gets out.

An input is a tree and the paths to try in it, a line each: `d name`, `f name`, `l name target`, `p path`.
In a target `@` stands for the folder in which the volume and the secret beside it lie.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from pykubelet.kuberuntime.configuration.env import read_inside
from pykubelet.volumes.mounts.sub_path import opened_inside
from pykubelet.volumes.ownership import apply_group

SEEDS = [
    b"d a/b\nf a/file\nl link a/b\nl up ../a\np a/b\np link\np a/file\np up/b\np new/er\n",
    b"l out ../secret\nl far /etc\nl root /\nl proc /proc/self/root\np out/file\np far\np root\np proc/etc\n",
    b"d a\nl a/x ../b\nl b a/x\nl c @/secret\nl d @/volume/a\np a/x/y\np c/file\np d/new\n",
    b"l 0 1/../1\nl 1 2/../2\nl 2 3/../3\nl 3 4\nd 4\np 0\np 0/a/b/c\np 4/../4\n",
    b"d ..data\nl ..data/l ../..data\np ..data/l/l/l\np ./a/./b//c/\np a/..\np ../secret\np /etc\n",
]
_GROUP = 2345
_MOST_LINES = 40


@contextlib.asynccontextmanager
async def paths() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Have a place to try trees in."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        secret = home / "secret"
        (secret / "b").mkdir(parents=True)
        (secret / "file").write_text("the secret")
        before = _facts(secret)

        async def take(data: bytes) -> None:
            volume = home / "volume"
            volume.mkdir(mode=0o777)
            try:
                for line in data.split(b"\n")[:_MOST_LINES]:
                    _do(home, volume, line)
                if os.geteuid() == 0:
                    apply_group(volume, _GROUP)
                assert _facts(secret) == before, "something outside was changed"
                assert {path.name for path in home.iterdir()} == {"secret", "volume"}
            finally:
                shutil.rmtree(volume)

        yield take


def _do(home: Path, volume: Path, line: bytes) -> None:
    kind, _, rest = line.partition(b" ")
    text = os.fsdecode(rest)
    try:
        match kind:
            case b"d":
                _place(volume, text).mkdir(parents=True)
            case b"f":
                _place(volume, text).touch()
            case b"l":
                name, _, target = text.partition(" ")
                _place(volume, name).symlink_to(target.replace("@", str(home)))
            case b"p":
                _try(home, volume, text)
    except (OSError, ValueError):
        return


def _place(volume: Path, name: str) -> Path:
    """Where a tree's entry goes; building the tree itself must not leave the volume."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    if not parts or any((volume / "/".join(parts[:end])).is_symlink() for end in range(1, len(parts))):
        raise ValueError(name)
    return volume.joinpath(*parts)


def _try(home: Path, volume: Path, path: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        text = read_inside(volume, path)
        assert text == b"", text
    with opened_inside(volume, path) as found:
        where = Path(f"/proc/self/fd/{found}").readlink()
        assert where == volume.resolve() or volume.resolve() in where.parents, where
        assert not stat.S_ISLNK(os.fstat(found).st_mode)


def _facts(folder: Path) -> list[tuple[str, int, int, int, int]]:
    everything = [folder, *sorted(folder.rglob("*"))]
    return [(str(p), (s := p.lstat()).st_mode, s.st_gid, s.st_size, s.st_ctime_ns) for p in everything]
