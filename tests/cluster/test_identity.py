"""A node's certificates from a real control plane: requested, approved, issued, rotated, refused."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.node import Lease, Node, NodeAddress
from pykubelet.apiserver.certificates.bootstrap import ensure_client_config, is_good, node_subject
from pykubelet.apiserver.certificates.rotation import ClientCertificateRotation
from pykubelet.apiserver.certificates.serving import RequestedCertificate
from pykubelet.apiserver.certificates.store import CertificateStore, read_pair
from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.errors import KubeError, ServerError, TooManyRequests
from pykubelet.apiserver.reflector import Reflector, StoreDelta
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.devcluster.admin_client import UNREACHABLE, ApiStatusError
from pykubelet.devcluster.layout import Component
from pykubelet.node.lease import heartbeat
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import TaskScope
from tests.support.plane import Plane, unique

CSR = "certificatesigningrequest"


class Joining:
    """A node that joins with the bootstrap token."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.name = unique("joins")
        self.plane = plane
        self.kubeconfig = folder / "kubeconfig"
        self.bootstrap = plane.bootstrap_kubeconfig()
        self.pki = folder / "pki"
        self.current = self.pki / "kubelet-client-current.pem"
        self.mark = plane.audit_mark()

    async def ensure(self) -> RestConfig:
        return await asyncio.wait_for(
            ensure_client_config(self.kubeconfig, self.bootstrap, self.pki, self.name, load_kubeconfig), 120
        )

    def rotation(self, **options: Any) -> ClientCertificateRotation:
        return ClientCertificateRotation(
            self.kubeconfig, self.bootstrap, self.pki, self.name, load_kubeconfig, **options
        )

    def is_good(self) -> bool:
        pair = CertificateStore(self.pki, "kubelet-client").current()
        return is_good(pair, node_subject(self.name), datetime.now(UTC))


@pytest.fixture
def joining(plane: Plane, tmp_path: Path) -> Iterator[Joining]:
    node = Joining(plane, tmp_path)
    yield node
    plane.delete("node", node.name)
    plane.delete("lease", node.name, "kube-node-lease")


def client_of(transport: Transport) -> ApiClient:
    return ApiClient(transport, TokenBucket(-1, 0), timeout=10)


async def until(what: str, look: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while True:
            # A busy API server's refusal is no answer yet.
            with contextlib.suppress(ApiStatusError, *UNREACHABLE):
                if await asyncio.to_thread(look):
                    return
            await asyncio.sleep(0.1)


async def test_bootstrap_token_yields_node_client_certificate(plane: Plane, joining: Joining) -> None:
    access = await joining.ensure()
    async with Transport(access) as transport:
        made = await client_of(transport).create(NODES, Node(metadata=ObjectMeta(name=joining.name)))
    assert made.metadata.name == joining.name
    assert joining.is_good()
    told = plane.kubectl("auth", "whoami", kubeconfig=joining.kubeconfig)
    assert f"system:node:{joining.name}" in told
    # Who has a certificate does not ask for another.
    before = joining.current.readlink()
    assert await joining.ensure() == access
    assert joining.current.readlink() == before


async def test_bootstrap_killed_repeatedly_resumes_with_same_key_and_csr(
    plane: Plane, joining: Joining
) -> None:
    """By SIGKILL at any moment: the next start goes on, with the same key and the same request."""
    arguments = [str(p) for p in (joining.kubeconfig, joining.bootstrap, joining.pki)]
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from pykubelet.config.kubeconfig_file import load_kubeconfig\n"
        "from pykubelet.apiserver.certificates.bootstrap import ensure_client_config\n"
        "files = map(Path, sys.argv[1:4])\n"
        "asyncio.run(ensure_client_config(*files, sys.argv[4], load_kubeconfig))\n"
    )
    chance = random.Random(4)
    keys: set[bytes] = set()
    status: int | None = None
    for attempt in range(8):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, joining.name)
        try:
            status = await asyncio.wait_for(process.wait(), 120 if attempt == 7 else chance.uniform(0.2, 1.5))
        except TimeoutError:
            process.kill()
            await process.wait()
        pending = joining.pki / "kubelet-client.key.tmp"
        if pending.exists():
            keys.add(pending.read_bytes())
    assert status == 0
    assert len(keys) <= 1
    assert joining.is_good()
    assert not (joining.pki / "kubelet-client.key.tmp").exists()
    created = [
        event
        for event in plane.audit(joining.mark)
        if event["verb"] == "create"
        and event["objectRef"]["resource"] == "certificatesigningrequests"
        and event["responseStatus"]["code"] == 201
    ]
    # None, when it was killed before it heard the answer; the next start then found its request there.
    assert len(created) <= 1
    assert f"system:node:{joining.name}" in plane.kubectl("auth", "whoami", kubeconfig=joining.kubeconfig)


async def test_client_certificate_rotation_heartbeats_uninterrupted(plane: Plane, joining: Joining) -> None:
    # Certificates begin five minutes before they are issued: this is two seconds after.
    fraction = (300 + 2) / (300 + 120)
    rotation = joining.rotation(rng=lambda: (fraction - 0.7) / 0.2)
    access = rotation.prepare()
    failures: list[KubeError] = []
    seen: set[str] = set()
    beats = 0

    with plane.signing("2m"):
        async with Transport(access) as transport, TaskScope() as scope:
            client = client_of(transport)
            scope.start(rotation.run(), name="rotation")
            await until("the first certificate", joining.current.exists)
            node = await client.create(NODES, Node(metadata=ObjectMeta(name=joining.name)))

            async def follow(update: StoreDelta[Node]) -> None:
                seen.update(one.metadata.labels.get("step", "") for one in update.changed)

            async def beat() -> None:
                nonlocal beats
                lease: Lease | None = None
                while True:
                    try:
                        now = datetime.now(UTC)
                        lease = await heartbeat(client, joining.name, node.metadata.uid, 40, lease, now)
                        beats += 1
                    except KubeError as err:
                        failures.append(err)
                    await asyncio.sleep(0.1)

            scope.start(beat(), name="heartbeats")
            watch = Reflector(client, NODES, follow, field_selector=f"metadata.name={joining.name}")
            scope.start(watch.run(), name="watch")
            pairs: set[str] = set()

            def rotated() -> bool:
                pairs.add(read_pair(joining.current, joining.current).digest)
                return len(pairs) >= 5

            await until("five certificates", rotated, 110)
            # The watch that was begun four certificates ago still tells.
            await asyncio.to_thread(
                plane.patch, "node", joining.name, "", {"metadata": {"labels": {"step": "last"}}}
            )
            await until("the label", lambda: "last" in seen)
            enough = beats + 3
            await until("more heartbeats", lambda: beats > enough)
    # Whatever a busy API server puts off, it does not miss who asks.
    assert [err for err in failures if not isinstance(err, ServerError | TooManyRequests)] == []
    user = f"system:node:{joining.name}"
    renewals = [event for event in plane.audit(joining.mark) if event["user"]["username"] == user]
    renewals = [event for event in renewals if event.get("objectRef", {}).get("resource") == "leases"]
    # It never says that it does not know who asks.
    codes = {event["responseStatus"]["code"] for event in renewals}
    assert codes & {200, 201}
    assert not codes & {401, 403}
    used = {str(event["user"].get("extra", {})) for event in renewals}
    assert len(used) >= 3


async def test_bootstrap_client_certificate_expired_requests_new_one(plane: Plane, joining: Joining) -> None:
    short = plane.node_kubeconfig(joining.name, timedelta(seconds=1))
    joining.kubeconfig.write_bytes(short.read_bytes())
    await asyncio.sleep(1.2)
    access = await joining.ensure()
    assert access.certificate == joining.current
    assert joining.is_good()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors that were logged; what else is logged depends on the verbosity that others have set."""
    keys = [record.__dict__.get("klog_keys", {}) for record in caplog.records]
    return [str(given["err"]) for given in keys if "err" in given]


async def test_bootstrap_invalid_token_retried_until_valid(
    plane: Plane, joining: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    right = joining.bootstrap.read_bytes()
    joining.bootstrap.write_bytes(plane.bootstrap_kubeconfig("abcdef.0123456789abcdef").read_bytes())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(joining.ensure())
        await until("a complaint", lambda: bool(complaints(caplog)))
        assert not joining.kubeconfig.exists()
        joining.bootstrap.write_bytes(right)
    assert joining.is_good()
    assert "401 Unauthorized" in complaints(caplog)[0]


async def test_serving_certificate_denied_csr_retried_and_new_address_renews(
    plane: Plane, joining: Joining
) -> None:
    addresses = [
        NodeAddress(type="Hostname", address="localhost"),
        NodeAddress(type="InternalIP", address="127.0.0.1"),
    ]

    def pending() -> list[str]:
        return [
            one["metadata"]["name"]
            for one in plane.items(CSR)
            if one["spec"]["username"] == f"system:node:{joining.name}"
            and not one["status"].get("conditions")
        ]

    access = load_kubeconfig(plane.node_kubeconfig(joining.name))
    async with Transport(access) as transport, TaskScope() as scope:
        certificate = RequestedCertificate(client_of(transport), joining.pki, joining.name, lambda: addresses)
        scope.start(certificate.run(), name="serving")
        await until("a request", pending)
        (first,) = await asyncio.to_thread(pending)
        await asyncio.to_thread(plane.kubectl, "certificate", "deny", first)
        # It asks again, with a new key.
        await until("another request", pending)
        (second,) = await asyncio.to_thread(pending)
        assert certificate.current() is None
        await asyncio.to_thread(plane.kubectl, "certificate", "approve", second)
        await until("a certificate", certificate.current)
        # A new address needs a new certificate; the old one serves meanwhile.
        addresses.append(NodeAddress(type="InternalIP", address="10.99.99.99"))
        await until("a third request", pending)
        assert certificate.current() is not None
        (third,) = await asyncio.to_thread(pending)
        await asyncio.to_thread(plane.kubectl, "certificate", "approve", third)
        current = joining.pki / "kubelet-server-current.pem"
        await until("its certificate", lambda: "10.99.99.99" in read_pair(current, current).subject.ips)
    pair = read_pair(current, current)
    assert (pair.subject.dns, pair.subject.ips) == (("localhost",), ("10.99.99.99", "127.0.0.1"))
    requests = [plane.get(CSR, name) for name in (first, second)]
    assert requests[0]["spec"]["request"] != requests[1]["spec"]["request"]
    for name in (first, second, third):
        plane.delete(CSR, name)


@pytest.mark.machine
async def test_bootstrap_started_by_upstream_kubelet_is_completed(
    plane: Plane, joining: Joining, tmp_path: Path
) -> None:
    """And it can use what it then finds: the files and the names of requests are the same."""
    if plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    config = tmp_path / "reference.yaml"
    config.write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "failCgroupV1: false\nfailSwapOn: false\nhealthzPort: 0\n"
        f"containerRuntimeEndpoint: unix://{tmp_path}/none.sock\n"
    )
    command = [
        str(plane.reference_kubelet),
        f"--config={config}",
        f"--bootstrap-kubeconfig={joining.bootstrap}",
        f"--kubeconfig={joining.kubeconfig}",
        f"--cert-dir={joining.pki}",
        f"--root-dir={tmp_path / 'root'}",
        f"--hostname-override={joining.name}",
        "--v=2",
    ]
    told = tmp_path / "reference.log"

    async def run_reference(until_said: str) -> None:
        with told.open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stderr=log)
        try:
            await until(until_said, lambda: until_said in told.read_text())
        finally:
            # Without a runtime it may have given up by now.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    plane.cluster.stop_component(Component.CONTROLLER_MANAGER)
    try:
        await run_reference("Waiting for client certificate to be issued")
    finally:
        plane.cluster.start_component(Component.CONTROLLER_MANAGER)
    key = (joining.pki / "kubelet-client.key.tmp").read_bytes()
    before = {one["metadata"]["name"] for one in plane.items(CSR)}
    await joining.ensure()
    # None is new; the cluster clears away those whose certificates have expired meanwhile.
    assert {one["metadata"]["name"] for one in plane.items(CSR)} <= before
    assert key.strip() in joining.current.read_bytes()
    await run_reference("Kubeconfig exists and is valid, skipping bootstrap")
