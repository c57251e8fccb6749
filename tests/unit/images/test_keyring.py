"""Which credentials fit which image."""

import logging
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.images.credentials import Credentials, Keyring, registry_key, registry_matches


def login(name: str) -> Credentials:
    return Credentials(name, f"password of {name}")


@pytest.mark.parametrize(
    ("pattern", "repository", "fits"),
    [
        ("registry.example.com", "registry.example.com/team/app", True),
        ("registry.example.com", "example.com/app", False),
        ("*.example.com", "registry.example.com/app", True),
        ("*.example.com", "example.com/app", False),
        ("*.com", "registry.example.com/app", False),
        ("*.*.com", "registry.example.com/app", True),
        ("registry.*.com", "registry.example.com/app", True),
        ("registry.example.*", "registry.example.com/app", True),
        ("reg*.example.com", "registry.example.com/app", True),
        ("*istry.example.com", "registry.example.com/app", True),
        ("r?gistry.example.com", "registry.example.com/app", False),  # a query begins at the ?
        ("app*.example.com", "registry.example.com/app", False),
        ("registry.example.com:5000", "registry.example.com:5000/app", True),
        ("registry.example.com:5000", "registry.example.com/app", False),
        ("registry.example.com", "registry.example.com:5000/app", False),
        ("registry.example.com:5000", "registry.example.com:80/app", False),
        ("*.example.com:5000", "registry.example.com:5000/app", True),
        ("registry.example.com:*", "registry.example.com:5000/app", False),
        ("registry.example.com/team", "registry.example.com/team/app", True),
        ("registry.example.com/team", "registry.example.com/teams/app", True),
        ("registry.example.com/team/", "registry.example.com/teams/app", False),
        ("registry.example.com/team/app", "registry.example.com/team", False),
        ("registry.example.com/*", "registry.example.com/team", False),
        ("*.example.com/team", "registry.example.com/team/app", True),
        ("*", "localhost/app", True),
        ("*", "docker.io/library/busybox", False),
        ("127.0.0.1:5000", "127.0.0.1:5000/app", True),
        ("[::1]:5000", "[::1]:5000/app", True),
        ("[::1]", "[::1]/app", True),
        ("[::2]", "[::1]/app", False),
        ("REGISTRY.example.com", "registry.example.com/app", False),
        ("bad host", "registry.example.com/app", False),
        ("", "registry.example.com/app", False),
    ],
)
def test_registry_matches_pattern_and_repository(pattern: str, repository: str, fits: bool) -> None:
    assert registry_matches(pattern, repository) is fits


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("registry.example.com", "registry.example.com"),
        ("https://registry.example.com", "registry.example.com"),
        ("http://registry.example.com:5000/", "registry.example.com:5000"),
        ("https://index.docker.io/v1/", "index.docker.io"),
        ("https://registry.example.com/v2/team", "registry.example.com/team"),
        ("registry.example.com/v1/", "registry.example.com"),
        ("registry.example.com/v1", "registry.example.com/v1"),
        ("registry.example.com/v3/x", "registry.example.com/v3/x"),
        ("registry.example.com/team?x=1#y", "registry.example.com/team"),
        ("user:password@registry.example.com", "registry.example.com"),
        ("registry.example.com:port", None),
        ("registry example.com", None),
        ("a:1:2", None),
        ("%41.example.com", None),
    ],
)
def test_registry_key_normalizes_registry(written: str, key: str | None) -> None:
    assert registry_key(written) == key


def test_keyring_lookup_returns_most_specific_first() -> None:
    written = ["example.com", "example.com/team", "example.com/team/app", "*.com", "other.com"]
    for order in permutations(written):
        keyring = Keyring({name: login(name) for name in order})
        found = [credentials.username for credentials in keyring.lookup("example.com/team/app")]
        assert found == ["example.com/team/app", "example.com/team", "example.com", "*.com"]


def test_keyring_lookup_equal_keys_keeps_source_order() -> None:
    keyring = Keyring({"https://example.com": login("first")}, {"example.com": login("second")})
    keyring.add({"http://example.com/v2/": login("third")})
    assert [found.username for found in keyring.lookup("example.com/x")] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("kept_for", "repository", "found"),
    [
        ("https://index.docker.io/v1/", "docker.io/library/busybox", True),
        ("index.docker.io", "docker.io/team/app", True),
        ("docker.io", "docker.io/team/app", True),
        ("https://index.docker.io/v1/", "quay.io/team/app", False),
        # The logins of Docker's registry are nobody else's business.
        ("https://index.docker.io/v1/", "localhost/app", False),
        ("https://index.docker.io/v1/", "docker.io.evil.example/app", False),
    ],
)
def test_keyring_lookup_docker_hub_aliases_match_only_docker_io(
    kept_for: str, repository: str, found: bool
) -> None:
    assert bool(Keyring({kept_for: login("hub")}).lookup(repository)) is found


def test_keyring_lookup_docker_hub_alias_used_only_as_fallback() -> None:
    keyring = Keyring({"index.docker.io": login("hub"), "docker.io/team": login("team")})
    assert keyring.lookup("docker.io/team/app") == [login("team")]
    assert keyring.lookup("docker.io/other/app") == [login("hub")]


def test_keyring_invalid_registry_is_skipped_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pykubelet"), "propagate", True)
    with caplog.at_level(logging.ERROR):
        keyring = Keyring({"user:password@no registry": login("a"), "example.com": login("b")})
    assert keyring.lookup("example.com/x") == [login("b")]
    assert "no registry" in str([record.__dict__ for record in caplog.records])
    assert "password" not in str([record.__dict__ for record in caplog.records])


hosts = st.lists(st.sampled_from(["a", "bb", "registry", "io"]), min_size=1, max_size=4)
ports = st.sampled_from(["", ":80", ":5000"])
paths = st.lists(st.sampled_from(["team", "app", "x"]), min_size=1, max_size=3)


@given(host=hosts, port=ports, path=paths, stars=st.sets(st.integers(0, 3)), keep=st.integers(0, 3))
def test_registry_matches_pattern_derived_from_repository(
    host: list[str], port: str, path: list[str], stars: set[int], keep: int
) -> None:
    repository = f"{'.'.join(host)}{port}/{'/'.join(path)}"
    pattern = ".".join("*" if index in stars else part for index, part in enumerate(host)) + port
    for part in path[:keep]:
        pattern += f"/{part}"
    assert registry_matches(pattern, repository)
    assert not registry_matches(f"more.{pattern}", repository)
    assert not registry_matches(pattern, f"more.{repository}")
    assert not registry_matches(pattern, repository.replace(f"{port}/", ":1234/", 1))


@given(st.text(max_size=40), st.text(max_size=40))
def test_registry_matches_any_text_never_raises(pattern: str, repository: str) -> None:
    registry_matches(pattern, repository)
    Keyring({pattern: login("a")}).lookup(repository)


def test_credentials_repr_hides_secrets() -> None:
    credentials = Credentials("user", "hunter2", "token3")
    for text in (repr(credentials), str(credentials), f"{[credentials]}"):
        assert "hunter2" not in text
        assert "token3" not in text
        assert "user" not in text


def test_credentials_for_runtime_returns_auth_config() -> None:
    auth = Credentials("user", "hunter2").for_runtime()
    assert (auth.username, auth.password, auth.identity_token, auth.server_address) == (
        "user",
        "hunter2",
        "",
        "",
    )
