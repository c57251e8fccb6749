"""Trust in both directions, with real handshakes against servers that show all kinds of certificates."""

import asyncio
import gc
import shutil
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from pykubelet.apiserver.certificates.x509 import certificates, lifetime
from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.errors import NoCredentials, Superseded, TlsError, Unauthorized, Unreachable
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.tls import BadMaterial, client_context
from pykubelet.apiserver.transport import Transport, explain
from pykubelet.util.rate_limiter import TokenBucket
from tests.support.api_client import Opener
from tests.support.api_server import Server, answer, hang, refuse, server_context, serving, stream
from tests.support.certs import NAMES, Authority, Pair, encrypt
from tests.support.waiting import until

NODE = {"metadata": {"name": "one"}}


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certs"), "stranger")


@pytest.fixture(scope="session")
def expired_pair(authority: Authority) -> Pair:
    return authority.sign("/CN=system:node:old", begins=-7200, ends=-3600)


def files_of(pair: Pair, folder: Path) -> Pair:
    """Copy a pair to where a test may replace it."""
    copied = Pair(folder / "client.crt", folder / "client.key")
    shutil.copy(pair.certificate, copied.certificate)
    shutil.copy(pair.key, copied.key)
    return copied


async def test_client_certificate_from_files_or_inline_is_sent(
    server: Server, authority: Authority, node_pair: Pair, opened: Opener
) -> None:
    server.default = answer(NODE)
    await opened(
        RestConfig(server.url, ca=authority.certificate, certificate=node_pair.certificate, key=node_pair.key)
    ).get(NODES, "one")
    await opened(
        RestConfig(
            server.url,
            ca=authority.certificate.read_bytes(),
            certificate=node_pair.certificate.read_bytes(),
            key=node_pair.key.read_bytes(),
        )
    ).get(NODES, "one")
    assert [seen.subject for seen in server.seen] == ["system:node:one"] * 2


async def test_client_certificate_and_key_in_one_file_is_sent(
    server: Server, authority: Authority, node_pair: Pair, tmp_path: Path, opened: Opener
) -> None:
    """As in kubelet-client-current.pem."""
    both = tmp_path / "kubelet-client-current.pem"
    both.write_bytes(node_pair.pem)
    server.default = answer(NODE)
    await opened(RestConfig(server.url, ca=authority.certificate, certificate=both, key=both)).get(
        NODES, "one"
    )
    assert server.seen[0].subject == "system:node:one"


@pytest.mark.parametrize("change", [{"begins": -7200, "ends": -60}, {"begins": 3600, "ends": 7200}])
async def test_server_certificate_expired_or_not_yet_valid_raises_tls_error(
    authority: Authority, opened: Opener, change: dict[str, float]
) -> None:
    pair = authority.sign("/CN=kube-apiserver", NAMES, **change)
    async with serving(server_context(authority, pair)) as server:
        with pytest.raises(TlsError, match=r"not valid now .*: renew it, or check this machine's clock"):
            await opened(RestConfig(server.url, ca=authority.certificate)).get(NODES, "one")


async def test_server_certificate_of_unknown_ca_raises_tls_error(
    server: Server, stranger: Authority, opened: Opener
) -> None:
    with pytest.raises(TlsError, match=r"not signed by the kubeconfig's certificate-authority") as caught:
        await opened(RestConfig(server.url, ca=stranger.certificate)).get(NODES, "one")
    assert "\n" not in str(caught.value)
    with pytest.raises(TlsError, match=r"not signed by"):
        await opened(RestConfig(server.url)).get(NODES, "one")


async def test_server_certificate_for_other_name_needs_tls_server_name(
    authority: Authority, opened: Opener
) -> None:
    pair = authority.sign("/CN=kube-apiserver", "DNS:api.test")
    async with serving(server_context(authority, pair)) as server:
        server.default = answer(NODE)
        with pytest.raises(TlsError, match=r"for another name than 127.0.0.1 .*set tls-server-name"):
            await opened(RestConfig(server.url, ca=authority.certificate)).get(NODES, "one")
        with pytest.raises(TlsError, match=r"for another name than other.test"):
            await opened(RestConfig(server.url, ca=authority.certificate, tls_server_name="other.test")).get(
                NODES, "one"
            )
        await opened(RestConfig(server.url, ca=authority.certificate, tls_server_name="api.test")).get(
            NODES, "one"
        )


async def test_insecure_skip_tls_verify_accepts_any_server_certificate(
    server: Server, opened: Opener
) -> None:
    server.default = answer(NODE)
    await opened(RestConfig(server.url, insecure=True, token="x")).get(NODES, "one")
    assert server.seen[0].header("Authorization") == "Bearer x"


async def test_certificate_authority_leaf_certificate_is_trusted(
    server: Server, server_pair: Pair, opened: Opener
) -> None:
    """Go trusts whatever is in the file, not only what signs itself."""
    server.default = answer(NODE)
    await opened(RestConfig(server.url, ca=server_pair.certificate)).get(NODES, "one")


async def test_expired_client_certificate_rejected_in_handshake_names_expiry(
    authority: Authority, server_pair: Pair, expired_pair: Pair, opened: Opener
) -> None:
    async with serving(server_context(authority, server_pair, demand=True)) as server:
        # The server's own reason gets lost when it hangs up too quickly; ours does not.
        with pytest.raises(Unreachable, match=r"\(the client certificate expired at 20"):
            await opened(
                RestConfig(
                    server.url,
                    ca=authority.certificate,
                    certificate=expired_pair.certificate,
                    key=expired_pair.key,
                )
            ).patch(NODES, "one", {})
        with pytest.raises(Unreachable):
            await opened(RestConfig(server.url, ca=authority.certificate)).patch(NODES, "one", {})


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", "does not trust the authority of our client certificate"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "our client certificate has expired: renew it"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "wants a client certificate"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "does not accept our client certificate"),
        ("WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("TLSV1_ALERT_INTERNAL_ERROR", "handshake failed (tlsv1 alert internal error)"),
    ],
)
def test_explain_tls_alert_names_cause(reason: str, words: str) -> None:
    err = ssl.SSLError(1, f"[SSL: {reason}] something")
    err.reason = reason
    told = aiohttp.ClientOSError(1, "x")
    told.__cause__ = err
    found = explain(told, RestConfig("https://api:6443"))
    assert isinstance(found, TlsError)
    assert words in found.why


async def test_expired_client_certificate_rejected_with_401_names_expiry(
    server_pair: Pair, authority: Authority, expired_pair: Pair, opened: Opener
) -> None:
    """As real API servers do: the handshake passes, then nobody knows who asks."""
    context = server_context(authority, server_pair)
    context.verify_mode = context.verify_mode.CERT_NONE
    async with serving(context) as server:
        server.default = refuse(401, "Unauthorized", "Unauthorized")
        with pytest.raises(Unauthorized, match=r"\(the client certificate expired at 20"):
            await opened(
                RestConfig(
                    server.url,
                    ca=authority.certificate,
                    certificate=expired_pair.certificate,
                    key=expired_pair.key,
                )
            ).get(NODES, "one")


async def test_plain_http_server_gets_no_credentials_and_https_raises_tls_error(
    opened: Opener, authority: Authority
) -> None:
    async with serving(None) as server:
        server.default = answer(NODE)
        await opened(RestConfig(server.url, token="s3cret", username="me")).get(NODES, "one")
        assert server.seen[0].header("Authorization") == ""
        with pytest.raises(TlsError, match=r"does not speak TLS"):
            await opened(RestConfig(server.url.replace("http:", "https:"), ca=authority.certificate)).get(
                NODES, "one"
            )


async def test_client_certificate_replaced_is_used_by_next_request(
    server: Server, authority: Authority, node_pair: Pair, tmp_path: Path, opened: Opener
) -> None:
    files = files_of(node_pair, tmp_path)
    client = opened(
        RestConfig(server.url, ca=authority.certificate, certificate=files.certificate, key=files.key)
    )
    server.default = answer(NODE)
    await client.get(NODES, "one")
    server.say(hang(0.5))
    slow = asyncio.ensure_future(client.get(NODES, "slow"))
    server_watch = stream({"type": "BOOKMARK"}, end=False)
    await until(lambda: len(server.seen) >= 2)
    server.say(server_watch)

    async def watch() -> None:
        async with client.watch(NODES, "", [], seconds=20) as chunks:
            async for _ in chunks:
                pass

    watching = asyncio.ensure_future(watch())
    await until(lambda: len(server.seen) >= 3)
    replacement = authority.sign("/CN=system:node:renewed")
    replacement.key.replace(files.key)
    # Half-way, key and certificate do not belong together: the old pair stays in use.
    await client.get(NODES, "one")
    shutil.copy(replacement.certificate, files.certificate)
    await client.get(NODES, "one")
    with pytest.raises(Superseded):
        await asyncio.wait_for(watching, 60)
    # The request that was under way is still answered.
    with pytest.raises(Exception, match="not a Node"):
        await slow
    subjects = [seen.subject for seen in server.seen]
    assert subjects == ["system:node:one"] * 4 + ["system:node:renewed"]
    assert server.seen[-1].peer != server.seen[0].peer


async def test_watch_started_during_certificate_change_raises_superseded(
    server: Server, authority: Authority, node_pair: Pair, tmp_path: Path, opened: Opener
) -> None:
    files = files_of(node_pair, tmp_path)
    client = opened(
        RestConfig(server.url, ca=authority.certificate, certificate=files.certificate, key=files.key)
    )
    changed = asyncio.Event()

    async def late(_: web.Request) -> web.StreamResponse:
        await changed.wait()
        return web.Response()

    server.say(late)
    server.default = answer(NODE)
    replacement = authority.sign("/CN=system:node:renewed")

    async def watch() -> None:
        async with client.watch(NODES, "", [], seconds=20) as chunks:
            async for _ in chunks:
                pass

    watching = asyncio.ensure_future(watch())
    await until(lambda: server.seen)
    shutil.copy(replacement.key, files.key)
    shutil.copy(replacement.certificate, files.certificate)
    await client.get(NODES, "one")
    changed.set()
    with pytest.raises(Superseded):
        await asyncio.wait_for(watching, 60)


async def test_certificate_authority_file_replaced_is_used_by_next_request(
    authority: Authority, stranger: Authority, server_pair: Pair, tmp_path: Path, opened: Opener
) -> None:
    trusted = tmp_path / "ca.crt"
    shutil.copy(authority.certificate, trusted)
    async with serving(server_context(authority, server_pair)) as server:
        server.default = answer(NODE)
        client = opened(RestConfig(server.url, ca=trusted))
        await client.get(NODES, "one")
        shutil.copy(stranger.certificate, trusted)
        with pytest.raises(TlsError):
            await client.get(NODES, "one")
        # A file that vanished or is broken changes nothing.
        trusted.unlink()
        with pytest.raises(TlsError):
            await client.get(NODES, "one")
        trusted.write_bytes(b"nonsense" + authority.certificate.read_bytes())
        await client.get(NODES, "one")
        trusted.write_bytes(b"nonsense")
        await client.get(NODES, "one")


async def test_server_certificate_replaced_is_verified_on_reconnect(
    authority: Authority, server_pair: Pair, stranger: Authority, opened: Opener
) -> None:
    async with serving(server_context(authority, server_pair)) as server:
        server.default = answer(NODE)
        client = opened(RestConfig(server.url, ca=authority.certificate))
        await client.get(NODES, "one")
        server.identify_as(stranger.sign("/CN=evil", NAMES))
        await client.transport.close_all()
        with pytest.raises(TlsError, match="not signed by"):
            await client.get(NODES, "one")
        server.identify_as(server_pair)
        await client.get(NODES, "one")


BadFiles = Callable[[Path, Pair], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, _: {"ca": t / "absent"}, r"certificate-authority .*/absent cannot be read: No such file"),
        (lambda t, _: {"ca": b"no pem"}, r"certificate-authority holds no certificate"),
        (
            lambda _, p: {"certificate": p.certificate, "key": p.certificate},
            r"client-certificate and client-key are not a certificate and a key",
        ),
        (
            lambda t, p: {"certificate": p.certificate, "key": t},
            r"client-key .* cannot be read: Is a directory",
        ),
        (
            lambda t, p: {"certificate": p.certificate, "key": encrypt(p.key, t / "enc.key")},
            r"client-key is encrypted: give a key without a password",
        ),
        (lambda t, _: {"token_file": t / "absent"}, r"tokenFile .*/absent cannot be read: No such file"),
    ],
)
async def test_unreadable_credentials_raise_no_credentials(
    server: Server,
    authority: Authority,
    node_pair: Pair,
    tmp_path: Path,
    opened: Opener,
    change: BadFiles,
    words: str,
) -> None:
    access = RestConfig(**{"server": server.url, "ca": authority.certificate, **change(tmp_path, node_pair)})
    with pytest.raises(NoCredentials, match=words) as caught:
        await opened(access).get(NODES, "one")
    assert "\n" not in str(caught.value)


def test_client_context_key_of_other_certificate_raises_bad_material(
    authority: Authority, node_pair: Pair, server_pair: Pair
) -> None:
    with pytest.raises(BadMaterial, match="does not belong to"):
        client_context(
            ca=None,
            insecure=False,
            identity=node_pair.certificate.read_bytes() + server_pair.key.read_bytes(),
        )


def test_client_context_leaks_no_file_descriptors(node_pair: Pair) -> None:
    gc.collect()  # What tests before this one forgot must not be closed in between.
    before = len(list(Path("/proc/self/fd").iterdir()))
    client_context(ca=None, insecure=False, identity=node_pair.pem)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_lifetime_reads_validity_and_rejects_truncated_der(authority: Authority) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    pair = authority.sign("/CN=x", begins=-60, ends=120)
    now = datetime.now(UTC)
    (der,) = certificates(b"text before\n" + pair.certificate.read_bytes() + pair.key.read_bytes())
    life = lifetime(der)
    assert before <= life.begins + timedelta(seconds=60) <= now
    assert before <= life.ends - timedelta(seconds=120) <= now
    assert life.problem(now) is None
    assert "expired at" in (life.problem(now + timedelta(hours=2)) or "")
    assert "check this machine's clock" in (life.problem(now - timedelta(hours=2)) or "")
    for cut in range(0, len(der), 7):
        with pytest.raises(ValueError):
            lifetime(der[:cut])
    # Beyond 2049 dates are written with four digits of the year.
    far = authority.sign("/CN=x", ends=30 * 365 * 86400)
    assert lifetime(certificates(far.certificate.read_bytes())[0]).ends.year >= 2050


def test_transport_on_uvloop_handles_reuse_and_close_all(
    authority: Authority, server_pair: Pair, node_pair: Pair
) -> None:
    """Handshake, reuse, broken connections and closing also work on uvloop."""

    async def scenario() -> list[str]:
        async with serving(server_context(authority, server_pair)) as server:
            server.default = answer(NODE)
            access = RestConfig(
                server.url, ca=authority.certificate, certificate=node_pair.certificate, key=node_pair.key
            )
            async with Transport(access) as transport:
                client = ApiClient(transport, TokenBucket(-1, 0))
                await client.get(NODES, "one")
                await client.get(NODES, "one")
                server.say(hang())
                waiting = asyncio.ensure_future(client.patch(NODES, "one", {}))
                await until(lambda: len(server.seen) >= 3)
                await transport.close_all()
                with pytest.raises(Unreachable):
                    await waiting
                await client.get(NODES, "one")
            return [seen.subject for seen in server.seen]

    assert uvloop.run(scenario()) == ["system:node:one"] * 4
