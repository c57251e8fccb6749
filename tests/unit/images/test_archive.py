"""Image archives from untrusted sources: what is accepted, and one line for everything else."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from pykubelet.images.archive import (
    MAX_DOCUMENT_BYTES,
    MAX_MEMBERS,
    ArchiveError,
    Gunzip,
    check_archive,
    open_payload,
)
from pykubelet.images.tar_reader import TarError, TarReader
from tests.support.image_registry import layered_archive, write_archive

MIB = 1024 * 1024
NAME = "example.com/app:1"
ARCHIVE = layered_archive(NAME, [b"first", b"second" * 1000])


def check(data: bytes, limit: int = 100 * MIB, **options: Any) -> tuple[str, ...]:
    return check_archive(io.BytesIO(data), limit, **options).names


def rejection(data: bytes, limit: int = 100 * MIB) -> str:
    with pytest.raises(ArchiveError) as caught:
        check(data, limit)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def tar(*members: tuple[str, bytes], **links: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def image_with_layer(layer: bytes, size: int | None = None) -> bytes:
    config = b"{}"
    manifest = {
        "config": {"digest": sha256(config), "size": len(config)},
        "layers": [{"digest": sha256(layer), "size": len(layer) if size is None else size}],
    }
    return write_archive(NAME, json.dumps(manifest).encode(), [config, layer])


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lambda data: gzip.compress(data) + gzip.compress(b"")]
)
def test_check_archive_oci_has_names_and_digest(pack: Callable[[bytes], bytes]) -> None:
    data = pack(ARCHIVE)
    file = io.BytesIO(data)
    contents = check_archive(file, 100 * MIB)
    assert (contents.names, contents.digest) == ((NAME,), sha256(data))
    payload = open_payload(file, contents, 100 * MIB)
    assert b"".join(iter(lambda: payload.read(1000), b"")) == ARCHIVE


def test_check_archive_docker_names_are_complete() -> None:
    entry = {"Config": "c.json", "RepoTags": ["busybox:1", "x.io/y:2"], "Layers": ["./a/layer.tar"]}
    files = [("c.json", b"{}"), ("manifest.json", json.dumps([entry]).encode())]
    data = tar(*files, **{"a/layer.tar": "../b/layer.tar"})
    assert check(data) == ("docker.io/library/busybox:1", "x.io/y:2")
    assert "'./a/layer.tar' of an image is missing" in rejection(tar(*files))


def test_check_archive_only_a_tag_needs_a_name() -> None:
    assert "only the tag '1': give its name with --name" in rejection(layered_archive("1", [b""]))
    assert check(layered_archive("1", [b""]), base_name="example.com/x") == ("example.com/x:1",)


def test_check_archive_damaged_or_incomplete_is_named() -> None:
    assert rejection(ARCHIVE[: ARCHIVE.index(b"second") + 100]).startswith("ends in the middle of a file")
    assert rejection(gzip.compress(ARCHIVE)[:-20]).startswith("ends too early")
    assert "does not match its digest" in rejection(ARCHIVE.replace(b"second", b"altered", 1)[: len(ARCHIVE)])
    assert rejection(b"").startswith("is not an image archive")
    assert rejection(b"x" * 5000) == "is not a tar archive, or is damaged"
    assert rejection(tar(("file", b"text"))).startswith("is not an image archive: it has neither")
    assert rejection(b"\x28\xb5\x2f\xfd....").endswith("decompress it with zstd -d")
    assert "instead of 7" in rejection(image_with_layer(b"layer", 7))
    missing = write_archive(
        NAME, json.dumps({"config": {"digest": sha256(b"x"), "size": 1}, "layers": []}).encode(), []
    )
    assert rejection(missing).startswith("is incomplete: 'sha256:")


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "/etc/passwd", "a/../../b"])
def test_check_archive_path_outside_is_rejected(name: str) -> None:
    assert "which leads out of it" in rejection(tar((name, b"* * * * * root sh")))
    assert "which leads out of it" in rejection(tar(**{"a/link": name.replace("a/", "../")}))


def test_check_archive_bomb_layer_is_rejected_by_what_is_free() -> None:
    bomb = gzip.compress(bytes(8 * MIB))
    assert check(image_with_layer(bomb)) == (NAME,)
    assert "expand to more than the 4.0 MiB that are free" in rejection(image_with_layer(bomb), 4 * MIB)
    assert "needs more than the 4.0 MiB" in rejection(
        gzip.compress(image_with_layer(bytes(8 * MIB))), 4 * MIB
    )


def test_check_archive_huge_documents_are_rejected_in_bounded_memory() -> None:
    many = [{"digest": sha256(b""), "size": 0}] * 30_000
    manifest = json.dumps({"config": many[0], "layers": many}).encode()
    index = b'{"manifests": [' + b" " * MAX_DOCUMENT_BYTES + b"]}"
    archive = write_archive(NAME, manifest, [b""])
    tracemalloc.start()
    try:
        assert "has a manifest of more than 1.0 MiB" in rejection(archive)
        assert "has a index.json of 1.0 MiB" in rejection(tar(("index.json", index)))
        assert tracemalloc.get_traced_memory()[1] < 24 * MIB
    finally:
        tracemalloc.stop()


def test_check_archive_too_many_members_are_rejected() -> None:
    member = tar(("m", b""))[:512]
    assert f"more than {MAX_MEMBERS} members" in rejection(member * (MAX_MEMBERS + 1))


@pytest.mark.parametrize(
    "index",
    [b"{", b"[" * 100_000, b'{"manifests": 1}', b'{"manifests": [{"digest": "../../x", "size": 1}]}'],
)
def test_check_archive_invalid_index_is_rejected(index: bytes) -> None:
    assert rejection(tar(("index.json", index)))


def test_check_archive_index_in_index_is_not_followed() -> None:
    kind = "application/vnd.oci.image.index.v1+json"
    inner = json.dumps({"manifests": []}).encode()
    outer = json.dumps(
        {"manifests": [{"digest": sha256(inner), "size": len(inner), "mediaType": kind}]}
    ).encode()
    entry = {"digest": sha256(outer), "size": len(outer), "mediaType": kind}
    blobs = [(f"blobs/{sha256(data).replace(':', '/')}", data) for data in (inner, outer)]
    text = rejection(tar(("index.json", json.dumps({"manifests": [entry]}).encode()), *blobs))
    assert text.startswith("has an index in an index")


def test_check_archive_special_file_is_rejected() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("device")
        info.type = tarfile.CHRTYPE
        archive.addfile(info)
    assert "special file" in rejection(buffer.getvalue())


def test_check_archive_cancelled_ends_soon() -> None:
    def cancel() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(ARCHIVE, check_cancelled=cancel)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tar_reader_reads_what_tarfile_writes(form: int) -> None:
    names = ["a", "d/" + "x" * 90, "é" * 20] + ([] if form == tarfile.USTAR_FORMAT else ["y" * 300])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 600 * number, 0.5
            archive.addfile(info, io.BytesIO(b"z" * info.size))
    buffer.seek(0)
    found = [(member.name, len(b"".join(member.chunks()))) for member in TarReader(buffer)]
    assert found == [(name, 600 * number) for number, name in enumerate(names)]


def test_tar_reader_huge_extended_header_is_rejected() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("y" * 100_000))
    buffer.seek(0)
    with pytest.raises(TarError, match="extended header of"):
        list(TarReader(buffer))


def test_gunzip_damaged_data_is_a_tar_error() -> None:
    with pytest.raises(TarError, match="damaged gzip data"):
        Gunzip(io.BytesIO(b"\x1f\x8b\x08" + b"\xff" * 100), MIB).read(100)
