"""A small writer of OCI images: files in, one tar archive out that any runtime can import.

Pure and reproducible: the same files give the same bytes, and so the same digests, on every machine
and at any time. One layer, not compressed, because an image that is imported locally has nothing to
gain from compression.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_EPOCH = "1970-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, a directory (neither data nor link) or a symbolic link in an image; root owns it."""

    path: str
    """Relative to the image's root: `bin/busybox`."""
    data: bytes | None = None
    link: str | None = None
    """What a symbolic link points to."""
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Platform:
    """For which machines an image is."""

    architecture: str
    variant: str = ""

    def document(self) -> dict[str, str]:
        """Give it as the image's documents spell it."""
        found = {"architecture": self.architecture, "os": "linux"}
        return {**found, "variant": self.variant} if self.variant else found


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How an image's containers run unless a pod says otherwise."""

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Give it as the image's configuration spells it, without what is empty."""
        found: dict[str, Any] = {
            "User": self.user,
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.command),
            "Labels": dict(self.labels),
        }
        return {name: value for name, value in found.items() if value}


def image_archive(name: str, entries: Iterable[Entry], config: ImageConfig, platform: Platform) -> bytes:
    """Write an image, with its full name such as `pykubelet.local/pause:1`, as an OCI archive.

    Raises ValueError for entries that no file system could hold.
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
                    # containerd wants the whole name, everybody else only what follows the colon.
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
    """Write the files of one layer, directories that were not named included.

    Raises ValueError for paths that leave the image, appear twice, or lie below a file.
    """
    given: dict[str, Entry] = {}
    for entry in entries:
        _check(entry)
        if entry.path in given:
            raise ValueError(f"{entry.path!r} appears twice")
        given[entry.path] = entry
    for path in list(given):
        for parent in PurePosixPath(path).parents:
            above = str(parent)
            if above == ".":
                continue
            known = given.setdefault(above, Entry(above))
            if known.data is not None or known.link is not None:
                raise ValueError(f"{path!r} lies below {above!r}, which is not a directory")
    return _tar(given[path] for path in sorted(given, key=lambda path: path.split("/")))


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
