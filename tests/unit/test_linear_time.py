"""Hostile texts on the event loop: what parses text of pods, servers and logs takes linear time.

Each text is as large as its source allows, and had taken minutes with a backtracking regular expression.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from pykubelet.api.downward_api import expand, field_value
from pykubelet.api.volume import ObjectFieldSelector
from pykubelet.apiserver.certificates.x509 import certificates
from pykubelet.apiserver.errors import forbidden_hint
from pykubelet.logs.mask import MASK, mask_text
from pykubelet.objects.trust_bundles import normalized
from pykubelet.transport.http1 import HEAD_LIMIT, ResponseReader
from tests.support.containers import make_pod

SIZE = 1 << 20
SECONDS = 4.0
"""Of processor time; each of them takes a tenth of that."""


def field(path: str) -> str:
    return field_value(ObjectFieldSelector(field_path=path), make_pod())


def hint(message: str) -> str:
    return forbidden_hint(message, "get", "", "pods")


def times(text: str) -> str:
    return text * (SIZE // len(text))


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (field, "metadata.labels" + times("['")),
        (field, "metadata.labels" + times("['x']") + "x"),
        (hint, times('User "')),
        (hint, times('User "x" cannot ')),
        (lambda text: normalized([text]), times("-----BEGIN A-----\n")),
        (lambda text: normalized([text]), "-----BEGIN A-----" + times("\n")),
        (lambda text: certificates(text.encode()), "-----BEGIN CERTIFICATE-----" + times("\n")),
        (lambda text: certificates(text.encode()), times("-----BEGIN CERTIFICATE-----\n")),
        (mask_text, times("eyJ-")),
        (mask_text, times("eyJ-.")),
        (mask_text, times("eyJabcdefgh..")),
        (mask_text, times("bearer ")),
        (mask_text, times("://:")),
        (mask_text, times("-----BEGIN ")),
        (lambda text: expand(text, {}), times("$(")),
    ],
    ids=lambda value: value[:25] if isinstance(value, str) else "",
)
def test_parse_hostile_text_takes_linear_time(parse: Callable[[str], object], text: str) -> None:
    began = time.process_time()
    with suppress(ValueError):
        parse(text)
    assert time.process_time() - began < SECONDS


def test_response_reader_head_byte_by_byte_takes_linear_time() -> None:
    """Verify that a server which sends each byte alone does not have the whole head searched for each."""
    head = b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (HEAD_LIMIT // 6 - 10) + b"\r\n"
    reader = ResponseReader(1)
    began = time.process_time()
    for byte in head:
        assert not reader.status
        reader.feed(bytes([byte]))
    assert time.process_time() - began < SECONDS
    assert reader.status == 200
    assert reader.headers == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("eyJhbGciOiJ9.eyJzdWIi.c2ln", MASK),
        ("x-eyJhbGciOiJ9.eyJzdWIi.c2ln!", f"x-{MASK}!"),
        ("a.eyJhbGciOiJ9.eyJzdWIi.", f"a.{MASK}"),
        ("eyJhbGciOiJ9.a.b.eyJhbGciOiJ9.c.d", f"{MASK}.{MASK}"),
        ("eyJshort.eyJhbGciOiJ9.eyJzdWIi.c2ln", f"eyJshort.{MASK}"),
        ("eyJhbGciOiJ9..eyJhbGciOiJ9.a.b", f"eyJhbGciOiJ9..{MASK}"),
        ("heyJhbGciOiJ9.eyJzdWIi.c2ln", "heyJhbGciOiJ9.eyJzdWIi.c2ln"),
        ("eyJhbGciOiJ9.eyJzdWIi", "eyJhbGciOiJ9.eyJzdWIi"),
    ],
)
def test_mask_text_web_tokens_are_masked(text: str, masked: str) -> None:
    assert mask_text(text) == masked
