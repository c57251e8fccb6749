"""From bootstrap credentials to a kubeconfig of the node's own, with every interruption."""

import asyncio
import base64
import logging
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.apiserver.certificates.bootstrap import (
    ensure_client_config,
    kubeconfig_problem,
    write_kubeconfig,
)
from pykubelet.apiserver.client import NODES
from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.config.kubeconfig_file import load_kubeconfig
from tests.support.api_client import Opener
from tests.support.api_server import Server, answer, refuse, server_context, serving
from tests.support.certs import Authority, Pair
from tests.support.ports import held_port
from tests.support.waiting import until
from tests.unit.apiserver.signing import PATH, Document, Signing

NODE = {"metadata": {"name": "one"}}


@pytest.fixture
async def signing(server: Server, authority: Authority) -> Signing:
    server.default = answer(NODE)
    return Signing(server, authority)


class Node:
    """The files of a node that is to be bootstrapped."""

    def __init__(self, folder: Path, server: Server, authority: Authority) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.bootstrap = folder / "bootstrap-kubeconfig"
        self.pki = folder / "pki"
        self.pending = self.pki / "kubelet-client.key.tmp"
        self.current = self.pki / "kubelet-client-current.pem"
        self._authority = authority
        self.write(self.bootstrap, server, token="b00tstrap")

    def write(self, path: Path, server: Server, **user: str) -> None:
        cluster = {"server": server.url, "certificate-authority": str(self._authority.certificate)}
        path.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": user}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    async def ensure(self, **options: Any) -> RestConfig:
        return await asyncio.wait_for(
            ensure_client_config(
                self.kubeconfig, self.bootstrap, self.pki, "one", load_kubeconfig, **options
            ),
            60,
        )

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.pki.iterdir() if not path.name.startswith("kubelet-client-2")}


@pytest.fixture
def node(tmp_path: Path, server: Server, authority: Authority) -> Node:
    return Node(tmp_path, server, authority)


async def test_ensure_client_config_bootstrap_token_yields_client_certificate(
    node: Node, signing: Signing, server: Server, opened: Opener
) -> None:
    access = await node.ensure()
    await opened(access).get(NODES, "one")
    assert server.seen[-1].subject == "system:node:one"
    assert server.seen[-1].header("Authorization") == ""
    assert server.seen[0].header("Authorization") == "Bearer b00tstrap"
    assert [name[:9] for name in signing.requests] == ["node-csr-"]
    assert node.files == {"kubelet-client-current.pem"}
    assert stat.S_IMODE(node.kubeconfig.stat().st_mode) == 0o600
    # The next start uses it and asks nobody.
    count, written = len(server.seen), node.kubeconfig.stat()
    assert await node.ensure() == access
    assert len(server.seen) == count
    assert node.kubeconfig.stat() == written


def test_write_kubeconfig_matches_upstream(tmp_path: Path) -> None:
    path, pair = tmp_path / "kubeconfig", tmp_path / "kubelet-client-current.pem"
    write_kubeconfig(path, RestConfig("https://10.0.0.1:6443", ca=b"ca", token="secret"), pair)
    assert (
        path.read_text()
        == f"""\
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: {base64.b64encode(b"ca").decode()}
    server: https://10.0.0.1:6443
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
users:
- name: default-auth
  user:
    client-certificate: {pair}
    client-key: {pair}
"""
    )
    reached = RestConfig(
        "https://api/x", ca=tmp_path / "ca", tls_server_name="api.test", proxy="http://p:1", compression=False
    )
    write_kubeconfig(path, reached, pair)
    found = load_kubeconfig(path)
    assert found.certificate == found.key == pair
    assert (found.server, found.ca, found.tls_server_name) == (reached.server, reached.ca, "api.test")
    assert (found.proxy, found.compression) == ("http://p:1", False)


async def test_ensure_client_config_without_bootstrap_kubeconfig_raises(node: Node, server: Server) -> None:
    with pytest.raises(KubeconfigError, match="does not exist"):
        await ensure_client_config(node.kubeconfig, None, node.pki, "one", load_kubeconfig)
    node.write(node.kubeconfig, server, token="t")
    assert (await ensure_client_config(node.kubeconfig, None, node.pki, "one", load_kubeconfig)).token == "t"
    node.kubeconfig.unlink()
    node.bootstrap.unlink()
    with pytest.raises(KubeconfigError, match="bootstrap-kubeconfig: does not exist"):
        await node.ensure()


Change = Callable[[Node, Server, Authority], None]


def inline(node: Node, server: Server, pair: Pair) -> None:
    texts = {
        "client-certificate-data": base64.b64encode(pair.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(pair.key.read_bytes()).decode(),
    }
    node.write(node.kubeconfig, server, **texts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, s, a: None, "does not exist"),
        (lambda n, s, a: n.kubeconfig.write_text("{"), "kubeconfig"),
        (lambda n, s, a: n.kubeconfig.write_text("a: b"), "current-context"),
        (lambda n, s, a: n.write(n.kubeconfig, s, token="t"), "no client certificate"),
        (lambda n, s, a: inline(n, s, a.sign("/CN=x", begins=-7200, ends=-60)), "expired at 20"),
        (
            lambda n, s, a: n.write(n.kubeconfig, s, **{"client-certificate": "none", "client-key": "none"}),
            "none cannot be read: No such file",
        ),
        (
            lambda n, s, a: n.write(
                n.kubeconfig, s, **{"client-certificate-data": "eA==", "client-key-data": "eA=="}
            ),
            "not a certificate and a key",
        ),
        (lambda n, s, a: inline(n, s, a.sign("/CN=x")), None),
        # A clock that is late is no reason to throw a certificate away.
        (lambda n, s, a: inline(n, s, a.sign("/CN=x", begins=3600, ends=7200)), None),
    ],
)
async def test_ensure_client_config_unusable_kubeconfig_bootstraps(
    node: Node, server: Server, authority: Authority, signing: Signing, change: Change, words: str | None
) -> None:
    change(node, server, authority)
    problem = kubeconfig_problem(node.kubeconfig, load_kubeconfig, datetime.now(UTC))
    assert (problem is None) == (words is None)
    assert (words or "") in (problem or "")
    access = await node.ensure()
    assert len(signing.requests) == (0 if words is None else 1)
    assert (access.certificate == node.current) == (words is not None)


async def test_ensure_client_config_api_server_late_is_retried(
    tmp_path: Path, authority: Authority, server_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pykubelet")
    with held_port() as port:
        node = Node(tmp_path, Server(f"https://127.0.0.1:{port}"), authority)
        ensuring = asyncio.ensure_future(node.ensure())
        await until(lambda: "Failed to get a client certificate" in said(caplog))
        assert node.files == {"kubelet-client.key.tmp"}
        assert not node.kubeconfig.exists()
        async with serving(server_context(authority, server_pair), port) as back:
            signing = Signing(back, authority)
            await ensuring
            assert len(signing.requests) == 1
    assert "Works again" in said(caplog)


async def test_ensure_client_config_token_rejected_reloads_and_retries(
    node: Node, signing: Signing, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A bootstrap token that has expired, until somebody writes a new one into the file."""
    server.say(*[refuse(401, "Unauthorized", "Unauthorized")] * 2)
    ensuring = asyncio.ensure_future(node.ensure())
    words = "the token or certificate of the kubeconfig's user is not accepted"
    await until(lambda: words in said(caplog))
    node.write(node.bootstrap, server, token="new")
    await ensuring
    assert server.seen[-1].header("Authorization") == "Bearer new"


async def test_ensure_client_config_csr_denied_retries_with_new_key(node: Node, signing: Signing) -> None:
    def decide(request: Document) -> None:
        if len(signing.requests) == 1:
            signing.condition(request, "Denied", "Policy", "not this one")
        else:
            signing.issue(request)

    signing.decide = decide
    await node.ensure()
    first, second = signing.requests
    assert signing.text(first) != signing.text(second)
    assert node.files == {"kubelet-client-current.pem"}


async def test_ensure_client_config_cancelled_while_waiting_resumes_same_csr(
    node: Node, signing: Signing, server: Server
) -> None:
    signing.decide = lambda _: None

    async def watched(times: int) -> None:
        await until(lambda: sum("watch" in seen.query for seen in server.seen) >= times)

    for times in (1, 2):
        async with running(node.ensure):
            await watched(times)
    assert node.files == {"kubelet-client.key.tmp"}
    assert stat.S_IMODE(node.pending.stat().st_mode) == 0o600
    (request,) = signing.requests.values()
    signing.issue(request)
    await node.ensure()
    assert len(signing.requests) == 1
    assert node.files == {"kubelet-client-current.pem"}


async def test_ensure_client_config_cancelled_before_kubeconfig_reuses_certificate(
    node: Node, signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is there: nobody is asked again."""
    with monkeypatch.context() as patched:

        def stopped(*_: object) -> None:
            raise asyncio.CancelledError

        patched.setattr("pykubelet.apiserver.certificates.bootstrap.write_kubeconfig", stopped)
        with pytest.raises(asyncio.CancelledError):
            await node.ensure()
    assert not node.kubeconfig.exists()
    await node.ensure()
    assert len(signing.requests) == 1


async def test_ensure_client_config_corrupt_pending_key_is_replaced(node: Node, signing: Signing) -> None:
    node.pki.mkdir()
    node.pending.write_bytes(b"-----BEGIN EC PRIVATE KEY-----\n\xff")
    await node.ensure()
    assert node.files == {"kubelet-client-current.pem"}


async def test_ensure_client_config_disk_full_keeps_pending_key(
    node: Node, signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.ensure()
    before = node.current.resolve()
    node.kubeconfig.unlink()
    later = datetime.now(UTC) + timedelta(hours=2)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        async with running(lambda: node.ensure(clock=lambda: later)):
            await until(lambda: len(signing.requests) >= 2 and node.pending.exists())
            signing.decide = lambda _: None
            await asyncio.sleep(0.3)
    assert node.pending.exists()
    assert node.current.resolve() == before


async def test_ensure_client_config_expired_certificate_bootstraps_again(
    node: Node, signing: Signing, server: Server
) -> None:
    await node.ensure()
    old = node.current.resolve()
    # The same second would be the same file.
    kept = node.pki / "kubelet-client-2020-01-01-00-00-00.pem"
    shutil.move(old, kept)
    node.current.unlink()
    node.current.symlink_to(kept)
    signing.decide = lambda request: signing.issue(request, ends=3 * 3600)
    later = datetime.now(UTC) + timedelta(hours=2)
    access = await node.ensure(clock=lambda: later)
    assert access.certificate == node.current
    assert node.current.resolve() != kept
    assert len(signing.requests) == 2
    assert {seen.header("Authorization") for seen in server.seen if seen.path.startswith(PATH)} == {
        "Bearer b00tstrap"
    }


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(
        f"{record.getMessage()} {record.__dict__['klog_keys'].get('err')}" for record in caplog.records
    )


@asynccontextmanager
async def running(work: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Let something run, then stop it."""
    task = asyncio.ensure_future(work())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
