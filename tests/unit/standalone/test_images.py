"""The image writer and the seed images: valid, complete, and the same bytes every time."""

import hashlib
import io
import json
import struct
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.standalone.instance import EmbeddedError
from pykubelet.standalone.seed_images import (
    Entry,
    ImageConfig,
    Platform,
    busybox_archive,
    image_archive,
    is_static,
    layer_tar,
    machine_platform,
    pause_archive,
    read_static,
)

AMD64 = Platform("amd64")


def files_of(archive: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


def follow(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """Give the blob that a descriptor names, after checking that it is what it says."""
    algorithm, _, digest = descriptor["digest"].partition(":")
    blob = files[f"blobs/{algorithm}/{digest}"]
    assert hashlib.sha256(blob).hexdigest() == digest
    assert len(blob) == descriptor["size"]
    return blob


def read_image(archive: bytes) -> tuple[dict[str, Any], dict[str, Any], tarfile.TarFile]:
    """Read an archive as a runtime does: the index entry, the configuration, the layer."""
    files = files_of(archive)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(follow(files, entry))
    config = json.loads(follow(files, manifest["config"]))
    (layer,) = manifest["layers"]
    blob = follow(files, layer)
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    assert len(files) == 5, "nothing that no document names"
    return entry, config, tarfile.open(fileobj=io.BytesIO(blob))


NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..")
)
TREES = st.recursive(
    st.binary(max_size=50) | st.builds(lambda target: ("link", target), NAMES),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
).filter(lambda tree: isinstance(tree, dict))


def entries_of(tree: Any, prefix: str = "") -> list[Entry]:
    found = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        match value:
            case bytes():
                found.append(Entry(path, data=value, mode=0o644))
            case (_, target):
                found.append(Entry(path, link=target))
            case _:
                found += [Entry(path), *entries_of(value, path + "/")]
    return found


@given(TREES)
def test_layer_tar_any_entries_read_back_identical(tree: Any) -> None:
    entries = entries_of(tree)
    with tarfile.open(fileobj=io.BytesIO(layer_tar(entries))) as tar:
        members = {member.name: member for member in tar}
        assert sorted(members) == sorted(entry.path for entry in entries)
        for entry in entries:
            member = members[entry.path]
            assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
            if entry.link is not None:
                assert member.issym()
                assert member.linkname == entry.link
            elif entry.data is None:
                assert member.isdir()
            else:
                file = tar.extractfile(member)
                assert file is not None
                assert file.read() == entry.data
                assert member.mode == 0o644
        names = [member.name for member in tar]
    for name in names:
        parent = name.rpartition("/")[0]
        assert not parent or names.index(parent) < names.index(name), "a directory comes before what is in it"


@given(TREES, st.randoms())
def test_image_archive_shuffled_entries_yields_same_bytes(tree: Any, random: Any) -> None:
    entries = entries_of(tree)
    shuffled = random.sample(entries, len(entries))
    config = ImageConfig(command=["x"], env={"A": "b"})
    assert image_archive("r/n:1", entries, config, AMD64) == image_archive("r/n:1", shuffled, config, AMD64)


def test_layer_tar_nested_path_adds_parent_directories() -> None:
    with tarfile.open(fileobj=io.BytesIO(layer_tar([Entry("a/b/c", data=b"")]))) as tar:
        assert [(member.name, member.isdir()) for member in tar] == [
            ("a", True),
            ("a/b", True),
            ("a/b/c", False),
        ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("/etc/passwd", data=b"")], "not a path inside an image"),
        ([Entry("../x")], "not a path inside"),
        ([Entry("a/../../x")], "not a path inside"),
        ([Entry("a//b")], "not a path inside"),
        ([Entry("")], "not a path inside"),
        ([Entry("a\0b")], "not a path inside"),
        ([Entry("a"), Entry("a", data=b"")], "'a' appears twice"),
        ([Entry("a", data=b""), Entry("a/b", data=b"")], "'a/b' lies below 'a', which is not a directory"),
        ([Entry("a", link="/etc"), Entry("a/b", data=b"")], "lies below"),
        ([Entry("a", link="b", data=b"")], "both a file and a link"),
    ],
)
def test_layer_tar_invalid_entries_raises_value_error(entries: list[Entry], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_tar(entries)


def test_pause_archive_has_expected_manifest_and_layer() -> None:
    entry, config, layer = read_image(pause_archive(b"program", Platform("arm64", "v8")))
    assert entry["annotations"] == {
        "io.containerd.image.name": "pykubelet.local/pause:1",
        "org.opencontainers.image.ref.name": "1",
    }
    assert entry["platform"] == {"architecture": "arm64", "os": "linux", "variant": "v8"}
    assert config["config"] == {"Entrypoint": ["/pause", "-P"], "User": "65535:65535"}
    assert [(member.name, member.mode) for member in layer] == [("pause", 0o755)]


def test_busybox_archive_has_expected_config_and_layer() -> None:
    archive = busybox_archive(b"program", ["sh", "ls", "busybox"], AMD64)
    _, config, layer = read_image(archive)
    members = {member.name: member for member in layer}
    assert config["config"] == {"Cmd": ["sh"], "Env": ["PATH=/bin"]}
    assert (config["os"], config["architecture"], config["created"]) == (
        "linux",
        "amd64",
        "1970-01-01T00:00:00Z",
    )
    assert members["bin/sh"].linkname == members["bin/ls"].linkname == "busybox"
    assert members["bin/busybox"].isfile()
    assert members["tmp"].mode == 0o1777
    assert {"etc/passwd", "etc/group", "proc", "sys", "dev", "root"} <= set(members)


def test_machine_platform_unknown_architecture_raises() -> None:
    assert machine_platform("aarch64") == Platform("arm64", "v8")
    with pytest.raises(EmbeddedError, match="no images for the processor 'vax'"):
        machine_platform("vax")


def elf(kinds: list[int], *, wide: bool = True, order: str = "<") -> bytes:
    """The headers of a program with segments of these kinds."""
    size = 56 if wide else 32
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2]) + bytes(10)
    word = "Q" if wide else "I"
    start = 64 if wide else 52
    header = struct.pack(
        f"{order}HHI{word}{word}{word}IHHHHHH", 2, 62, 1, 0, start, 0, 0, start, size, len(kinds), 0, 0, 0
    )
    return ident + header + b"".join(struct.pack(f"{order}I", kind).ljust(size, b"\0") for kind in kinds)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("order", ["<", ">"])
def test_is_static_elf_headers_static_and_dynamic_distinguished(wide: bool, order: str) -> None:
    assert is_static(elf([1, 1, 6], wide=wide, order=order))
    assert is_static(elf([1, 2], wide=wide, order=order)), "a position independent one without a loader"
    assert not is_static(elf([6, 3, 1], wide=wide, order=order))


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: b"\x7fELF" + rest))
def test_is_static_arbitrary_bytes_raises_only_value_error(content: bytes) -> None:
    with suppress(ValueError):
        is_static(content)


def test_read_static_unusable_binary_raises_with_remedy(tmp_path: Path) -> None:
    program = tmp_path / "busybox"
    program.write_bytes(elf([3]))
    with pytest.raises(
        EmbeddedError, match="busybox is not statically linked: install the Debian package busybox-static"
    ):
        read_static(program)
    program.write_text("#!/bin/sh")
    with pytest.raises(EmbeddedError, match="cannot be used for an image: it is not an ELF program"):
        read_static(program)
    with pytest.raises(EmbeddedError, match="No such file"):
        read_static(tmp_path / "missing")
