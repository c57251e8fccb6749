"""Images that kubeadm deploys, packed from executables of our builds and of this host's Debian packages.

The names come from `kubeadm config images list`, so a new version needs no change here. The three components
of the control plane are one executable and so one image with three names. An image of a dynamically linked
executable also has its shared libraries, by the paths that this host has them at.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pykubelet.standalone.instance import EmbeddedError
from pykubelet.standalone.requirements import inspect_host
from pykubelet.standalone.seed_images import (
    BUSYBOX_IMAGE,
    Entry,
    ImageConfig,
    busybox_entries,
    image_archive,
    machine_platform,
    read_static,
)
from tests.kubeadm.programs import Programs

_CONFIG = ImageConfig(env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
_CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_IPTABLES = Path("/usr/sbin/xtables-nft-multi")
_IPTABLES_NAMES = [
    f"{family}tables{action}" for family in ("ip", "ip6") for action in ("", "-save", "-restore")
]
_EXTENSIONS = "*/xtables/lib*.so"
"""Extensions of iptables below the directory of libraries."""


class ImageError(Exception):
    """An image cannot be packed on this host."""


IMAGE_ERRORS = (ImageError, EmbeddedError)


@dataclass(frozen=True, slots=True)
class PackedImage:
    """An archive with one image, and all names that the runtime must know it by."""

    file: str
    names: tuple[str, ...]


def needed_names(kubeadm: Path) -> tuple[str, list[str]]:
    """Return the version of Kubernetes that kubeadm deploys, and the images that it needs for it."""
    version = _output(kubeadm, "version", "-o", "short").strip()
    return version, _output(kubeadm, "config", "images", "list", "--kubernetes-version", version).split()


def pack_images(programs: Programs, names: Iterable[str], directory: Path) -> list[PackedImage]:
    """Write an archive of each image to a directory.

    Raises ImageError when a name has no recipe, or a file is missing on this host.
    """
    directory.mkdir(parents=True, exist_ok=True)
    platform = machine_platform(os.uname().machine)
    by_recipe: dict[str, list[str]] = {BUSYBOX: [BUSYBOX_IMAGE]}
    for name in names:
        component = name.rpartition(":")[0].rpartition("/")[2]
        recipe = "control-plane" if component in _CONTROL_PLANE else component
        if recipe not in _RECIPES:
            raise ImageError(
                f"kubeadm needs the image {name}, which has no recipe in tests/kubeadm/images.py"
            )
        by_recipe.setdefault(recipe, []).append(name)
    packed = []
    for recipe, image_names in by_recipe.items():
        entries, config = _RECIPES[recipe](programs)
        file = f"{recipe}.tar"
        (directory / file).write_bytes(image_archive(image_names[0], entries, config, platform))
        packed.append(PackedImage(file, tuple(image_names)))
    return packed


def program_entries(program: Path, *paths: str) -> list[Entry]:
    """Return an executable at these paths, all but the first as links, with its shared libraries."""
    data = _read(program)
    first, *others = paths
    entries = [Entry(first, data=data)]
    entries += [Entry(path, link=f"/{first}") for path in others]
    return [*entries, *library_entries([program])]


def library_entries(programs: Iterable[Path]) -> list[Entry]:
    """Return the shared libraries of ELF files and the dynamic loader, without duplicates."""
    found = {path for program in programs for path in _libraries(program)}
    return [Entry(path.lstrip("/"), data=_read(Path(path))) for path in sorted(found)]


def _libraries(program: Path) -> list[str]:
    # ldd exits with 1 for a static executable and says so.
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    if missing := re.findall(r"(\S+) => not found", output):
        raise ImageError(f"{program} needs {', '.join(missing)}, which this host does not have")
    return re.findall(r"(/\S+) \(0x", output)


def _control_plane(programs: Programs) -> tuple[list[Entry], ImageConfig]:
    paths = [f"usr/local/bin/{name}" for name in _CONTROL_PLANE]
    return program_entries(programs.apiserver, *paths), _CONFIG


def _etcd(programs: Programs) -> tuple[list[Entry], ImageConfig]:
    return program_entries(programs.etcd, "usr/local/bin/etcd"), _CONFIG


def _coredns(programs: Programs) -> tuple[list[Entry], ImageConfig]:
    config = ImageConfig(entrypoint=["/coredns"], env=_CONFIG.env)
    return program_entries(programs.coredns, "coredns"), config


def _proxy(programs: Programs) -> tuple[list[Entry], ImageConfig]:
    extensions = sorted(path for root in ("/usr/lib",) for path in Path(root).glob(_EXTENSIONS))
    if not extensions:
        raise ImageError("iptables' extensions are missing (Debian package iptables)")
    entries = [Entry(f"usr/sbin/{name}", link="xtables-nft-multi") for name in _IPTABLES_NAMES]
    entries += [Entry("usr/sbin/xtables-nft-multi", data=_read(_IPTABLES))]
    for path in extensions:
        name = str(path).lstrip("/")
        entries.append(
            Entry(name, link=str(path.readlink())) if path.is_symlink() else Entry(name, data=_read(path))
        )
    entries += [Entry("usr/local/bin/kube-proxy", data=_read(programs.proxy)), Entry("run")]
    return [*entries, *library_entries([_IPTABLES, programs.proxy, *extensions])], _CONFIG


def _pause(_programs: Programs) -> tuple[list[Entry], ImageConfig]:
    program = read_static(_host_program("catatonit"))
    return [Entry("pause", data=program)], ImageConfig(entrypoint=["/pause", "-P"], user="65535:65535")


def _busybox(_programs: Programs) -> tuple[list[Entry], ImageConfig]:
    program = _host_program("busybox")
    return busybox_entries(read_static(program), _output(program, "--list").split()), ImageConfig(
        command=["sh"], env=_CONFIG.env
    )


BUSYBOX = "busybox"
"""Recipe of the image of the test's own pods."""
_RECIPES: dict[str, Callable[[Programs], tuple[list[Entry], ImageConfig]]] = {
    "control-plane": _control_plane,
    "etcd": _etcd,
    "coredns": _coredns,
    "kube-proxy": _proxy,
    "pause": _pause,
    BUSYBOX: _busybox,
}
WORKER_FILES = ("kube-proxy.tar", "coredns.tar", "pause.tar", "busybox.tar")
"""Archives that a node without a control plane needs."""


def _host_program(name: str) -> Path:
    return inspect_host().programs[name]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise ImageError(f"{path} cannot be read: {err.strerror}") from err


def _output(program: Path, *arguments: str) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
