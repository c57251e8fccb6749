"""Copy between two root directories, one of which an attacker owns."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.copy import MAX_DEPTH, Copied, CopyError, Tree, copy, stays_inside
from pykubelet.cli.pods.cp import CopyOptions, Location, run_cp


@contextmanager
def tree(root: Path) -> Iterator[Tree]:
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Tree(opened)
    finally:
        os.close(opened)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Sides:
    """Root directories of a container and of the host, side by side, and a secret beside them."""

    def __init__(self, path: Path) -> None:
        self.container, self.host, self.secret = path / "container", path / "host", path / "secret"
        self.container.mkdir()
        self.host.mkdir()
        self.secret.write_text("secret")
        self.warnings: list[str] = []

    def download(self, source: str, target: str) -> Copied:
        with tree(self.container) as container, tree(self.host) as host:
            return copy(container, source, host, target, self.warnings.append)

    def upload(self, source: str, target: str) -> Copied:
        with tree(self.container) as container, tree(self.host) as host:
            return copy(host, source, container, target, self.warnings.append)


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


def test_copy_directory_both_directions_equal(sides: Sides) -> None:
    (sides.container / "d" / "e").mkdir(parents=True)
    (sides.container / "d" / "a").write_bytes(os.urandom(3 << 20))
    (sides.container / "d" / "a").chmod(0o4755)
    (sides.container / "d" / "e" / "l").symlink_to("../a")
    (sides.container / "d" / "e" / b"\xff\n".decode("utf-8", "surrogateescape")).touch()
    assert sides.download("/d", "/new") == Copied(2, 3 << 20, 0)
    assert (sides.host / "new" / "a").read_bytes() == (sides.container / "d" / "a").read_bytes()
    assert (sides.host / "new" / "a").stat().st_mode & 0o7777 == 0o755
    assert (sides.host / "new" / "e" / "l").readlink() == Path("../a")
    assert sides.upload("/new", "/").files == 2  # the directory exists: a copy in it
    assert names(sides.container / "new") == ["a", "e"]
    assert sides.warnings == []
    again = sides.download("/d", "/new")  # into the existing directory
    assert again.files == 2
    assert (sides.host / "new" / "d" / "a").exists()


def test_copy_hostile_source_nothing_of_host_read_or_written(sides: Sides) -> None:
    root = sides.container / "d"
    root.mkdir()
    (root / "absolute").symlink_to("/etc/shadow")
    (root / "up").symlink_to("../../secret")
    (root / "sly").symlink_to("a/../../../secret")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(root)
        listener.bind("s")
    (root / "good").write_text("good")
    assert sides.download("/d", "/d").skipped == 5
    assert names(sides.host / "d") == ["good"]
    assert len(sides.warnings) == 5
    for path, leads_to in (("/x", "../../../../secret"), ("/y", str(sides.secret))):
        (sides.container / path[1:]).symlink_to(leads_to)
        with pytest.raises(CopyError, match="No such file"):
            sides.download(path, "/stolen")
    with pytest.raises(CopyError, match="neither a file nor a directory"):
        sides.download("/d/fifo", "/stolen")


def test_copy_into_hostile_target_stays_in_container(sides: Sides) -> None:
    (sides.host / "f").write_text("new")
    (sides.container / "out").symlink_to(sides.secret.parent)
    with pytest.raises(CopyError):
        sides.upload("/f", "/out/secret")
    (sides.container / "link").symlink_to(sides.secret)
    sides.upload("/f", "/link")  # the link is replaced, not followed
    assert (sides.container / "link").read_text() == "new"
    assert sides.secret.read_text() == "secret"
    (sides.host / "d" / "sub").mkdir(parents=True)
    (sides.host / "d" / "sub" / "f").touch()
    (sides.container / "d").mkdir()
    (sides.container / "d" / "d").mkdir()
    (sides.container / "d" / "d" / "sub").symlink_to(sides.secret.parent)
    with pytest.raises(CopyError, match="cannot copy"):
        sides.upload("/d", "/d")
    assert not (sides.secret.parent / "f").exists()


def test_copy_existing_directory_keeps_mode(sides: Sides) -> None:
    (sides.container / "tmp" / "new").mkdir(parents=True)
    (sides.container / "tmp").chmod(0o755)
    (sides.container / "tmp" / "new").chmod(0o750)
    (sides.host / "tmp").mkdir()
    (sides.host / "tmp").chmod(0o1777)
    assert sides.download("/tmp", "/").skipped == 0
    assert (sides.host / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (sides.host / "tmp" / "new").stat().st_mode & 0o7777 == 0o750


def test_copy_again_replaces_links(sides: Sides) -> None:
    source = sides.container / "d"
    source.mkdir()
    for name in ("same", "changed"):
        (source / name).symlink_to("f")
    (source / "f").touch()
    assert sides.download("/d", "/").skipped == 0
    same = (sides.host / "d" / "same").lstat().st_ino
    (source / "changed").unlink()
    (source / "changed").symlink_to("g")
    (source / "file").symlink_to("f")
    (sides.host / "d" / "file").write_text("mine")
    assert sides.download("/d", "/").skipped == 1
    assert (sides.host / "d" / "same").lstat().st_ino == same
    assert (sides.host / "d" / "changed").readlink() == Path("g")
    assert (sides.host / "d" / "file").read_text() == "mine"
    assert sides.warnings == ["left out /d/file: something of this name exists that is not a link"]
    assert names(sides.host / "d") == ["changed", "f", "file", "same"]


def test_copy_endless_depth_bounded(sides: Sides) -> None:
    root = sides.container / "d"
    root.mkdir()
    opened = os.open(root, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 20):
        os.mkdir("x", dir_fd=opened)
        below = os.open("x", os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened = below
    os.close(opened)
    assert sides.download("/d", "/d").skipped == 1
    assert "deeper than" in sides.warnings[0]


def test_copy_failure_leaves_no_temporary_file(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    (sides.container / "f").write_text("text")
    (sides.host / "f").write_text("before")

    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CopyError, match="No space left"):
        sides.download("/f", "/f")
    assert names(sides.host) == ["f"]
    assert (sides.host / "f").read_text() == "before"


def test_copy_wrong_paths_one_line(sides: Sides) -> None:
    (sides.container / "f").touch()
    (sides.host / "d" / "f").mkdir(parents=True)
    for source, target in (("/none", "/x"), ("/f", "/none/x"), ("/f", "/none/"), ("/f", "/d")):
        with pytest.raises(CopyError, match=r"^cannot copy [^\n]*$"):
            sides.download(source, target)


@pytest.mark.parametrize(
    ("leads_to", "depth", "inside"),
    [
        ("a", 0, True),
        ("../a", 0, False),
        ("../a", 1, True),
        ("/a", 9, False),
        ("a/../b", 5, False),
        ("..//..", 1, False),
    ],
)
def test_stays_inside(leads_to: str, depth: int, inside: bool) -> None:
    assert stays_inside(leads_to, depth) is inside


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("web:/tmp", Location("/tmp", "web")),
        ("default/web:", Location("/", "default/web")),
        ("./a:b", Location("./a:b")),
        ("/a:b", Location("/a:b")),
        (":x", Location(":x")),
        ("plain", Location("plain")),
    ],
)
def test_location_parse(text: str, location: Location) -> None:
    assert Location.parse(text) == location


def test_run_cp_two_local_or_two_remote_paths_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    for source, target in (("/a", "/b"), ("a:/b", "c:/d")):
        assert run_cp(NodeSelection(Path("/tmp/none")), CopyOptions(source, target)) == 1
        assert "one of the two paths is POD:PATH" in capsys.readouterr().err
