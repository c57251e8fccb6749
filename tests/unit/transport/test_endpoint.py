from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.transport.endpoint import MAX_PATH_BYTES, Endpoint
from pykubelet.transport.errors import EndpointError


@pytest.mark.parametrize(
    ("text", "path", "deprecated"),
    [
        ("unix:///run/containerd/containerd.sock", "/run/containerd/containerd.sock", False),
        ("unix:/run/crio/crio.sock", "/run/crio/crio.sock", False),
        ("UNIX:///run/x.sock", "/run/x.sock", False),
        ("unix:///run/with%20space.sock", "/run/with space.sock", False),
        ("/run/containerd/containerd.sock", "/run/containerd/containerd.sock", True),
        ("/run/with%20percent.sock", "/run/with%20percent.sock", True),
        ("unix:///" + "x" * (MAX_PATH_BYTES - 1), "/" + "x" * (MAX_PATH_BYTES - 1), False),
    ],
)
def test_endpoint_parse_valid_text_returns_path(text: str, path: str, deprecated: bool) -> None:
    assert Endpoint.parse(text) == Endpoint(path, deprecated)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no container runtime endpoint is given"),
        ("unix:", "not an absolute path"),
        ("unix://", "not an absolute path"),
        ("unix:///", "names no socket"),
        ("/", "names no socket"),
        ("unix:run/x.sock", "not an absolute path"),
        ("unix://run/x.sock", "three slashes"),
        ("run/x.sock", "neither a URL nor an absolute path"),
        ("x.sock", "neither a URL nor an absolute path"),
        ("a b c", "neither a URL nor an absolute path"),
        ("tcp://localhost:15880", "only unix sockets"),
        ("npipe://./pipe/mypipe", "'npipe' is not supported"),
        ("https://example.com/", "'https' is not supported"),
        ("htta://free-test.com", "'htta' is not supported"),
        ("unix:///run/x.sock?a=b", "after the path"),
        ("unix:///run/x.sock#a", "after the path"),
        ("unix:///a%00b", "zero byte"),
        ("unix:///a\nb", "control character"),
        ("/a\ud800b", "not valid text"),
        ("unix://[::1", "not a URL"),
        ("unix:///" + "x" * MAX_PATH_BYTES, "has 108"),
        ("/" + "ü" * 60, "at most 107 bytes"),
    ],
)
def test_endpoint_parse_invalid_text_raises_error_with_remedy(text: str, why: str) -> None:
    with pytest.raises(EndpointError) as caught:
        Endpoint.parse(text)
    assert why in str(caught.value)
    assert ";" in str(caught.value), "a remedy is given"
    assert "\n" not in str(caught.value)


@given(st.text(st.characters(exclude_categories=[])) | st.text("unix:/.@%0aü\0\n\udc80\ud800[?#"))
def test_endpoint_parse_any_text_valid_path_or_endpoint_error(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except EndpointError:
        return
    assert endpoint.path.startswith("/")
    assert len(os.fsencode(endpoint.path)) <= MAX_PATH_BYTES


@given(st.binary(max_size=100))
def test_endpoint_str_parse_roundtrip(name: bytes) -> None:
    path = "/x" + os.fsdecode(name.replace(b"\0", b""))
    assert Endpoint.parse(path) == Endpoint(path, deprecated=True)
    assert Endpoint.parse(str(Endpoint(path))) == Endpoint(path)
