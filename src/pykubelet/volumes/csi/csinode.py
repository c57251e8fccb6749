"""CSINode manager: publishes this node's CSI drivers in its CSINode object and in its Node object.

The scheduler and the controllers need each driver's ID of this node, its topology and its volume limit. They
are stored in the CSINode with the node's name, in an annotation of the Node (the IDs of all drivers) and in
labels of the Node (topology). The functions that compute the patches are pure.

Updates run one at a time, each based on the objects that the API server has then, and each is tried TRIES
times. A driver that cannot be published does not register (and is retried), because the scheduler would not
know of it.

A driver reports its volume limit when it registers. If its CSIDriver object requests it
(`nodeAllocatableUpdatePeriodSeconds`), `AttachLimitUpdater` queries the limit again at that period, and after
a volume could not be attached because of the limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from pykubelet.api.meta import ObjectMeta, OwnerReference
from pykubelet.api.storage import CsiNode, CsiNodeDriver, VolumeNodeResources
from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.errors import KubeError, NotFound
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.pluginmanager.registration import RegistrationRefused
from pykubelet.util.backoff import Backoff, ErrorLogLimiter
from pykubelet.util.tasks import wait_seconds
from pykubelet.volumes.csi.drivers import CsiDriverInformer, CsiNodePublisher, Drivers
from pykubelet.volumes.csi.names import CSI_NODES
from pykubelet.volumes.csi.types import NodeFacts
from pykubelet.volumes.operations import run_concurrently

log = get_logger(__name__)
NODE_IDS = "csi.volume.kubernetes.io/nodeid"
MIGRATED = "storage.alpha.kubernetes.io/migrated-plugins"
MIGRATED_PLUGINS = ",".join(
    f"kubernetes.io/{name}"
    for name in (
        "aws-ebs",
        "azure-disk",
        "azure-file",
        "cinder",
        "gce-pd",
        "portworx-volume",
        "vsphere-volume",
    )
)
"""In-tree plugins that every supported Kubernetes version migrates to CSI; read by controllers."""
MAX_COUNT = 2**31 - 1
Patch = dict[str, Any]


class TopologyCollision(Exception):
    """Raised when a driver's topology contradicts a label of the node; the text names the label."""


def blank_csi_node(name: str, node_uid: str) -> CsiNode:
    """Return a CSINode without drivers, owned by the Node."""
    owner = OwnerReference(api_version="v1", kind="Node", name=name, uid=node_uid)
    return CsiNode(
        metadata=ObjectMeta(name=name, owner_references=[owner], annotations={MIGRATED: MIGRATED_PLUGINS})
    )


def belongs_to(found: CsiNode, node_name: str, node_uid: str) -> bool:
    """Return whether a CSINode is owned by this Node, not by an earlier one of the same name."""
    return any(
        (owner.kind, owner.name, owner.uid) == ("Node", node_name, node_uid)
        for owner in found.metadata.owner_references
    )


def annotation_patch(found: CsiNode) -> Patch:
    """Return the CSINode patch that sets the migrated-plugins annotation; empty if it is set."""
    kinds = found.metadata.annotations.get(MIGRATED, "")
    if set(kinds.split(",")) == set(MIGRATED_PLUGINS.split(",")):
        return {}
    return {"metadata": {"annotations": {MIGRATED: MIGRATED_PLUGINS}}}


def install_patch(found: CsiNode, driver: str, facts: NodeFacts) -> Patch:
    """Return the strategic merge patch that adds or updates a driver in a CSINode; empty if unchanged."""
    patch = annotation_patch(found)
    count = min(facts.max_volumes, MAX_COUNT) if facts.max_volumes > 0 else None
    desired = CsiNodeDriver(
        name=driver,
        node_id=facts.node_id,
        topology_keys=sorted(facts.topology),
        allocatable=VolumeNodeResources(count=count) if count is not None else None,
    )
    current = next((known for known in found.spec.drivers if known.name == driver), None)
    if (
        current is None
        or msgspec.structs.replace(current, topology_keys=sorted(current.topology_keys)) != desired
    ):
        entry: Patch = {
            "name": driver,
            "nodeID": facts.node_id,
            "topologyKeys": desired.topology_keys or None,
        }
        entry["allocatable"] = {"count": count} if count is not None else None
        patch["spec"] = {"drivers": [entry]}
    return patch


def uninstall_patch(found: CsiNode, driver: str) -> Patch:
    """Return the strategic merge patch that removes a driver from a CSINode; empty if it is absent."""
    if all(known.name != driver for known in found.spec.drivers):
        return {}
    return {"spec": {"drivers": [{"$patch": "delete", "name": driver}]}}


def node_install_patch(meta: ObjectMeta, driver: str, facts: NodeFacts) -> Patch:
    """Return the Node patch that adds a driver's node ID and topology labels; empty if they are set.

    Raises TopologyCollision, and ValueError if the annotation is malformed.
    """
    for key, value in facts.topology.items():
        if (label := meta.labels.get(key, value)) != value:
            raise TopologyCollision(
                f'detected topology value collision: driver reported "{key}":"{value}" '
                f'but existing label is "{key}":"{label}"'
            )
    ids, patch = _node_ids(meta), Patch()
    if ids.get(driver) != facts.node_id:
        patch["annotations"] = {NODE_IDS: _encode_ids(ids | {driver: facts.node_id})}
    if labels := {key: value for key, value in facts.topology.items() if key not in meta.labels}:
        patch["labels"] = labels
    return {"metadata": patch} if patch else {}


def node_uninstall_patch(meta: ObjectMeta, driver: str) -> Patch:
    """Return the Node patch that removes a driver's node ID; the topology labels stay."""
    ids = _node_ids(meta)
    if driver not in ids:
        return {}
    remaining = {name: value for name, value in ids.items() if name != driver}
    return {"metadata": {"annotations": {NODE_IDS: _encode_ids(remaining) if remaining else None}}}


def _node_ids(meta: ObjectMeta) -> dict[str, str]:
    text = meta.annotations.get(NODE_IDS, "")
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str] | None) or {}
    except msgspec.MsgspecError as err:
        raise ValueError(
            f'failed to parse node\'s "{NODE_IDS}" annotation value ("{text}") err={err}'
        ) from err


def _encode_ids(ids: Mapping[str, str]) -> str:
    return msgspec.json.encode(dict(sorted(ids.items()))).decode()


ATTEMPTS = 4
FIRST_DELAY_SECONDS = 0.01
DELAY_FACTOR = 5.0


class CsiNodeManager(CsiNodePublisher):
    """The `CsiNodePublisher` of a node in a cluster."""

    def __init__(self, api: ApiClient, node_name: str, rng: Callable[[], float] = random.random) -> None:
        self._api = api
        self._name = node_name
        self._rng = rng
        self._lock = asyncio.Lock()
        self.ready = asyncio.Event()
        """Set once the CSINode exists; the scheduler may rely on it from then on."""
        self._seen = asyncio.Event()

    async def initialize(self) -> None:
        """Ensure that the CSINode exists, before any driver registers; retried until it succeeds."""
        backoff, error_log = (
            Backoff(first=0.1, limit=10.0),
            ErrorLogLimiter(log, "Failed to initialize CSINode"),
        )
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with self._lock:
                    found = await self._csi_node()
                    if patch := annotation_patch(found):
                        await self._api.patch(CSI_NODES, self._name, patch)
            except NotFound as err:
                log.v(2).info("Node is not registered yet, waiting to create its CSINode", err=err)
                await self._wait_seen(backoff.next(clock(), type(err)))
            except (KubeError, _Deleted) as err:
                error_log.failed(err, clock())
                await self._api.pause(backoff.next(clock(), type(err)))
            else:
                error_log.succeeded(clock())
                self.ready.set()
                return

    def node_seen(self) -> None:
        """Record that the API server has the Node, so that its CSINode can be created."""
        self._seen.set()

    async def install(self, driver: str, facts: NodeFacts) -> None:
        """Publish a driver, first in the Node, then in the CSINode. Raises RegistrationRefused."""
        if not facts.node_id:
            raise RegistrationRefused("error adding CSI driver node info: driverNodeID must not be empty")

        async def update_node() -> None:
            node = await self._api.get(NODES, self._name)
            if patch := node_install_patch(node.metadata, driver, facts):
                await self._api.patch(NODES, self._name, patch, subresource="status")

        await self._retry("error updating Node object with CSI driver node info", update_node)
        await self.update(driver, facts)

    async def update(self, driver: str, facts: NodeFacts) -> None:
        """Publish a driver in the CSINode, also when its limit changes later. Raises RegistrationRefused."""

        async def update_csi_node() -> None:
            found = await self._csi_node()
            if patch := install_patch(found, driver, facts):
                await self._api.patch(CSI_NODES, self._name, patch)

        await self._retry("error updating CSINode object with CSI driver node info", update_csi_node)

    async def uninstall(self, driver: str, is_gone: Callable[[], bool]) -> None:
        """Withdraw a driver; a failure is logged, and the next registration corrects it."""

        async def update_csi_node() -> None:
            if not is_gone():
                return
            try:
                found = await self._api.get(CSI_NODES, self._name)
            except NotFound:
                return
            if patch := uninstall_patch(found, driver):
                await self._api.patch(CSI_NODES, self._name, patch)

        async def update_node() -> None:
            if not is_gone():
                return
            node = await self._api.get(NODES, self._name)
            if patch := node_uninstall_patch(node.metadata, driver):
                await self._api.patch(NODES, self._name, patch, subresource="status")

        try:
            await self._retry("error uninstalling CSI driver from CSINode object", update_csi_node)
            await self._retry("error removing CSI driver node info from Node object", update_node)
        except RegistrationRefused as err:
            log.error(err, "Failed to remove CSI driver from CSINode and Node", driver=driver)

    async def _wait_seen(self, seconds: float) -> None:
        self._seen.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._seen.wait()

    async def _csi_node(self) -> CsiNode:
        """Return the node's CSINode, created if missing.

        Deletes the CSINode of an earlier Node of the same name and raises _Deleted.
        """
        node = await self._api.get(NODES, self._name)
        try:
            found = await self._api.get(CSI_NODES, self._name)
        except NotFound:
            return await self._api.create(CSI_NODES, blank_csi_node(self._name, node.metadata.uid))
        if not belongs_to(found, self._name, node.metadata.uid):
            await self._api.delete(CSI_NODES, self._name, uid=found.metadata.uid)
            raise _Deleted(f'CSINode "{self._name}" was owned by a different node, deleted it')
        return found

    async def _retry(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        delay, last_error = FIRST_DELAY_SECONDS, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(delay * (1 + 0.1 * self._rng()))
                delay *= DELAY_FACTOR
            try:
                async with self._lock:
                    await work()
            except (KubeError, _Deleted) as err:
                last_error = str(err)
            except (TopologyCollision, ValueError) as err:
                raise RegistrationRefused(f"{what}: {err}") from err
            else:
                return
        raise RegistrationRefused(f"{what}: timed out waiting for the condition; caused by: {last_error}")


class _Deleted(Exception):
    """Raised after a conflicting CSINode was deleted; the caller retries."""


class AttachLimitUpdater:
    """Periodic update of the drivers' volume limits, active while `run` runs."""

    def __init__(self, drivers: Drivers, informer: CsiDriverInformer, node: CsiNodeManager) -> None:
        self._drivers = drivers
        self._informer = informer
        self._node = node
        self._changed = asyncio.Event()
        self._due: dict[str, float] = {}
        drivers.add_listener(self._changed.set)
        informer.add_listener(self._changed.set)

    def period(self, driver: str) -> float:
        """Return the update period of a driver in seconds; 0 if it requests no updates."""
        found = self._informer.cached(driver)
        return float(found.spec.node_allocatable_update_period_seconds or 0) if found is not None else 0.0

    async def refresh(self, driver: str) -> None:
        """Query a driver's limit now and publish it; a failure is logged."""
        client = self._drivers.client(driver)
        if client is None:
            return
        try:
            await self._node.update(driver, await client.info())
        except (PluginError, RegistrationRefused) as err:
            log.error(err, "Failed to update volume limit of CSI driver", driver=driver)

    async def run(self) -> NoReturn:
        """Refresh each driver at its period until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            periods = {name: period for name in self._drivers.names if (period := self.period(name))}
            # A driver's period starts when the driver, or its period, is first seen.
            self._due = {
                name: min(self._due.get(name, clock() + period), clock() + period)
                for name, period in periods.items()
            }
            due = [name for name, due_at in self._due.items() if due_at <= clock()]
            # Concurrently: a driver that hangs does not delay the start of the other calls.
            await run_concurrently([self.refresh(name) for name in due])
            self._due |= {name: clock() + periods[name] for name in due}
            timeout = wait_seconds(min(self._due.values()) - clock()) if self._due else None
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass
