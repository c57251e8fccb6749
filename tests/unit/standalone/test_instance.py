"""Paths and names of a data directory, which directories are refused, and how one becomes ours."""

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.standalone.data_dir import claim, is_empty, is_owned, make_directories, require_owned
from pykubelet.standalone.instance import DEFAULT_DATA_DIR, DirectoryError, Instance
from pykubelet.transport.endpoint import Endpoint


def test_instance_default_data_dir_has_default_names() -> None:
    instance = Instance.at()
    assert (instance.data_dir, instance.name, instance.bridge) == (DEFAULT_DATA_DIR, "pykubelet", "pyk0")
    assert instance.cgroup_root == "/pykubelet"
    assert instance.endpoint == "unix:///var/lib/pykubelet/containerd/containerd.sock"


def test_instance_paths_are_below_data_dir(tmp_path: Path) -> None:
    instance = Instance.at(Path("/srv/node"))
    for name in dir(Instance):
        value = getattr(instance, name)
        if isinstance(value, Path):
            assert value.is_relative_to("/srv/node")


@given(st.sets(st.text("abc-/ü ", min_size=1, max_size=12), min_size=2, max_size=5))
def test_instance_names_are_unique_and_within_link_name_limit(paths: set[str]) -> None:
    instances = {Instance.at(Path("/srv/x") / path.strip("/")) for path in paths}
    assert len({instance.name for instance in instances}) == len(instances)
    assert len({instance.bridge for instance in instances}) == len(instances)
    for instance in instances:
        assert len(instance.bridge) <= 15, "the kernel's limit for a link's name"


def test_instance_relative_path_or_symlink_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path("/srv")
    monkeypatch.chdir(base)
    assert Instance.at(Path("node/../other")).data_dir == base / "other"
    link = tmp_path / "l"
    link.symlink_to("/etc")
    with pytest.raises(DirectoryError, match="/etc belongs to the system"):
        Instance.at(link)


HOME = pwd.getpwuid(os.geteuid()).pw_dir


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/usr",
        "/etc",
        "/var/lib",
        "/tmp",
        "/proc/1",
        "/sys/fs/cgroup/x",
        "/dev/shm/x",
        HOME,
        "/usr/../etc",
    ],
)
def test_instance_system_or_home_directory_raises(path: str) -> None:
    with pytest.raises(
        DirectoryError, match="belongs to the system or to a person: choose a directory of its own"
    ):
        Instance.at(Path(path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/srv/a:b", "contains ':', which mounts cannot express"),
        ("/srv/a,b", "contains ','"),
        ("/srv/a\nb", r"contains '\\n'"),
        ("/srv/\udcff", "is not valid UTF-8"),
        ("/srv/a\0b", "cannot be used"),
        (
            "/srv/" + "x" * 70,
            r"too long for the sockets in it \(75 bytes, at most 71\): choose a shorter path",
        ),
        ("/srv/" + "ü" * 40, "too long"),
    ],
)
def test_instance_unusable_path_raises_one_line_error(path: str, message: str) -> None:
    with pytest.raises(DirectoryError, match=message) as caught:
        Instance.at(Path(path))
    assert "\n" not in str(caught.value)


def test_instance_longest_path_fits_socket_paths() -> None:
    instance = Instance.at(Path("/srv/" + "x" * 66))
    for socket in (f"{instance.socket}.ttrpc", f"{instance.kubelet_root}/device-plugins/kubelet.sock"):
        Endpoint.parse(socket)


def test_claim_new_data_dir_is_owned_afterwards(tmp_path: Path, data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    assert is_empty(instance)
    assert not is_owned(instance)
    assert claim(instance) is True
    assert is_owned(instance)
    assert not is_empty(instance)
    assert claim(instance) is False, "it was ours before"
    make_directories(instance)
    make_directories(instance)
    assert instance.manifests.stat().st_mode & 0o777 == 0o755
    require_owned(instance)


def test_claim_directory_with_only_lost_found_succeeds(data_dir: Path) -> None:
    (data_dir / "lost+found").mkdir(parents=True)
    assert claim(Instance.at(data_dir)) is True


@pytest.mark.parametrize("content", ["file", "link", "file itself", "link itself"])
def test_claim_foreign_directory_raises(data_dir: Path, content: str) -> None:
    match content:
        case "file":
            data_dir.mkdir()
            (data_dir / "x").touch()
        case "link":
            data_dir.mkdir()
            (data_dir / "x").symlink_to("/nowhere")
        case "file itself":
            data_dir.touch()
        case "link itself":
            (data_dir.parent / "y").touch()
            data_dir.symlink_to(data_dir.parent / "y")
    instance = Instance.at(data_dir)
    for use in (claim, require_owned):
        with pytest.raises(DirectoryError, match="was not made by pykubelet"):
            use(instance)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["marker", "directory"])
def test_is_owned_marker_of_other_uid_returns_false(data_dir: Path, which: str) -> None:
    instance = Instance.at(data_dir)
    claim(instance)
    victim = instance.marker if which == "marker" else data_dir
    os.chown(victim, 12345, 12345)
    assert not is_owned(instance)
    with pytest.raises(DirectoryError):
        require_owned(instance)
    os.chown(victim, 0, 0)


def test_is_owned_symlink_marker_returns_false(data_dir: Path) -> None:
    data_dir.mkdir()
    instance = Instance.at(data_dir)
    instance.marker.symlink_to("/etc/passwd")
    assert not is_owned(instance)
    with pytest.raises(DirectoryError):
        claim(instance)
    instance.marker.unlink()
    data_dir.rmdir()


def test_claim_missing_parent_error_names_mkdir_command(data_dir: Path) -> None:
    with pytest.raises(DirectoryError, match=f"run 'mkdir -p {data_dir}' first"):
        claim(Instance.at(data_dir / "below"))
    assert not data_dir.exists()
