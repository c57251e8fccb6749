"""The names of images, against a table of what the reference makes of them."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.images.image_reference import InvalidImageName, parse_image_name

TABLE: list[list[str]] = json.loads(
    (Path(__file__).parents[2] / "data/images/names.json").read_text(encoding="utf-8")
)
"""Name, repository, tag, digest, complaint: as the reference v1.36 parses them."""


@pytest.mark.parametrize(("name", "repository", "tag", "digest", "complaint"), TABLE)
def test_parse_image_name_matches_upstream_table(
    name: str, repository: str, tag: str, digest: str, complaint: str
) -> None:
    if complaint:
        with pytest.raises(InvalidImageName) as caught:
            parse_image_name(name)
        assert str(caught.value) == complaint
    else:
        found = parse_image_name(name)
        assert (found.original, found.repository, found.tag, found.digest) == (name, repository, tag, digest)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("busybox", "busybox:latest"),
        ("team/app", "team/app:latest"),
        ("busybox:1.36", "busybox:1.36"),
        ("busybox:latest", "busybox:latest"),
        ("localhost:5000/app", "localhost:5000/app:latest"),
        ("127.0.0.1:5000/latest", "127.0.0.1:5000/latest:latest"),
        (f"busybox@sha256:{'a' * 64}", f"busybox@sha256:{'a' * 64}"),
        (f"busybox:1@sha256:{'a' * 64}", f"busybox:1@sha256:{'a' * 64}"),
    ],
)
def test_image_name_for_runtime_has_tag_or_digest(name: str, asked: str) -> None:
    assert parse_image_name(name).for_runtime == asked


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("busybox", "docker.io"),
        ("index.docker.io/a/b", "docker.io"),
        ("localhost/app", "localhost"),
        ("[::1]:5000/app", "[::1]:5000"),
        ("registry.example.com:5000/team/app:1", "registry.example.com:5000"),
    ],
)
def test_image_name_registry_returns_host(name: str, registry: str) -> None:
    assert parse_image_name(name).registry == registry


parts = st.from_regex(r"[a-z0-9]{1,9}([._-][a-z0-9]{1,9})?", fullmatch=True)
hosts = st.sampled_from(["", "docker.io/", "localhost/", "reg.example.com/", "reg:5000/", "[::1]:80/", "UP/"])
tags = st.from_regex(r"\w[\w.-]{0,20}", fullmatch=True).filter(str.isascii)
digests = st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)


@given(
    host=hosts,
    path=st.lists(parts, min_size=1, max_size=4),
    tag=st.none() | tags,
    digest=st.none() | digests,
)
def test_parse_image_name_any_valid_name_round_trips(
    host: str, path: list[str], tag: str | None, digest: str | None
) -> None:
    name = host + "/".join(path)
    text = name + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    if len(path) == 1 and not host and len(text) == 64:
        return  # it may look like an image id
    found = parse_image_name(text)
    assert found.tag == (tag or ("" if digest else "latest"))
    assert found.digest == (digest or "")
    assert found.repository.endswith(name.removeprefix("docker.io/"))
    # What is asked of the runtime has a tag or digest, and means the same image.
    again = parse_image_name(found.for_runtime)
    assert (again.repository, again.tag, again.digest) == (found.repository, found.tag, found.digest)
    assert again.for_runtime == found.for_runtime
    # A repository is its own repository.
    assert parse_image_name(found.repository).repository == found.repository


@given(st.text(max_size=200) | st.text("aB/:@.-_0[]", max_size=60))
def test_parse_image_name_any_text_raises_only_invalid_image_name(text: str) -> None:
    with contextlib.suppress(InvalidImageName):
        found = parse_image_name(text)
        assert found.repository
        assert found.tag or found.digest


@pytest.mark.parametrize("text", ["a" * 10**6, "a-" * 10**6, "A/" * 10**6, "a.b/" * 10**6 + "!"])
def test_parse_image_name_huge_name_raises_short_error(text: str) -> None:
    with pytest.raises(InvalidImageName) as caught:
        parse_image_name(text)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("busybox", {"busybox:latest", "docker.io/library/busybox:latest"}),
        ("example.org/app:1", {"example.org/app:1"}),
        (f"app@sha256:{'a' * 64}", {f"app@sha256:{'a' * 64}", f"docker.io/library/app@sha256:{'a' * 64}"}),
        (
            f"example.org/app:1@sha256:{'a' * 64}",
            {
                f"example.org/app:1@sha256:{'a' * 64}",
                "example.org/app:1",
                f"example.org/app@sha256:{'a' * 64}",
            },
        ),
    ],
)
def test_listed_names_short_and_full_names_are_spelled_out(name: str, listed: set[str]) -> None:
    assert parse_image_name(name).listed_names == listed
