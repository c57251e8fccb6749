"""The secured server over real TLS: certificates that change, clients that misbehave, and who gets what."""

import asyncio
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from pykubelet.kube.access import Access
from pykubelet.kube.client import ApiClient
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.transport import Transport
from pykubelet.server.authentication import Authenticator
from pykubelet.server.authorization import AlwaysAllow
from pykubelet.server.client_certs import ClientCertificates
from pykubelet.server.https import https_server
from pykubelet.server.identity import NOBODY
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.pipeline import USER
from pykubelet.server.reviews import AccessReviews, TokenReviews
from pykubelet.server.tls import NoCertificate, ServingTls, TlsProblem, TlsSettings, server_context
from pykubelet.tasks import TaskScope
from tests.kube.certs import NAMES, Authority, Pair, encrypt
from tests.kube.servers import serving
from tests.server.people import ADMIN_TOKEN, VIEWER_TOKEN, People, client_context, subresources


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("https"), "cluster")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("https"), "stranger")


@pytest.fixture(scope="session")
def pairs(authority: Authority, stranger: Authority) -> dict[str, Pair]:
    return {
        "server": authority.sign("/CN=node", NAMES),
        "second": authority.sign("/CN=second", NAMES),
        "admin": authority.sign("/O=system:masters/CN=admin"),
        "viewer": authority.sign("/CN=viewer"),
        "expired": authority.sign("/CN=admin", begins=-7200, ends=-3600),
        "foreign": stranger.sign("/O=system:masters/CN=admin"),
    }


async def who(request: web.Request) -> web.Response:
    return web.Response(text=request[USER].name)


async def echo_size(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def fail(request: web.Request) -> web.Response:
    raise ValueError("a secret of the inside")


ROUTES = [
    web.get("/pods", who),
    web.get("/healthz", who),
    web.get("/stats/summary", who),
    web.post("/run/{a}/{b}/{c}", who),
    web.put("/manifests/{name}", echo_size),
    web.get("/debug/fail", fail),
]


class Node:
    """A secured server, and ways to ask it."""

    def __init__(self, port: int, authority: Authority, folder: Path, registry: CollectorRegistry) -> None:
        self.port, self.authority, self.folder, self.registry = port, authority, folder, registry
        self.people = People()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    async def ask(
        self, path: str, pair: Pair | None = None, token: str = "", method: str = "GET", **options: Any
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connector = aiohttp.TCPConnector(ssl=client_context(self.authority, pair))
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            async with session.request(method, self.url + path, **options) as answer:
                return answer.status, await answer.text()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes over TLS and give everything that comes back."""
        reader, writer = await asyncio.open_connection(
            "localhost", self.port, ssl=client_context(self.authority)
        )
        writer.write(data)
        try:
            async with asyncio.timeout(30):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def metric(self, line: str) -> float:
        for found in generate_latest(self.registry).decode().splitlines():
            if found.startswith(line + " "):
                return float(found.rpartition(" ")[2])
        return 0.0


Starter = Callable[..., Any]


@pytest.fixture
async def start(authority: Authority, pairs: dict[str, Pair], tmp_path: Path) -> AsyncIterator[Starter]:
    async with AsyncExitStack() as stack:

        async def begin(
            *, anonymous: bool = False, open_to_all: bool = False, most: int = 100, **settings: Any
        ) -> Node:
            registry = CollectorRegistry()
            metrics = ServerMetrics(registry)
            node = Node(0, authority, tmp_path, registry)
            scope = await stack.enter_async_context(TaskScope())
            api = await stack.enter_async_context(serving(None))
            api.default = node.people.answer
            transport = Transport(Access(api.url))
            stack.push_async_exit(transport)
            client = ApiClient(transport, TokenBucket(-1, 0), timeout=5)
            for name in ("crt", "key"):
                pair = pairs["server"]
                shutil.copy(pair.certificate if name == "crt" else pair.key, tmp_path / f"kubelet.{name}")
            shutil.copy(authority.certificate, tmp_path / "ca.crt")
            node.port = await stack.enter_async_context(
                https_server(
                    "::",
                    0,
                    ROUTES,
                    tls=ServingTls(
                        TlsSettings(request_certificates=True, **settings),
                        lambda: (tmp_path / "kubelet.crt", tmp_path / "kubelet.key"),
                    ),
                    authenticator=Authenticator(
                        ClientCertificates(tmp_path / "ca.crt", metrics),
                        TokenReviews(client, scope, 60, metrics),
                        anonymous=anonymous,
                    ),
                    judge=AlwaysAllow()
                    if open_to_all
                    else AccessReviews(client, scope, lambda: "n1", metrics, yes_seconds=60, no_seconds=60),
                    metrics=metrics,
                    most_connections=most,
                )
            )
            return node

        yield begin


async def test_who_gets_what(start: Starter, pairs: dict[str, Pair]) -> None:
    node = await start()
    node.people.rules = {
        ("viewer", "get", "pods"),
        ("token-viewer", "get", "stats"),
        ("viewer", "get", "proxy"),
    }
    forbidden = "Forbidden (user={}, verb={}, resource=nodes, subresource(s)=[{}])\n"
    table: list[tuple[str, str, dict[str, Any], tuple[int, str]]] = [
        ("/pods", "GET", {}, (401, "Unauthorized")),
        ("/nothing", "GET", {}, (401, "Unauthorized")),
        ("/pods", "GET", {"pair": pairs["foreign"]}, (401, "Unauthorized")),
        ("/pods", "GET", {"pair": pairs["expired"]}, (401, "Unauthorized")),
        ("/pods", "GET", {"token": "made-up"}, (401, "Unauthorized")),
        ("/pods", "GET", {"pair": pairs["admin"]}, (200, "admin")),
        ("/pods", "GET", {"token": ADMIN_TOKEN}, (200, "token-admin")),
        ("/pods", "GET", {"pair": pairs["foreign"], "token": ADMIN_TOKEN}, (200, "token-admin")),
        ("/pods", "GET", {"pair": pairs["viewer"], "token": ADMIN_TOKEN}, (200, "viewer")),
        ("/pods", "GET", {"pair": pairs["viewer"]}, (200, "viewer")),
        ("/healthz", "GET", {"pair": pairs["viewer"]}, (200, "viewer")),
        ("/stats/summary", "GET", {"token": VIEWER_TOKEN}, (200, "token-viewer")),
        (
            "/pods",
            "GET",
            {"token": VIEWER_TOKEN},
            (403, forbidden.format("token-viewer", "get", "pods proxy")),
        ),
        (
            "/stats/summary",
            "GET",
            {"pair": pairs["viewer"]},
            (403, forbidden.format("viewer", "get", "stats")),
        ),
        (
            "/run/a/b/c",
            "POST",
            {"pair": pairs["viewer"]},
            (403, forbidden.format("viewer", "create", "proxy")),
        ),
        ("/run/a/b/c", "POST", {"pair": pairs["admin"]}, (200, "admin")),
        ("/nothing", "GET", {"token": VIEWER_TOKEN}, (403, forbidden.format("token-viewer", "get", "proxy"))),
        ("/nothing", "GET", {"pair": pairs["admin"]}, (404, "404: Page Not Found")),
        ("/run/a/b/c", "GET", {"pair": pairs["admin"]}, (405, "405: Method Not Allowed")),
    ]
    for path, method, client, expected in table:
        assert await node.ask(path, method=method, **client) == expected, (path, method, client)
    specs = [review["spec"] for review in node.people.asked if review["kind"] == "SubjectAccessReview"]
    admin = next(spec for spec in specs if spec["user"] == "admin")
    assert admin["groups"] == ["system:masters", "system:authenticated"]
    [credential] = admin["extra"]["authentication.kubernetes.io/credential-id"]
    assert credential.startswith("X509SHA256=")
    assert node.metric('apiserver_delegated_authn_request_total{code="201"}') == 3
    assert node.metric('apiserver_delegated_authz_request_total{code="201"}') == len(specs)


async def test_anonymous_is_somebody_who_needs_permission_too(start: Starter, pairs: dict[str, Pair]) -> None:
    node = await start(anonymous=True)
    assert (await node.ask("/pods"))[0] == 403
    node.people.rules = {("system:anonymous", "get", "healthz")}
    assert await node.ask("/healthz") == (200, NOBODY.name)
    # Whoever shows something false is not taken for nobody.
    assert (await node.ask("/healthz", pairs["foreign"]))[0] == 401
    assert (await node.ask("/healthz", token="made-up"))[0] == 401


@pytest.mark.parametrize(("code", "status"), [(403, 500), (401, 500)])
async def test_without_an_answer_of_the_api_server_nobody_is_let_in(
    start: Starter, pairs: dict[str, Pair], code: int, status: int
) -> None:
    node = await start(anonymous=True)
    node.people.broken = code
    assert (await node.ask("/pods", pairs["admin"]))[0] == status
    assert (await node.ask("/pods", token=ADMIN_TOKEN))[0] == 401
    assert (await node.ask("/pods"))[0] == status
    node.people.broken = 0
    assert (await node.ask("/pods", pairs["admin"]))[0] == 200
    assert (await node.ask("/pods", token=ADMIN_TOKEN))[0] == 200


async def test_a_hundred_requests_at_once_are_reviewed_once(start: Starter) -> None:
    node = await start()
    answers = await asyncio.gather(*(node.ask("/pods", token=ADMIN_TOKEN) for _ in range(50)))
    assert {status for status, _ in answers} == {200}
    assert node.people.kinds == {"TokenReview": 1, "SubjectAccessReview": 1}
    assert subresources(node.people.asked) == ["pods"]


async def test_authorities_are_read_again(
    start: Starter, pairs: dict[str, Pair], authority: Authority, stranger: Authority
) -> None:
    node = await start()
    connector = aiohttp.TCPConnector(ssl=client_context(authority, pairs["admin"]), limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def status() -> int:
            async with session.get(node.url + "/pods") as answer:
                await answer.read()
                return answer.status

        assert await status() == 200
        replace(node.folder / "ca.crt", stranger.certificate.read_bytes())
        # On the same connection: what counts is who is trusted now.
        assert await status() == 401
        assert (await node.ask("/pods", pairs["foreign"]))[0] == 200
        replace(node.folder / "ca.crt", b"half a fi")
        assert (await node.ask("/pods", pairs["foreign"]))[0] == 200
        (node.folder / "ca.crt").unlink()
        assert (await node.ask("/pods", pairs["foreign"]))[0] == 200
        replace(
            node.folder / "ca.crt", stranger.certificate.read_bytes() + authority.certificate.read_bytes()
        )
        assert await status() == 200


def replace(path: Path, contents: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(contents)
    new.replace(path)


def shown_certificate(port: int, authority: Authority) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        with client_context(authority).wrap_socket(plain, server_hostname="localhost") as secure:
            subject: Any = (secure.getpeercert() or {})["subject"]
            return str(dict(part[0] for part in subject)["commonName"])


async def test_the_serving_certificate_changes_under_open_connections(
    start: Starter, pairs: dict[str, Pair], authority: Authority
) -> None:
    node = await start()

    async def shown() -> str:
        return await asyncio.to_thread(shown_certificate, node.port, authority)

    connector = aiohttp.TCPConnector(ssl=client_context(authority, pairs["admin"]), limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(node.url + "/pods") as answer:
            assert answer.status == 200
        assert await shown() == "node"
        replace(node.folder / "kubelet.crt", pairs["second"].certificate.read_bytes())
        # The key does not fit yet.
        assert await shown() == "node"
        replace(node.folder / "kubelet.key", pairs["second"].key.read_bytes())
        assert await shown() == "second"
        (node.folder / "kubelet.crt").unlink()
        assert await shown() == "second"
        async with session.get(node.url + "/pods") as answer:
            assert answer.status == 200
        assert len(connector._conns) == 1


async def test_without_a_certificate_clients_are_turned_away_until_there_is_one(
    start: Starter, pairs: dict[str, Pair]
) -> None:
    node = await start()
    hidden = node.folder / "kubelet.crt"
    files: list[tuple[Path, Path] | None] = [None]
    tls = ServingTls(TlsSettings(), lambda: files[0])
    with pytest.raises(NoCertificate):
        tls.context()
    files[0] = (hidden, node.folder / "kubelet.key")
    contents = hidden.read_bytes()
    hidden.unlink()
    with pytest.raises(NoCertificate, match="no serving certificate available"):
        tls.context()
    encrypt(node.folder / "kubelet.key", node.folder / "locked.key")
    hidden.write_bytes(contents)
    locked = ServingTls(TlsSettings(), lambda: (hidden, node.folder / "locked.key"))
    with pytest.raises(NoCertificate, match="no serving certificate available"):
        locked.context()
    first = tls.context()
    assert tls.context() is first
    files[0] = (pairs["second"].certificate, pairs["second"].key)
    assert tls.context() is not first
    files[0] = None
    assert tls.context() is not first


@pytest.mark.parametrize(
    ("settings", "client", "good"),
    [
        ({}, {"maximum": ssl.TLSVersion.TLSv1_2}, True),
        ({"min_version": ssl.TLSVersion.TLSv1_3}, {"maximum": ssl.TLSVersion.TLSv1_2}, False),
        ({"min_version": ssl.TLSVersion.TLSv1_3}, {}, True),
        (
            {"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"]},
            {"maximum": ssl.TLSVersion.TLSv1_2, "ciphers": "ECDHE-ECDSA-AES128-GCM-SHA256"},
            False,
        ),
        (
            {"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"]},
            {"maximum": ssl.TLSVersion.TLSv1_2, "ciphers": "ECDHE-ECDSA-AES256-GCM-SHA384"},
            True,
        ),
        ({"curves": ["P-384"]}, {"curve": "prime256v1"}, False),
        ({"curves": ["P-384", "P-256"]}, {"curve": "prime256v1"}, True),
    ],
)
async def test_versions_ciphers_and_key_exchanges(
    start: Starter, authority: Authority, settings: dict[str, Any], client: dict[str, Any], good: bool
) -> None:
    node = await start(**settings)
    context = client_context(authority)
    if "maximum" in client:
        context.maximum_version = client["maximum"]
    if "ciphers" in client:
        context.set_ciphers(client["ciphers"])
    if "curve" in client:
        context.set_ecdh_curve(client["curve"])
    try:
        _, writer = await asyncio.open_connection("localhost", node.port, ssl=context)
        writer.close()
        spoken = True
    except (ssl.SSLError, ConnectionError):
        spoken = False
    assert spoken == good


async def test_the_quicker_of_the_good_ciphers_is_chosen(start: Starter, authority: Authority) -> None:
    node = await start()
    context = client_context(authority)
    # The client's own first choice is another.
    assert context.get_ciphers()[0]["name"] == "TLS_AES_256_GCM_SHA384"
    _, writer = await asyncio.open_connection("localhost", node.port, ssl=context)
    chosen, _, _ = writer.get_extra_info("cipher")
    writer.close()
    assert chosen == "TLS_AES_128_GCM_SHA256"


def test_tls_that_cannot_be_spoken_is_explained() -> None:
    with pytest.raises(TlsProblem, match="knows none of TLS_RSA_WITH_RC4_128_SHA"):
        server_context(TlsSettings(cipher_suites=["TLS_RSA_WITH_RC4_128_SHA"]))
    with pytest.raises(TlsProblem, match="tlsCurvePreferences"):
        server_context(TlsSettings(curves=["P-1"]))


async def test_both_families_are_served(start: Starter, authority: Authority) -> None:
    node = await start(open_to_all=True, anonymous=True)
    context = client_context(authority)
    context.check_hostname = False
    for address in ("127.0.0.1", "::1"):
        if address == "::1" and not Path("/proc/net/if_inet6").exists():
            continue
        _, writer = await asyncio.open_connection(address, node.port, ssl=context)
        writer.close()


# Clients that misbehave.


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET //pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /pods/../run HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /logs/%2e%2e/etc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /pods%2Fx HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /pods%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET http://evil/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"BREW /pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"\x16\x03\x01\x00\x00garbage\r\n\r\n", b"400"),
        (b"GET /pods HTTP/9.9\r\n\r\n", b"40"),
        (b"GET /pods HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b"400"),
        (b"GET /pods HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5_000 + b"\r\n", b"400"),
        (b"GET /" + b"p" * 1_200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /pods?" + b"p" * 500_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /debug/fail HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"500"),
        (
            b"PUT /manifests/x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"z" * 1_100_000,
            b"413",
        ),
        (b"PUT /manifests/x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (
            b"PUT /manifests/x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
    ],
)
async def test_strange_requests_get_a_status_and_nothing_else(
    start: Starter, request_: bytes, status: bytes
) -> None:
    node = await start(open_to_all=True, anonymous=True)
    answer = await node.raw(request_)
    first = answer.partition(b"\r\n")[0]
    assert first.startswith(b"HTTP/1."), answer[:500]
    assert first.split()[1].startswith(status), answer[:500]
    assert b"Traceback" not in answer
    assert b"secret" not in answer
    assert (await node.ask("/pods"))[0] == 200


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_idle_connections_make_room(start: Starter, authority: Authority) -> None:
    node = await start(open_to_all=True, anonymous=True, most=20)
    before = open_files()
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(60):
            reader, writer = await asyncio.open_connection(
                "localhost", node.port, ssl=client_context(authority)
            )
            stack.callback(writer.close)
            readers.append(reader)
        assert (await node.ask("/pods"))[0] == 200
        # Also for those who do not even begin to speak TLS.
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", node.port)
            stack.callback(writer.close)
        assert (await node.ask("/pods"))[0] == 200
        closed = [reader for reader in readers if reader.at_eof()]
        assert len(closed) >= 40
    deadline = time.monotonic() + 30
    while open_files() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert open_files() <= before


async def test_connections_at_work_are_not_given_up_for_new_ones(
    start: Starter, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(_: web.Request) -> web.Response:
        begun.release()
        await release.wait()
        return web.Response(text="done")

    monkeypatch.setitem(globals(), "ROUTES", [*ROUTES, web.get("/debug/slow", slow)])
    node = await start(open_to_all=True, anonymous=True, most=5)
    async with TaskScope() as scope:
        busy = [scope.start(node.ask("/debug/slow"), name="busy") for _ in range(5)]
        for _ in busy:
            await begun.acquire()
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await node.ask("/pods")
        release.set()
        assert [await task for task in busy] == [(200, "done")] * 5
    assert (await node.ask("/pods"))[0] == 200


@asynccontextmanager
async def plain_connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    "bytes_", [b"GET /pods HTTP/1.1\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"z" * 100]
)
async def test_what_is_no_tls_is_hung_up_on(start: Starter, bytes_: bytes) -> None:
    node = await start()
    async with plain_connection(node.port) as (reader, writer), asyncio.timeout(30):
        writer.write(bytes_)
        writer.write_eof()
        while await reader.read(100):
            pass


async def test_requests_are_counted(start: Starter) -> None:
    node = await start(open_to_all=True, anonymous=True)
    await node.ask("/pods")
    await node.ask("/made/up")
    await node.ask("/other/made/up", method="PATCH")
    labels = 'method="{}",path="{}",server_type="readwrite"'
    for method, path, count in [("GET", "pods", 1), ("GET", "other", 1), ("other", "other", 1)]:
        where = "{" + f'long_running="false",{labels.format(method, path)}' + "}"
        assert node.metric(f"kubelet_http_requests_total{where}") == count
        assert node.metric(f"kubelet_http_requests_duration_seconds_count{where}") == count
        assert node.metric(f"kubelet_http_inflight_requests{where}") == 0
