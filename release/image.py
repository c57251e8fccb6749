"""The OCI image of the agent: the kubelet for the container runtime of a host, in a privileged container.

A small Debian with Python and the programs that the kubelet calls (mount, iptables, mkfs), and the private
environment of the Debian package. It has no container runtime: the kubelet in it uses the host's, by its
socket. The archive is written by the same writer as the seed images, so it has no dates and is the same for
the same Debian packages; `manifest.json` is added for `docker load`.
"""

from __future__ import annotations

import io
import json
import os
import platform
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykubelet.standalone.seed_images import Entry, ImageConfig, image_archive, machine_platform
from release.debian import bootstrap
from release.environment import SYSTEM_PYTHON, build_environment, compile_modules
from release.sources import BuildError, Release, build_wheel

PACKAGES = (
    "busybox-static",
    "ca-certificates",
    "catatonit",
    "conntrack",
    "e2fsprogs",
    "ethtool",
    "iproute2",
    "iptables",
    "kmod",
    "mount",
    "python3",
)
_EMPTIED = (
    "boot",
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache",
    "var/lib/apt/lists",
    "var/log",
    "var/tmp",
)
"""Directories whose contents a container does not need, or gets from its runtime."""
_REMOVED = {"etc/hostname", "etc/machine-id", "etc/resolv.conf", "var/lib/systemd/random-seed"}
"""Files that belong to one host."""
_WRITABLE = ("tmp", "var/tmp")


def image_name(release: Release) -> str:
    """Return the full name of the image."""
    return f"pykubelet.local/pykubelet:{release.version}"


def build_image(release: Release, out: Path) -> Path:
    """Build the archive and return its path. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="pyk-image-") as name:
        root = Path(name) / "root"
        root.mkdir()
        bootstrap(release, root, PACKAGES)
        return write_image(release, root, out)


def write_image(release: Release, root: Path, out: Path) -> Path:
    """Install the programs into a Debian at `root`, and write it as an archive. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="pyk-wheel-") as name:
        wheel, _ = build_wheel(release, Path(name))
        environment = build_environment(release, wheel, root)
    if not (root / f"usr/bin/python{environment.python}").exists():
        raise BuildError(
            f"{SYSTEM_PYTHON} is Python {environment.python}, and the image's Debian has another one: "
            "build the image on the same release of Debian"
        )
    _compile_standard_library(release, root, environment.python)
    for program in ("kubelet", "pykubelet"):
        (root / "usr/bin" / program).symlink_to(f"../lib/pykubelet/bin/{program}")
    config = ImageConfig(
        entrypoint=["/usr/bin/kubelet"],
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        labels={
            "org.opencontainers.image.title": "pykubelet",
            "org.opencontainers.image.description": "Kubernetes node agent, the kubelet, in Python",
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.version": release.version,
        },
    )
    target = machine_platform(platform.machine())
    archive = image_archive(image_name(release), tree_entries(root), config, target)
    out.mkdir(parents=True, exist_ok=True)
    product = out / "pykubelet-image.tar"
    partial = product.with_name(f".{product.name}.partial")
    partial.write_bytes(archive)
    add_docker_manifest(partial, image_name(release))
    partial.replace(product)
    return product


def tree_entries(root: Path) -> Iterator[Entry]:
    """Yield the files, directories and links of a tree, as an image has them."""
    for directory, names, others in os.walk(root):
        here = Path(directory).relative_to(root).as_posix()
        if here in _EMPTIED:
            names.clear()
            continue
        names.sort()
        for name in sorted([*names, *others]):
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            if relative in _REMOVED or (relative.startswith("usr/share/doc/") and _is_document(path)):
                continue
            status = path.lstat()
            # The layer has no owners but root, who needs no set-user-ID programs.
            mode = 0o1777 if relative in _WRITABLE else stat.S_IMODE(status.st_mode) & 0o1777
            if stat.S_ISLNK(status.st_mode):
                yield Entry(relative, link=str(path.readlink()))
            elif stat.S_ISREG(status.st_mode):
                yield Entry(relative, data=path.read_bytes(), mode=mode)
            elif stat.S_ISDIR(status.st_mode):
                yield Entry(relative, mode=mode)


def add_docker_manifest(archive: Path, name: str) -> None:
    """Add the index that `docker load` of older versions reads, beside OCI's."""
    with tarfile.open(archive) as source:
        index = _read_json(source, "index.json")
        manifest = _read_json(source, _blob(index["manifests"][0]["digest"]))
    document = [
        {
            "Config": _blob(manifest["config"]["digest"]),
            "RepoTags": [name],
            "Layers": [_blob(layer["digest"]) for layer in manifest["layers"]],
        }
    ]
    data = json.dumps(document, sort_keys=True).encode()
    info = tarfile.TarInfo("manifest.json")
    info.size = len(data)
    with tarfile.open(archive, "a", format=tarfile.PAX_FORMAT) as target:
        target.addfile(info, io.BytesIO(data))


def _compile_standard_library(release: Release, root: Path, python: str) -> None:
    # What the installation of Python compiled is valid for the dates of its sources, which a layer loses.
    library = root / f"usr/lib/python{python}"
    for compiled in library.rglob("*.pyc"):
        compiled.unlink()
    compile_modules(release, library, root)


def _is_document(path: Path) -> bool:
    return path.is_file() and path.name != "copyright"


def _read_json(archive: tarfile.TarFile, name: str) -> Any:
    member = archive.extractfile(name)
    assert member is not None
    return json.loads(member.read())


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
