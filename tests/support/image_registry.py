"""A real registry on this machine, and small images to push to it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from pykubelet.standalone.requirements import inspect_host
from pykubelet.standalone.seed_images import (
    Entry,
    ImageConfig,
    image_archive,
    layer_tar,
    machine_platform,
    read_static,
)

PROGRAM = "docker-registry"
USER, PASSWORD = "user", "hunter2"
_HTPASSWD = f"{USER}:$2b$04$TipkePRyI/zFturjlgGae.AqBVl1nfPAbfXXwmhAD3XK/1YvyRr0.\n"
_LISTENING = re.compile(rb"listening on (127\.0\.0\.1:[0-9]+)")
_START_SECONDS = 60
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry that runs: `host` is `127.0.0.1:port`."""

    host: str
    protected: bool

    def push(self, repository: str, tag: str, *, user: str = "", note: str = "") -> str:
        """Push an image of one file, with a user of its own; returns its digest."""
        config = ImageConfig(command=["/hello"], user=user, labels={"note": note} if note else {})
        entries = [Entry("hello", data=f"{repository}:{tag} {note}".encode())]
        return self._push(repository, tag, entries, config)

    def push_busybox(self, repository: str, tag: str) -> str:
        """Push an image with a shell, which no other repository has; return its digest."""
        program = read_static(inspect_host().programs["busybox"])
        entries = [Entry("bin/busybox", data=program), Entry("tmp", mode=0o1777)]
        entries += [Entry(f"bin/{applet}", link="busybox") for applet in ("sh", "sleep", "cat", "true")]
        config = ImageConfig(env={"PATH": "/bin"}, labels={"repository": repository})
        return self._push(repository, tag, entries, config)

    def push_layers(self, repository: str, tag: str, layers: Iterable[bytes]) -> str:
        """Push an image with one file per layer, of these contents; return its digest."""
        return self.push_archive(repository, tag, layered_archive(f"{repository}:{tag}", layers))

    def _push(self, repository: str, tag: str, entries: list[Entry], config: ImageConfig) -> str:
        archive = image_archive(f"{repository}:{tag}", entries, config, machine_platform(os.uname().machine))
        return self.push_archive(repository, tag, archive)

    def push_archive(self, repository: str, tag: str, archive: bytes) -> str:
        """Push the image of an OCI archive and return its digest; blobs that are there are skipped."""
        entry, blobs = unpack_archive(archive)
        manifest = blobs.pop(entry["digest"])
        for digest, blob in blobs.items():
            if self._has(f"http://{self.host}/v2/{repository}/blobs/{digest}"):
                continue
            location = self._ask("POST", f"http://{self.host}/v2/{repository}/blobs/uploads/")["Location"]
            joint = "&" if "?" in location else "?"
            self._ask("PUT", f"{location}{joint}digest={digest}", blob, "application/octet-stream")
        self._ask("PUT", f"http://{self.host}/v2/{repository}/manifests/{tag}", manifest, entry["mediaType"])
        return f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def _has(self, url: str) -> bool:
        try:
            self._ask("HEAD", url)
        except urllib.error.HTTPError as err:
            if err.code != http.client.NOT_FOUND:
                raise
            return False
        return True

    def _ask(self, method: str, url: str, data: bytes = b"", kind: str = "text/plain") -> Any:
        body = data if method != "HEAD" else None
        request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
        if self.protected:
            login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            request.add_header("Authorization", f"Basic {login}")
        # The machine's proxies are for others.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return answer.headers


def layered_archive(name: str, layers: Iterable[bytes]) -> bytes:
    """Return an OCI archive of an image with one file per layer, of these contents."""
    tars = [layer_tar([Entry(f"layer-{number}", data=data)]) for number, data in enumerate(layers)]
    descriptors = [_descriptor("application/vnd.oci.image.layer.v1.tar", tar) for tar in tars]
    config = json.dumps(
        {
            **machine_platform(os.uname().machine).document(),
            "config": {"Cmd": ["/layer-0"]},
            "rootfs": {"type": "layers", "diff_ids": [found["digest"] for found in descriptors]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": descriptors,
        }
    ).encode()
    return write_archive(name, manifest, [config, *tars])


def write_archive(name: str, manifest: bytes, blobs: Iterable[bytes], **members: bytes) -> bytes:
    """Return an OCI archive with this manifest; `members` are further files."""
    entry = {**_descriptor(MANIFEST, manifest), "annotations": {"io.containerd.image.name": name}}
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        **{f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (manifest, *blobs)},
        **members,
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}",
        "size": len(blob),
    }


@contextmanager
def running_registry(
    folder: Path, *, protected: bool = False, host: str = "127.0.0.1:0"
) -> Iterator[Registry]:
    """Run a registry that keeps its images in `folder`, until the block is left or this process ends."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed (Debian package docker-registry)")
    folder.mkdir(exist_ok=True)
    (folder / "htpasswd").write_text(_HTPASSWD)
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "images")}},
        "http": {"addr": host, "secret": "test"},
    }
    if protected:
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    # JSON is YAML.
    (folder / "config.yml").write_text(json.dumps(config))
    command = ["setpriv", "--pdeathsig", "KILL", "--", PROGRAM, "serve", str(folder / "config.yml")]
    log = folder / "log"
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            yield Registry(_wait_for_host(process, log), protected)
        finally:
            process.kill()
            process.wait(timeout=20)


def unpack_archive(archive: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the descriptor of the manifest in an OCI archive, and all blobs by digest."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        blobs = {
            f"sha256:{Path(member.name).name}": _content(tar, member)
            for member in tar.getmembers()
            if member.name.startswith("blobs/")
        }
        [entry] = json.loads(_content(tar, tar.getmember("index.json")))["manifests"]
    return entry, blobs


def _wait_for_host(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if found := _LISTENING.search(log.read_bytes()):
            return found[1].decode()
        if process.poll() is not None:
            break
        time.sleep(0.02)
    pytest.fail(f"the registry does not start: {log.read_text(errors='replace')}")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file: IO[bytes] | None = tar.extractfile(member)
    assert file is not None
    return file.read()
