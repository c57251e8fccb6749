"""Images that every private runtime has without a registry, pause and busybox, and the OCI archives of them.

They are built from two statically linked executables of the host's packages, so that pods start on a host
without a network. An image is imported if it is missing or if its executable has changed, by path, size and
mtime.

The archive is reproducible: the same files result in the same bytes, and so the same digests, on every host
at any time. It has one uncompressed layer, because a local import gains nothing from compression.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import platform
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.linux.processes import CommandError, run
from pykubelet.logs import get_logger
from pykubelet.standalone.instance import EmbeddedError
from pykubelet.standalone.requirements import HostRequirements

log = get_logger(__name__)
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_EPOCH = "1970-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, a directory (neither data nor link) or a symbolic link in an image, owned by root."""

    path: str
    """Path relative to the image's root, such as `bin/busybox`."""
    data: bytes | None = None
    link: str | None = None
    """Target of a symbolic link."""
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Platform:
    """CPU architecture of an image."""

    architecture: str
    variant: str = ""

    def document(self) -> dict[str, str]:
        """Return the platform as an OCI object."""
        found = {"architecture": self.architecture, "os": "linux"}
        return {**found, "variant": self.variant} if self.variant else found


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Defaults of an image's containers."""

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the `config` object of an OCI image, without empty fields."""
        found: dict[str, Any] = {
            "User": self.user,
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.command),
            "Labels": dict(self.labels),
        }
        return {name: value for name, value in found.items() if value}


def image_archive(name: str, entries: Iterable[Entry], config: ImageConfig, platform: Platform) -> bytes:
    """Return an image, with its full name such as `pykubelet.local/pause:1`, as an OCI archive.

    Raises ValueError for entries that do not form a file system tree.
    """
    layer = layer_tar(entries)
    layer_descriptor = _descriptor(_LAYER, layer)
    config_blob = _json(
        {
            "created": _EPOCH,
            **platform.document(),
            "config": config.document(),
            "rootfs": {"type": "layers", "diff_ids": [layer_descriptor["digest"]]},
            "history": [{"created": _EPOCH, "created_by": "pykubelet"}],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config_blob),
            "layers": [layer_descriptor],
        }
    )
    tag = name.rpartition(":")[2]
    index = _json(
        {
            "schemaVersion": 2,
            "manifests": [
                {
                    **_descriptor(_MANIFEST, manifest),
                    "platform": platform.document(),
                    # containerd reads the full name, other tools only the tag.
                    "annotations": {
                        "io.containerd.image.name": name,
                        "org.opencontainers.image.ref.name": tag,
                    },
                }
            ],
        }
    )
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": index}
    files.update({f"blobs/sha256/{_sha256(blob)}": blob for blob in (manifest, config_blob, layer)})
    return _tar(Entry(path, data=data, mode=0o644) for path, data in files.items())


def layer_tar(entries: Iterable[Entry]) -> bytes:
    """Return the tar archive of one layer; missing parent directories are added.

    Raises ValueError for paths outside the image, repeated paths, and paths below a file.
    """
    by_path: dict[str, Entry] = {}
    for entry in entries:
        _check(entry)
        if entry.path in by_path:
            raise ValueError(f"{entry.path!r} appears twice")
        by_path[entry.path] = entry
    for path in list(by_path):
        for parent in PurePosixPath(path).parents:
            above = str(parent)
            if above == ".":
                continue
            known = by_path.setdefault(above, Entry(above))
            if known.data is not None or known.link is not None:
                raise ValueError(f"{path!r} lies below {above!r}, which is not a directory")
    return _tar(by_path[path] for path in sorted(by_path, key=lambda path: path.split("/")))


def _tar(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.link is not None:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
            elif entry.data is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.data)
            archive.addfile(info, io.BytesIO(entry.data) if entry.data is not None else None)
    return buffer.getvalue()


def _check(entry: Entry) -> None:
    if any(part in ("", ".", "..") for part in entry.path.split("/")) or "\0" in entry.path:
        raise ValueError(f"{entry.path!r} is not a path inside an image")
    if entry.data is not None and entry.link is not None:
        raise ValueError(f"{entry.path!r} cannot be both a file and a link")


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{_sha256(blob)}", "size": len(blob)}


def _sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


PAUSE_IMAGE = "pykubelet.local/pause:1"
BUSYBOX_IMAGE = "pykubelet.local/busybox:1"
_RECIPE = "1"
"""Version of the image contents; must change with everything but the executables."""
_PT_INTERP = 3
_UNPRIVILEGED_USER = "65535:65535"
_ARCHITECTURES = {
    "x86_64": Platform("amd64"),
    "aarch64": Platform("arm64", "v8"),
    "armv7l": Platform("arm", "v7"),
    "armv6l": Platform("arm", "v6"),
    "i686": Platform("386"),
    "ppc64le": Platform("ppc64le"),
    "riscv64": Platform("riscv64"),
    "s390x": Platform("s390x"),
}
_USERS = """\
root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/:/bin/false
nobody:x:65534:65534:nobody:/:/bin/false
"""
_GROUPS = """\
root:x:0:
daemon:x:1:
tty:x:5:
users:x:100:
nogroup:x:65534:
"""


@dataclass(frozen=True, slots=True)
class SeedImage:
    """An image that can be built from an executable of this host."""

    name: str
    source: str
    """Fingerprint of the executable that the image is built from."""
    build: Callable[[], bytes]
    """Function that returns the archive; it blocks for some milliseconds."""


async def find_seeds(host: HostRequirements) -> list[SeedImage]:
    """Return the images that can be built from the host's executables, pause first.

    Raises EmbeddedError when busybox does not run or the CPU architecture is not supported.
    """
    pause, busybox = host.programs["catatonit"], host.programs["busybox"]
    applets = (await _run_program(busybox, "--list")).split()
    target = machine_platform(platform.machine())
    return [
        SeedImage(PAUSE_IMAGE, _fingerprint(pause), lambda: pause_archive(read_static(pause), target)),
        SeedImage(
            BUSYBOX_IMAGE,
            _fingerprint(busybox),
            lambda: busybox_archive(read_static(busybox), applets, target),
        ),
    ]


async def import_images(
    seeds: Iterable[SeedImage], known: Mapping[str, str], cri: RuntimeConnection, importer: Sequence[str]
) -> dict[str, str]:
    """Ensure that the runtime has the images; return the fingerprint of each.

    `known` is the result of the previous call, `importer` the command that imports an archive from its
    standard input. Raises EmbeddedError when an image cannot be imported.
    """
    imported = {}
    for seed in seeds:
        if known.get(seed.name) != seed.source or not await _has(cri, seed.name):
            log.info("Importing seed image", image=seed.name)
            archive = await asyncio.to_thread(seed.build)
            try:
                await run(*importer, input=archive, timeout=120)
            except CommandError as err:
                raise EmbeddedError(f"image {seed.name} could not be imported: {err}") from err
            await _wait_until_listed(cri, seed.name)
        imported[seed.name] = seed.source
    return imported


def pause_archive(program: bytes, target: Platform) -> bytes:
    """Return the image of the process that holds a pod's namespaces and reaps orphaned processes."""
    config = ImageConfig(entrypoint=["/pause", "-P"], user=_UNPRIVILEGED_USER)
    return image_archive(PAUSE_IMAGE, [Entry("pause", data=program)], config, target)


def busybox_archive(program: bytes, applets: list[str], target: Platform) -> bytes:
    """Return the image of busybox with a shell and all applets."""
    config = ImageConfig(command=["sh"], env={"PATH": "/bin"})
    return image_archive(BUSYBOX_IMAGE, busybox_entries(program, applets), config, target)


def busybox_entries(program: bytes, applets: Iterable[str]) -> list[Entry]:
    """Return the files of the busybox image."""
    entries = [Entry("bin/busybox", data=program)]
    entries += [Entry(f"bin/{applet}", link="busybox") for applet in applets if applet != "busybox"]
    entries += [
        Entry(directory)
        for directory in ("dev", "home", "proc", "sys", "usr", "usr/bin", "var", "var/spool", "var/www")
    ]
    entries += [Entry("tmp", mode=0o1777), Entry("root", mode=0o700), Entry("var/tmp", mode=0o1777)]
    entries += [
        Entry("etc/passwd", data=_USERS.encode(), mode=0o644),
        Entry("etc/group", data=_GROUPS.encode(), mode=0o644),
    ]
    # Many scripts start with #!/usr/bin/env.
    return [*entries, Entry("usr/bin/env", link="../../bin/busybox")]


def machine_platform(machine: str) -> Platform:
    """Return the image platform of a machine name of uname(2).

    Raises EmbeddedError for an unsupported architecture.
    """
    try:
        return _ARCHITECTURES[machine]
    except KeyError:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise EmbeddedError(f"no images for the processor {machine!r}: pykubelet knows {known}") from None


def read_static(program: Path) -> bytes:
    """Return the contents of a statically linked executable.

    Raises EmbeddedError when it needs shared libraries, which an image of one file does not have.
    """
    try:
        content = program.read_bytes()
        static = is_static(content)
    except (OSError, ValueError) as err:
        raise EmbeddedError(f"{program} cannot be used for an image: {err}") from err
    if not static:
        package = {"busybox": "busybox-static"}.get(program.name, program.name)
        raise EmbeddedError(f"{program} is not statically linked: install the Debian package {package}")
    return content


def is_static(program: bytes) -> bool:
    """Return whether an ELF executable runs without a dynamic loader.

    Raises ValueError when it is not an ELF executable.
    """
    try:
        if program[:4] != b"\x7fELF":
            raise ValueError("it is not an ELF program")
        is_64bit, order = program[4] == 2, "<" if program[5] == 1 else ">"
        (offset,) = struct.unpack_from(f"{order}{'Q' if is_64bit else 'I'}", program, 32 if is_64bit else 28)
        size, count = struct.unpack_from(f"{order}HH", program, 54 if is_64bit else 42)
        segment_types = [
            struct.unpack_from(f"{order}I", program, offset + index * size)[0] for index in range(count)
        ]
    except (struct.error, IndexError):
        raise ValueError("it is not a whole ELF program") from None
    return _PT_INTERP not in segment_types


def _fingerprint(program: Path) -> str:
    found = program.stat()
    return f"{program} {found.st_size} {found.st_mtime_ns} recipe {_RECIPE}"


async def _run_program(program: Path, *arguments: str) -> str:
    try:
        return await run(str(program), *arguments)
    except CommandError as err:
        raise EmbeddedError(f"{err}: install the Debian package busybox-static") from err


async def _wait_until_listed(cri: RuntimeConnection, image: str) -> None:
    # containerd's CRI plugin sees an import after a short delay, through an internal event.
    for _ in range(250):
        if await _has(cri, image):
            return
        await asyncio.sleep(0.02)
    raise EmbeddedError(f"image {image} was imported, but the runtime does not show it: see containerd's log")


async def _has(cri: RuntimeConnection, image: str) -> bool:
    response = await cri.images.image_status(pb.ImageSpec(image=image))
    return response.HasField("image")
