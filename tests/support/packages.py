"""Built packages, and a clean Debian to install them into; each is made once and cached by its content.

The Debian root has what a fresh server has, and the archives of the package's dependencies in apt's cache, so
that `apt-get install ./pykubelet.deb` needs no network.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pykubelet.linux.mounts import mount, unmount
from release.deb import build_deb
from release.debian import bootstrap
from release.sources import CHECKOUT, build_wheel, find_release

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pykubelet/packages"
NEXT_VERSION = "99.1"
"""Version that is newer than every release, for upgrades."""
_SERVER = ("systemd-sysv", "dbus", "iproute2")
_SOURCES = (
    "src",
    "release",
    "packaging",
    "docs/packages.md",
    "examples",
    "CHANGELOG.md",
    "README.md",
    "LICENSE",
)
_BUILD_FILES = ("pyproject.toml", "uv.lock", "hatch_build.py")
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": "/root",
}
_INSTALL_DEPENDENCIES = """\
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
apt-get install -qq -y --no-install-recommends /root/pykubelet.deb
apt-get purge -qq -y pykubelet
rm /usr/sbin/policy-rc.d /root/pykubelet.deb
"""
_GENERATED = ("_pb2.py", "_pb2.pyi", ".pyc")
_KEPT = 4
_IMAGE_BYTES = 4 << 30


def built_deb(version: str | None = None) -> Path:
    """Return the Debian package of this checkout, built if that is necessary."""

    def build(directory: Path) -> None:
        # Tests install it often: the compression of a release would take a third of the time.
        build_deb(find_release(version), directory, compression="gzip")

    (product,) = filled_once("deb", f"{content_of_checkout()} {version}", build).glob("*.deb")
    return product


def built_wheel() -> tuple[Path, Path]:
    """Return the wheel and the sdist of this checkout, built if that is necessary."""

    def build(directory: Path) -> None:
        build_wheel(find_release(), directory)

    directory = filled_once("wheel", content_of_checkout(), build)
    return next(directory.glob("*.whl")), next(directory.glob("*.tar.gz"))


def debian_root() -> Path:
    """Return the root directory of a clean Debian; it must not be changed."""
    control = (CHECKOUT / "packaging/deb/control").read_text()
    depends = next(line for line in control.splitlines() if line.startswith("Depends:"))

    def build(directory: Path) -> None:
        bootstrap(find_release(), directory, _SERVER, keep_lists=True)
        deb = built_deb()
        shutil.copy(deb, directory / "root" / deb.name)
        resolver = directory / "etc/resolv.conf"
        resolver.write_bytes(Path("/etc/resolv.conf").read_bytes())
        download = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "--download-only"]
        subprocess.run(
            ["chroot", str(directory), *download, f"/root/{deb.name}"],
            check=True,
            capture_output=True,
            env=_ENVIRONMENT,
        )
        (directory / "root" / deb.name).unlink()
        # mmdebstrap makes the root of the file system accessible to root only.
        directory.chmod(0o755)

    return filled_once("root", f"{depends} {_SERVER}", build)


def debian_image() -> Path:
    """Return an ext4 image of the clean Debian with the package's dependencies, for a virtual machine.

    The dependencies are installed here, because an emulated processor would take minutes to unpack them. The
    image must not be changed.
    """
    root = debian_root()

    def build(directory: Path) -> None:
        shutil.copy(built_deb(), directory / "pykubelet.deb")
        image = directory / "debian.ext4"
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        with overlay_of(root) as changed:
            shutil.copy(directory / "pykubelet.deb", changed / "root/pykubelet.deb")
            subprocess.run(
                ["chroot", str(changed), "sh", "-ec", _INSTALL_DEPENDENCIES],
                check=True,
                capture_output=True,
                env=_ENVIRONMENT,
            )
            subprocess.run(
                ["mkfs.ext4", "-q", "-F", "-d", str(changed), str(image)], check=True, capture_output=True
            )
        (directory / "pykubelet.deb").unlink()

    return filled_once("system", f"{root.name} {_INSTALL_DEPENDENCIES}", build) / "debian.ext4"


@contextlib.contextmanager
def overlay_of(root: Path) -> Iterator[Path]:
    """Yield a directory with the contents of another one, which can be changed without changing those."""
    with tempfile.TemporaryDirectory(prefix="pyk-overlay-") as name:
        upper, work, merged = (Path(name, part) for part in ("upper", "work", "merged"))
        for directory in (upper, work, merged):
            directory.mkdir(mode=0o755)
        mount("overlay", merged, "overlay", f"lowerdir={root},upperdir={upper},workdir={work}")
        try:
            yield merged
        finally:
            unmount(merged, detach=True)


def why_no_packages() -> str:
    """Return the reason why packages cannot be built and installed here, or an empty string."""
    if os.geteuid() != 0:
        return "root is needed to install packages into a Debian"
    needed = ("mmdebstrap", "lintian", "dpkg-deb", "strip", "readelf")
    missing = [name for name in needed if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}: run scripts/setup --package" if missing else ""


_ENTER = """\
set -e
mount -t tmpfs -o mode=755 none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" none "$1/root"
mount -t proc none "$1/root/proc"
mount --bind "$3" "$1/root/mnt"
printf '#!/bin/sh\\nexit 101\\n' >"$1/root/usr/sbin/policy-rc.d"
chmod 755 "$1/root/usr/sbin/policy-rc.d"
shift 3
exec chroot "$NEW_ROOT" "$@"
"""


def run_in_debian(command: Sequence[str], share: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy of the Debian root, without a network, with `share` at /mnt.

    The copy exists as long as the command's mount namespace.
    """
    with tempfile.TemporaryDirectory(prefix="pyk-debian-") as scratch:
        spaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        enter = ["sh", "-c", _ENTER, "enter", scratch, str(debian_root()), str(share), *command]
        environment = {**_ENVIRONMENT, "NEW_ROOT": f"{scratch}/root"}
        return subprocess.run([*spaces, *enter], capture_output=True, text=True, env=environment)


def content_of_checkout() -> str:
    """Return a hash of everything that decides on the products."""
    digest = hashlib.sha256()
    roots = [CHECKOUT / name for name in (*_SOURCES, *_BUILD_FILES)]
    for root in roots:
        paths = [root] if root.is_file() else sorted(root.rglob("*"))
        for path in paths:
            if path.is_file() and not path.name.endswith(_GENERATED):
                digest.update(f"{path.relative_to(CHECKOUT)}\0{path.stat().st_mode}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def filled_once(kind: str, content: str, build: Callable[[Path], None]) -> Path:
    """Return the directory that `build` has filled for this content; the oldest ones are removed."""
    directory = CACHE / kind / hashlib.sha256(content.encode()).hexdigest()[:16]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / "lock"):
        if not directory.is_dir():
            temporary = Path(tempfile.mkdtemp(prefix="building-", dir=directory.parent))
            try:
                build(temporary)
                temporary.rename(directory)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        directory.touch()
        known = sorted(
            (path for path in directory.parent.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
        for old in known[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return directory


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
