"""Certificates that are renewed in time, while everything else goes on."""

import asyncio
import base64
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from pykubelet.api.pod import Pod
from pykubelet.apiserver.certificates.rotation import ClientCertificateRotation, Rotation, seconds_left
from pykubelet.apiserver.certificates.store import (
    CertificateMetrics,
    CertificateStore,
    StoredPair,
    StoreError,
)
from pykubelet.apiserver.certificates.x509 import Lifetime, Subject
from pykubelet.apiserver.client import NODES, PODS, ApiClient
from pykubelet.apiserver.errors import NoCredentials, Unreachable
from pykubelet.apiserver.reflector import Reflector, StoreDelta
from pykubelet.apiserver.transport import Transport
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import TaskScope
from tests.support.api_client import Opener
from tests.support.api_server import Server, answer, stream
from tests.support.certs import Authority, Pair
from tests.support.waiting import until
from tests.support.watch_events import pod
from tests.unit.apiserver.signing import PATH, Document, Signing
from tests.unit.apiserver.test_bootstrap import Node

NODE = {"metadata": {"name": "one"}}
WANTED = Subject("system:node:one", ("system:nodes",))
BEGIN = datetime(2026, 7, 24, 8, 30, tzinfo=UTC)


def stored(
    subject: Subject = WANTED, *, begins: float = 0, ends: float = 1000, digest: str = ""
) -> StoredPair:
    life = Lifetime(BEGIN + timedelta(seconds=begins), BEGIN + timedelta(seconds=ends))
    return StoredPair(Path("c"), Path("k"), life, subject, digest)


@pytest.mark.parametrize(
    ("pair", "now", "fraction", "expected"),
    [
        (None, 0, 0.8, 0),
        (stored(), 0, 0.8, 800),
        (stored(), 799, 0.8, 1),
        (stored(), 800, 0.8, 0),
        (stored(), 5000, 0.8, 0),
        (stored(begins=-1000), 0, 0.75, 500),
        (stored(Subject("other", ("system:nodes",))), 0, 0.8, 0),
        (stored(Subject("system:node:one")), 0, 0.8, 0),
        (stored(Subject("system:node:one", ("system:nodes", "x"), ("a",), ("1",))), 0, 0.8, 800),
        # A clock that is two hours late.
        (stored(), -7200, 0.8, 8000),
    ],
)
def test_seconds_left_is_zero_when_due_or_subject_differs(
    pair: StoredPair | None, now: float, fraction: float, expected: float
) -> None:
    assert seconds_left(pair, WANTED, BEGIN + timedelta(seconds=now), fraction) == expected


class Issuing:
    """Issues pairs on the loop's time, as a test tells it."""

    def __init__(self) -> None:
        self.pair: StoredPair | None = None
        self.asked: list[tuple[float, Subject]] = []
        self.outcomes: list[Any] = []
        self.life = 1000.0

    def clock(self) -> datetime:
        return BEGIN + timedelta(seconds=asyncio.get_running_loop().time())

    async def obtain(self, subject: Subject) -> StoredPair:
        now = asyncio.get_running_loop().time()
        self.asked.append((now, subject))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, float):
            await asyncio.sleep(outcome)
        self.pair = stored(subject, begins=now, ends=now + self.life, digest=str(len(self.asked)))
        return self.pair

    @property
    def times(self) -> list[float]:
        return [round(moment) for moment, _ in self.asked]


@asynccontextmanager
async def rotating(
    issuing: Issuing, wanted: Callable[[], Subject | None] = lambda: WANTED, **options: Any
) -> AsyncIterator[Rotation]:
    at_once = options.pop("at_once", False)
    rotation = Rotation(
        "test",
        lambda: issuing.pair,
        wanted,
        issuing.obtain,
        clock=issuing.clock,
        rng=lambda: 0.5,
        **options,
    )
    async with TaskScope() as scope:
        scope.start(rotation.run(at_once=at_once), name="rotation")
        yield rotation


@pytest.mark.looptime
async def test_rotation_renews_repeatedly_at_fraction_of_lifetime() -> None:
    issuing, told = Issuing(), []
    async with rotating(issuing) as rotation:
        rotation.add_listener(lambda: told.append(asyncio.get_running_loop().time()))
        await asyncio.sleep(2500)
        assert issuing.times == [0, 800, 1600, 2400]
        assert len(told) == 4
        assert rotation.current() == issuing.pair


@pytest.mark.looptime
async def test_rotation_renewal_fails_retries_and_keeps_old_certificate() -> None:
    issuing, registry = Issuing(), CollectorRegistry()
    issuing.outcomes = [None, *[Unreachable("s", "away")] * 7, StoreError("full"), OSError(28, "full")]
    async with rotating(issuing, metrics=CertificateMetrics(registry, "server")) as rotation:
        await asyncio.sleep(810)
        first = rotation.current()
        assert first is not None
        await asyncio.sleep(140)
        assert rotation.current() is first
        await asyncio.sleep(40)
        assert rotation.current() is issuing.pair is not first
        pauses = [after - before for before, after in zip(issuing.times[1:], issuing.times[2:], strict=False)]
        assert pauses[:6] == [3, 6, 12, 24, 24, 24]
    text = generate_latest(registry).decode()
    assert "kubelet_server_expiration_renew_errors 9.0" in text
    assert 'kubelet_certificate_manager_server_rotation_seconds_bucket{le="3600.0"} 1.0' in text


@pytest.mark.looptime
async def test_rotation_current_certificate_expired_is_none() -> None:
    issuing = Issuing()
    issuing.pair = stored(ends=100)
    issuing.outcomes = [*[Unreachable("s", "away")] * 1000]
    registry = CollectorRegistry()
    async with rotating(issuing, metrics=CertificateMetrics(registry, "client")) as rotation:
        ttl = "kubelet_certificate_manager_client_ttl_seconds"
        await asyncio.sleep(50)
        assert registry.get_sample_value(ttl) == 50
        assert rotation.current() is issuing.pair
        await asyncio.sleep(51)
        assert rotation.current() is None
        assert registry.get_sample_value(ttl) == math.inf
        # Somebody puts one there by hand.
        issuing.pair = stored(begins=90, ends=10000)
        await asyncio.sleep(60)
        count = len(issuing.asked)
        await asyncio.sleep(5000)
        assert len(issuing.asked) == count
        assert rotation.current() is issuing.pair


@pytest.mark.looptime
async def test_rotation_subject_changed_while_pending_requests_again() -> None:
    issuing = Issuing()
    wanted: list[Subject | None] = [None]
    async with rotating(issuing, lambda: wanted[0]) as rotation:
        await asyncio.sleep(100)
        assert issuing.asked == []
        wanted[0] = Subject("n", (), (), ("10.0.0.1",))
        issuing.outcomes = [900.0]
        await asyncio.sleep(10)
        assert rotation.current() is None
        wanted[0] = Subject("n", (), (), ("10.0.0.1", "10.0.0.2"))
        await asyncio.sleep(10)
        current = rotation.current()
        assert current is not None
        assert current.subject == wanted[0]
        # Fewer names need no new certificate, others do.
        wanted[0] = Subject("n", (), (), ("10.0.0.2",))
        await asyncio.sleep(100)
        assert len(issuing.asked) == 2
        wanted[0] = Subject("n", (), (), ("10.0.0.3",))
        await asyncio.sleep(15)
        assert len(issuing.asked) == 3
        assert rotation.current() is issuing.pair


@pytest.mark.looptime
async def test_rotation_signer_omits_names_limits_requests() -> None:
    class Careless(Issuing):
        async def obtain(self, subject: Subject) -> StoredPair:
            await super().obtain(subject)
            self.pair = stored(Subject("n"), ends=10**6, digest=str(len(self.asked)))
            return self.pair

    issuing = Careless()
    async with rotating(issuing):
        await asyncio.sleep(600)
        assert len(issuing.asked) < 40


@pytest.mark.looptime
async def test_rotation_run_at_once_renews_immediately() -> None:
    issuing = Issuing()
    issuing.pair = stored()
    issuing.outcomes = [Unreachable("s", "away")]
    async with rotating(issuing, at_once=True):
        await asyncio.sleep(100)
        assert issuing.times == [0, 3]


# The client's certificate, with real handshakes.


@pytest.fixture
async def signing(server: Server, authority: Authority) -> Signing:
    server.default = answer(NODE)
    return Signing(server, authority)


@pytest.fixture
def node(tmp_path: Path, server: Server, authority: Authority) -> Node:
    return Node(tmp_path, server, authority)


def client_rotation(node: Node, bootstrap: bool = True, **options: Any) -> ClientCertificateRotation:
    return ClientCertificateRotation(
        node.kubeconfig,
        node.bootstrap if bootstrap else None,
        node.pki,
        "one",
        load_kubeconfig,
        **{"rng": lambda: 0.0, **options},
    )


@dataclass
class Life:
    """A node's life in short: a heartbeat every so often and a watch."""

    client: ApiClient
    beats: int = 0
    failures: int = 0
    watched: int = 0

    async def beat(self) -> None:
        while True:
            try:
                await self.client.get(NODES, "one")
                self.beats += 1
            except Unreachable:
                self.failures += 1
            await asyncio.sleep(0.02)

    async def watch(self) -> None:
        async def follow(update: StoreDelta[Pod]) -> None:
            self.watched += len(update.changed)

        await Reflector(self.client, PODS, follow).run()


async def test_client_certificate_rotation_misses_no_heartbeat(
    node: Node, signing: Signing, server: Server
) -> None:
    signing.other = pods_and_node
    # Due a second after it was issued, with time to spare for a machine that is busy.
    signing.decide = lambda request: signing.issue(request, begins=-66, ends=30)
    rotation = client_rotation(node)
    async with Transport(rotation.prepare()) as transport, TaskScope() as scope:
        client = ApiClient(transport, TokenBucket(-1, 0), timeout=15)
        with pytest.raises(NoCredentials, match=r"kubelet-client-current.pem cannot be read"):
            await client.get(NODES, "one")
        scope.start(rotation.run(), name="rotation")
        await until(node.current.exists)
        life = Life(client)
        scope.start(life.beat(), name="heartbeats")
        scope.start(life.watch(), name="watch")
        await until(lambda: len(signing.requests) >= 5)
    assert life.failures == 0
    assert life.beats > 10
    beats = [seen for seen in server.seen if seen.path == "/api/v1/nodes/one"]
    assert {seen.subject for seen in beats} == {"system:node:one"}
    serials = list(dict.fromkeys(seen.serial for seen in beats))
    assert len(serials) >= 3
    # Never back to an older one.
    assert [seen.serial for seen in beats] == sorted((seen.serial for seen in beats), key=serials.index)
    # The watch went on with each new certificate and listed only once.
    watches = [seen for seen in server.seen if seen.path == "/api/v1/pods"]
    assert len([seen for seen in watches if "watch" not in seen.query]) == 1
    assert len({seen.serial for seen in watches}) >= 3
    # The first request with bootstrap credentials, the others as the node, each with a key of its own.
    posts = [seen for seen in server.seen if seen.method == "POST"]
    assert posts[0].header("Authorization") == "Bearer b00tstrap"
    assert {seen.subject for seen in posts[1:]} == {"system:node:one"}
    assert len({signing.text(name) for name in signing.requests}) == len(signing.requests)


async def pods_and_node(request: Any) -> Any:
    if request.path != "/api/v1/pods":
        return await answer(NODE)(request)
    if "watch" not in request.query:
        return await answer({"metadata": {"resourceVersion": "7"}, "items": [pod("a")]})(request)
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}
    return await stream(bookmark, end=False)(request)


@contextlib.asynccontextmanager
async def running(rotation: ClientCertificateRotation) -> AsyncIterator[None]:
    async with TaskScope() as scope:
        scope.start(rotation.run(), name="rotation")
        async with asyncio.timeout(60):
            yield


async def test_client_certificate_rotation_admin_certificate_is_replaced_immediately(
    node: Node, signing: Signing, server: Server, authority: Authority, opened: Opener
) -> None:
    """As kubeadm does it on a control plane."""
    pair = authority.sign("/O=system:masters/CN=kubernetes-admin")
    inline = {
        "client-certificate-data": base64.b64encode(pair.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(pair.key.read_bytes()).decode(),
    }
    node.write(node.kubeconfig, server, **inline)
    rotation = client_rotation(node, bootstrap=False)
    client = opened(rotation.prepare())
    await client.get(NODES, "one")
    assert server.seen[-1].subject == "kubernetes-admin"
    async with running(rotation):
        while server.seen[-1].subject != "system:node:one":
            await client.get(NODES, "one")
            await asyncio.sleep(0.02)
    (name,) = signing.requests
    assert name.startswith("csr-")
    # The next start begins with what was issued, and asks nobody.
    await opened(client_rotation(node, bootstrap=False).prepare()).get(NODES, "one")
    assert server.seen[-1].subject == "system:node:one"


async def test_client_certificate_rotation_valid_kubeconfig_files_request_no_certificate(
    node: Node, signing: Signing, server: Server, node_pair: Pair, opened: Opener
) -> None:
    files = {"client-certificate": str(node_pair.certificate), "client-key": str(node_pair.key)}
    node.write(node.kubeconfig, server, **files)
    rotation = client_rotation(node, bootstrap=False)
    await opened(rotation.prepare()).get(NODES, "one")
    assert server.seen[-1].subject == "system:node:one"
    async with running(rotation):
        await asyncio.sleep(0.2)
    assert signing.requests == {}


async def test_client_certificate_rotation_expired_uses_bootstrap_credentials(
    node: Node, signing: Signing, server: Server, authority: Authority
) -> None:
    expired = authority.sign("/O=system:nodes/CN=system:node:one", begins=-7200, ends=-3600)
    store = CertificateStore(node.pki, "kubelet-client")
    store.update(expired.certificate.read_bytes(), expired.key.read_bytes())
    files = {"client-certificate": str(node.current), "client-key": str(node.current)}
    node.write(node.kubeconfig, server, **files)
    before = node.current.read_bytes()
    rotation = client_rotation(node)
    rotation.prepare()
    assert load_kubeconfig(node.kubeconfig).certificate == node.current
    async with running(rotation):
        await until(lambda: node.current.read_bytes() != before)
    assert server.seen[0].header("Authorization") == "Bearer b00tstrap"


async def test_client_certificate_rotation_valid_kubeconfig_ignores_bootstrap(
    node: Node, signing: Signing, server: Server, node_pair: Pair
) -> None:
    files = {"client-certificate": str(node_pair.certificate), "client-key": str(node_pair.key)}
    node.write(node.kubeconfig, server, **files)
    before = node.kubeconfig.read_text()
    node.bootstrap.unlink()
    client_rotation(node).prepare()
    assert node.kubeconfig.read_text() == before


async def test_client_certificate_rotation_token_requests_first_certificate(
    node: Node, signing: Signing, server: Server
) -> None:
    node.write(node.kubeconfig, server, token="t0k3n")
    rotation = client_rotation(node, bootstrap=False)
    assert rotation.prepare().token == ""
    async with running(rotation):
        await until(node.current.exists)
    assert server.seen[0].header("Authorization") == "Bearer t0k3n"


async def test_client_certificate_rotation_stopped_during_renewal_keeps_certificate(
    node: Node, signing: Signing, server: Server
) -> None:
    signing.decide = lambda request: signing.issue(request, begins=-20, ends=60)
    rotation = client_rotation(node)
    rotation.prepare()
    async with running(rotation):
        await until(node.current.exists)
    before = node.current.read_bytes()
    soon = datetime.now(UTC) + timedelta(seconds=45)
    signing.decide = lambda _: None

    async def requested(times: int) -> None:
        await until(lambda: len(signing.requests) >= times)

    for times in (2, 3):
        again = client_rotation(node, clock=lambda: soon)
        again.prepare()
        async with running(again):
            await requested(times)
        assert node.current.read_bytes() == before
        assert node.files == {"kubelet-client-current.pem"}
    signing.decide = signing.issue
    last = client_rotation(node, clock=lambda: soon)
    last.prepare()
    async with running(last):
        await until(lambda: node.current.read_bytes() != before)


async def test_client_certificate_rotation_request_denied_logs_and_counts_error(
    node: Node, signing: Signing, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def decide(request: Document) -> None:
        signing.condition(request, "Denied", "Policy", "not yours")

    signing.decide = decide
    registry = CollectorRegistry()
    rotation = client_rotation(node, metrics=CertificateMetrics(registry, "client"))
    rotation.prepare()
    errors = "kubelet_certificate_manager_client_expiration_renew_errors"
    async with running(rotation):
        await until(lambda: registry.get_sample_value(errors))
    (record,) = caplog.records
    assert "was denied: Policy: not yours" in str(record.__dict__["klog_keys"]["err"])
    assert [seen.path for seen in server.seen if seen.method == "POST"] == [PATH]
