import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.probes.network_probes import parse_url, request_target, write_request
from pykubelet.probes.types import OUTPUT_LIMIT
from pykubelet.transport.http1 import HEAD_LIMIT, HttpProtocolError, ResponseReader


def read(data: bytes, *cuts: int, ended: bool = True) -> ResponseReader:
    reader = ResponseReader(OUTPUT_LIMIT)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        reader.feed(data[begin:end])
        if reader.done:
            return reader
    if ended:
        reader.end()
    return reader


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nServer: x\r\n"


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (HEAD + b"Content-Length: 5\r\n\r\nhello and more", 200, b"hello"),
        (HEAD + b"Content-Length: 0\r\n\r\n", 200, b""),
        (HEAD + b"\r\nuntil the end", 200, b"until the end"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"abc", b"de"), 200, b"abcde"),
        (b"HTTP/1.0 503 Service Unavailable\nServer: y\n\nno carriage", 503, b"no carriage"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304\r\n\r\n", 304, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n" + HEAD + b"\r\nx", 200, b"x"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\nwhatever", 101, b""),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_response_reader_any_chunking_reads_same_response(
    data: bytes, status: int, body: bytes, cuts: list[int]
) -> None:
    reader = read(data, *cuts)
    assert (reader.status, bytes(reader.body), reader.done) == (status, body, True)


@pytest.mark.parametrize(
    ("data", "reusable"),
    [
        (HEAD + b"Content-Length: 5\r\n\r\nhello", True),
        (HEAD + b"Content-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"abc"), True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n", True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", False),
        (HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n", False),
        (HEAD + b"Content-Length: 5\r\n\r\nhello and more", False),
        (HEAD + b"\r\nuntil the end", False),
        (HEAD + b"Content-Length: 20000\r\n\r\n" + b"x" * 20000, False),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", False),
    ],
)
def test_response_reader_reusable_only_after_complete_response(data: bytes, reusable: bool) -> None:
    assert read(data).reusable is reusable


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "EOF"),
        (b"SSH-2.0-OpenSSH_9\r\n", "malformed HTTP response"),
        (b"HTTP/1.1 200 OK\r\nServer", "malformed HTTP response"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "malformed HTTP response"),
        (b"HTTP/2 200\r\n\r\n", "malformed HTTP response"),
        (b"HTTP/1.1 200 OK\r\nnocolon\r\n\r\n", "malformed MIME header"),
        (HEAD + b"Content-Length: 10\r\n\r\nshort", "unexpected EOF"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "bad Content-Length"),
        (HEAD + b"Content-Length: 1e3\r\n\r\n", "bad Content-Length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "invalid byte in chunk length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", "unexpected EOF"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, "line too long"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 6, "too many 1xx"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"a" * (HEAD_LIMIT + 1), "malformed HTTP response"),
    ],
)
def test_response_reader_malformed_response_raises_protocol_error(data: bytes, words: str) -> None:
    with pytest.raises(HttpProtocolError, match=words):
        read(data)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_response_reader_any_bytes_raise_only_protocol_error(data: bytes, cuts: list[int]) -> None:
    for start in (b"", HEAD, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"):
        try:
            reader = read(start + data, *cuts)
        except HttpProtocolError:
            continue
        assert reader.done
        assert 100 < reader.status < 1000


@pytest.mark.parametrize("framing", ["until the end", "sized", "chunked"])
def test_response_reader_large_body_is_truncated(framing: str) -> None:
    body = b"x" * (OUTPUT_LIMIT * 3)
    data = {
        "until the end": HEAD + b"\r\n" + body,
        "sized": HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body[:9000], body[:9000]),
    }[framing]
    reader = read(data, 4000, 12000, ended=False)
    assert reader.done
    assert bytes(reader.body) == body[:OUTPUT_LIMIT]


def lines(*headers: tuple[str, str]) -> list[str]:
    text = write_request("/x", "10.0.0.1:80", headers, "kube-probe/1.36").decode()
    first, *rest = text.removesuffix("\r\n\r\n").split("\r\n")
    assert first == "GET /x HTTP/1.1"
    return rest


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], ["Host: 10.0.0.1:80", "User-Agent: kube-probe/1.36", "Accept: */*", "Connection: close"]),
        (
            [("host", "example.com"), ("X-Two", "1"), ("x-two", "2")],
            ["Host: example.com", "X-Two: 1", "X-Two: 2", "User-Agent: kube-probe/1.36", "Accept: */*"],
        ),
        ([("User-Agent", "me"), ("Accept", "text/plain")], ["User-Agent: me", "Accept: text/plain"]),
        ([("User-Agent", ""), ("Accept", "")], ["Host: 10.0.0.1:80", "Connection: close"]),
    ],
)
def test_write_request_custom_headers_replace_defaults(
    headers: list[tuple[str, str]], expected: list[str]
) -> None:
    found = lines(*headers)
    assert found[0].startswith("Host: ")
    assert [line for line in found if line in expected] == expected
    names = [line.partition(":")[0] for line in found]
    for name in ("Host", "User-Agent", "Accept"):
        given_empty = any(given.title() == name and not value for given, value in headers)
        assert names.count(name) == (0 if given_empty else 1)


@pytest.mark.parametrize("headers", [("A\r\nB", "c"), ("A", "b\r\nEvil: 1"), ("A b", "c"), ("", "x")])
def test_write_request_header_injection_raises_protocol_error(headers: tuple[str, str]) -> None:
    with pytest.raises(HttpProtocolError, match="invalid header field"):
        lines(headers)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "/"),
        ("/healthz", "/healthz"),
        ("healthz", "/healthz"),
        ("/a b?q=1&r=ü", "/a%20b?q=1&r=%C3%BC"),
        ("/already%20there", "/already%20there"),
        ("/not%zz?x", "/not%25zz%3Fx"),
        ("/line\r\nbreak", "/line%0D%0Abreak"),
        ("//elsewhere/x", "/x"),
        ("/x#fragment", "/x"),
        ("http://[broken/x", "/http%3A//%5Bbroken/x"),
    ],
)
def test_request_target_escapes_path(path: str, expected: str) -> None:
    assert request_target(path) == expected


@given(st.text())
def test_request_target_any_text_has_no_whitespace(path: str) -> None:
    found = request_target(path)
    assert found.startswith("/")
    assert found.isascii()
    assert not any(character.isspace() or ord(character) < 33 for character in found)


def test_parse_url_adds_default_port_and_rejects_invalid() -> None:
    assert str(parse_url("https://[::1]/a?b=c")) == "https://[::1]:443/a?b=c"
    assert str(parse_url("http://host:81")) == "http://host:81/"
    for bad in ("ftp://host/", "/relative", "http://host:99999/", "http:///x"):
        with pytest.raises(ValueError):
            parse_url(bad)
