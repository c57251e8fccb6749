"""The files and secrets that hold credentials."""

import base64
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.images.credentials import (
    BadCredentials,
    Credentials,
    NodeCredentials,
    PullSecret,
    read_config_json,
    read_dockercfg,
    secrets_keyring,
)

SECRET = "hunter2"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def config_json(**auths: Any) -> bytes:
    return json.dumps({"auths": auths, "HttpHeaders": {"User-Agent": "x"}, "credsStore": "y"}).encode()


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"auth": encoded("user:hunter2")}, Credentials("user", SECRET)),
        ({"auth": encoded("user:hunter2").rstrip("=")}, Credentials("user", SECRET)),
        ({"auth": encoded("user:a:b:c")}, Credentials("user", "a:b:c")),
        ({"auth": encoded("user:")}, Credentials("user", "")),
        (
            {"auth": encoded("user:hunter2")[:8] + "\n" + encoded("user:hunter2")[8:]},
            Credentials("user", SECRET),
        ),
        ({"username": "user", "password": SECRET, "email": "a@b"}, Credentials("user", SECRET)),
        (
            {"username": "other", "password": "x", "auth": encoded("user:hunter2")},
            Credentials("user", SECRET),
        ),
        ({"Username": "user", "PASSWORD": SECRET}, Credentials("user", SECRET)),
        ({"auth": encoded("x:"), "identitytoken": SECRET}, Credentials(identity_token=SECRET)),
        ({"auth": "", "username": "user", "password": SECRET}, Credentials("user", SECRET)),
        ({"username": None}, Credentials()),
        ({}, Credentials()),
        (None, Credentials()),
    ],
)
def test_read_config_json_entry_returns_credentials(entry: Any, expected: Credentials) -> None:
    assert read_config_json(config_json(host=entry)) == {"host": expected}
    assert read_dockercfg(json.dumps({"host": entry}).encode()) == {"host": expected}


@pytest.mark.parametrize(
    "entry",
    [
        {"auth": "hunter2!"},
        {"auth": encoded("hunter2")},
        {"auth": "aHVud"},
        {"auth": base64.b64encode(b"user:\xff\xfe").decode()},
        {"auth": 7},
        {"username": ["hunter2"]},
        {"password": {"hunter2": 1}},
        "hunter2",
        ["hunter2"],
    ],
)
def test_read_config_json_bad_entry_error_hides_secret(entry: Any) -> None:
    for read, content in (
        (read_config_json, config_json(host=entry)),
        (read_dockercfg, json.dumps({"host": entry}).encode()),
    ):
        with pytest.raises(BadCredentials, match="host") as caught:
            read(content)
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None


def test_read_dockercfg_login_in_registry_name_is_hidden() -> None:
    with pytest.raises(BadCredentials, match=r"'example\.com'") as caught:
        read_dockercfg(b'{"https://user:hunter2@example.com": {"auth": "x"}}')
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hunter2", b"[1]", b'"hunter2"', b"\xff", b"[" * 10**5])
def test_read_config_json_malformed_file_raises(content: bytes) -> None:
    for read in (read_config_json, read_dockercfg):
        with pytest.raises(BadCredentials) as caught:
            read(content)
        assert SECRET not in str(caught.value)


def test_read_config_json_without_auths_returns_empty() -> None:
    assert read_config_json(b'{"credHelpers": {"gcr.io": "gcloud"}}') == {}
    assert read_config_json(b'{"auths": null}') == {}
    assert read_dockercfg(b"null") == {}


@given(st.dictionaries(st.text(), st.tuples(st.text().filter(lambda name: ":" not in name), st.text())))
def test_read_config_json_docker_login_entries_round_trip(logins: dict[str, tuple[str, str]]) -> None:
    entries = {host: {"auth": encoded(f"{user}:{word}")} for host, (user, word) in logins.items()}
    entries = {host: entry for host, entry in entries.items() if logins[host] != ("", "")}
    assert read_config_json(config_json(**entries)) == {host: Credentials(*logins[host]) for host in entries}


@given(st.binary(max_size=100))
def test_read_config_json_any_bytes_raises_only_bad_credentials(content: bytes) -> None:
    for read in (read_config_json, read_dockercfg):
        with contextlib.suppress(BadCredentials):
            read(content)


def secret(name: str, kind: str, key: str, content: bytes) -> PullSecret:
    return PullSecret("default", name, kind, {key: content})


def test_secrets_keyring_both_secret_types_in_order() -> None:
    new = secret(
        "new", "kubernetes.io/dockerconfigjson", ".dockerconfigjson", config_json(a={"username": "new"})
    )
    old = secret("old", "kubernetes.io/dockercfg", ".dockercfg", b'{"a": {"username": "old"}}')
    assert secrets_keyring([new, old]).lookup("a/x") == [Credentials("new"), Credentials("old")]
    assert secrets_keyring([old, new]).lookup("a/x") == [Credentials("old"), Credentials("new")]
    assert secrets_keyring([]).lookup("a/x") == []


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("Opaque", ".dockerconfigjson"),
        ("kubernetes.io/dockercfg", ".dockerconfigjson"),
        ("kubernetes.io/dockerconfigjson", "config.json"),
    ],
)
def test_secrets_keyring_other_type_or_key_is_ignored(kind: str, key: str) -> None:
    assert secrets_keyring([secret("x", kind, key, config_json(a={"username": "u"}))]).lookup("a/x") == []
    assert secrets_keyring([secret("x", kind, key, b"")]).lookup("a/x") == []


def test_secrets_keyring_malformed_secret_error_names_it() -> None:
    bad = secret("mine", "kubernetes.io/dockerconfigjson", ".dockerconfigjson", b"hunter2")
    with pytest.raises(BadCredentials, match=r"^pull secret default/mine: it is not JSON") as caught:
        secrets_keyring([bad])
    assert SECRET not in str(caught.value) + repr(bad)


@pytest.fixture
def node(tmp_path: Path) -> NodeCredentials:
    for name in ("root", "work", "home/.docker"):
        (tmp_path / name).mkdir(parents=True)
    return NodeCredentials(tmp_path / "root", tmp_path / "work", tmp_path / "home")


def test_node_credentials_first_file_wins(node: NodeCredentials, tmp_path: Path) -> None:
    places = [str(path) for path, _ in node.files()]
    assert [place.removeprefix(str(tmp_path)) for place in places] == [
        "/root/config.json",
        "/work/config.json",
        "/home/.docker/config.json",
        "/.docker/config.json",
        "/root/.dockercfg",
        "/work/.dockercfg",
        "/home/.dockercfg",
        "/.dockercfg",
    ]
    ours = [(path, read) for path, read in node.files() if path.is_relative_to(tmp_path)]
    for path, read in reversed(ours):
        entry = {"host": {"username": str(path)}}
        path.write_text(json.dumps({"auths": entry} if read is read_config_json else entry))
        assert node.read() == {"host": Credentials(str(path))}


def test_node_credentials_unusable_file_is_skipped(node: NodeCredentials, tmp_path: Path) -> None:
    (tmp_path / "root/config.json").write_text("{ hunter2")
    (tmp_path / "work/config.json").mkdir()
    (tmp_path / "home/.docker/config.json").write_bytes(config_json(host={"username": "home"}))
    assert node.read() == {"host": Credentials("home")}


async def test_node_credentials_changed_file_is_reloaded(node: NodeCredentials, tmp_path: Path) -> None:
    place = tmp_path / "root/config.json"
    for name in ("one", "two"):
        place.write_bytes(config_json(host={"username": name}))
        assert await node.load() == {"host": Credentials(name)}


def test_node_credentials_without_home_reads_root_directory(tmp_path: Path) -> None:
    node = NodeCredentials(tmp_path, tmp_path)
    assert Path("/.docker/config.json") in [path for path, _ in node.files()]
    assert not any(".docker/.docker" in str(path) for path, _ in node.files())
