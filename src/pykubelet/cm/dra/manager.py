"""DRA manager: prepares a pod's resource claims before its containers start, unprepares them after.

Guarantees:

- A claim is in the checkpoint before a driver is called, so whatever a driver may have prepared is eventually
  unprepared, by this kubelet process or a later one.
- A claim that several pods use is prepared for the first and unprepared after the last; operations on one
  claim are serialized, so that no pod starts to use a claim that is being unprepared.
- A pod that fails the checks leaves no record, so that it can be deleted although its driver never registers.
- Claims of pods that no longer exist are unprepared by `run`, as soon as their drivers are available.

A driver must return a result for each claim of a request: devices, or an error. A response that omits a
claim, or has others, is an error, whatever else it contains.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn, Protocol
from weakref import WeakValueDictionary

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ResourceStatus
from pykubelet.api.resource_claim import ResourceClaim
from pykubelet.apiserver.client import Resource
from pykubelet.apiserver.errors import KubeError
from pykubelet.cm.dra import dra_pb2 as pb
from pykubelet.cm.dra.claims import (
    FILE_NAME,
    ClaimError,
    ClaimInfo,
    PodClaim,
    PreparedDevice,
    claim_names,
    drivers_of,
    encode,
    pod_claims,
    read_state,
    requests_of,
    serves,
    write_state,
)
from pykubelet.cm.dra.health import DeviceHealthCache
from pykubelet.cm.dra.metrics import ANY_DRIVER, DraMetrics
from pykubelet.cm.dra.plugins import DraPluginRegistry
from pykubelet.cm.podresources.server import ClaimedDevice, ClaimUse
from pykubelet.logs import get_logger
from pykubelet.objects.fetch import err_text
from pykubelet.pluginmanager.client import PluginError
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
_PREPARE, _UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"


class _Result(Protocol):
    @property
    def error(self) -> str: ...


def by_driver(records: Iterable[ClaimInfo]) -> dict[str, list[ClaimInfo]]:
    """Return the claims of each driver, ordered by driver name."""
    found: dict[str, list[ClaimInfo]] = {}
    for record in records:
        for driver in record.devices:
            found.setdefault(driver, []).append(record)
    return dict(sorted(found.items()))


def read_prepared(
    claims: Sequence[ClaimInfo], response: pb.NodePrepareResourcesResponse
) -> dict[str, tuple[PreparedDevice, ...]]:
    """Return the devices of each claim by UID. Raises ClaimError unless all were prepared."""
    _check(_PREPARE, claims, response.claims)
    return {uid: tuple(map(_device, result.devices)) for uid, result in response.claims.items()}


def check_unprepared(claims: Sequence[ClaimInfo], response: pb.NodeUnprepareResourcesResponse) -> None:
    """Raise ClaimError unless all claims were unprepared."""
    _check(_UNPREPARE, claims, response.claims)


def _check(call: str, claims: Sequence[ClaimInfo], results: Mapping[str, _Result]) -> None:
    names = {record.uid: record.name for record in claims}
    for uid in sorted(results):
        if uid not in names:
            raise ClaimError(f"{call} returned result for unknown claim UID {uid}")
        if error := results[uid].error:
            raise ClaimError(f"{call} failed for ResourceClaim {names[uid]}: {error}")
    if left := len(names.keys() - results.keys()):
        raise ClaimError(f"{call} skipped {left} ResourceClaims")


def _device(device: pb.Device) -> PreparedDevice:
    return PreparedDevice(
        device.pool_name,
        device.device_name,
        tuple(device.request_names),
        tuple(device.cdi_device_ids),
        device.share_id if device.HasField("share_id") else None,
    )


RESOURCE_CLAIMS = Resource(ResourceClaim, "ResourceClaim", "resourceclaims", "resource.k8s.io")
SWEEP_SECONDS = 60.0
"""Seconds between checks for claims of pods that no longer exist."""
Key = tuple[str, str]
Active = Callable[[], Collection[str] | None]
"""Callback that returns the UIDs of the pods that may use claims, or None while unknown."""
FetchClaim = Callable[[str, str], Awaitable[ResourceClaim]]
"""Callback that returns the current claim of a namespace and a name. Raises KubeError."""


class DraManager:
    """DRA manager of a node; the constructor raises PolicyError when the state file is invalid."""

    def __init__(
        self,
        directory: Path,
        fetch: FetchClaim,
        drivers: DraPluginRegistry,
        *,
        extended: bool = True,
        pod_groups: bool = False,
        metrics: DraMetrics | None = None,
        health: DeviceHealthCache | None = None,
    ) -> None:
        """Initialize; `directory` is the kubelet's root.

        `extended` enables claims for extended resources, `pod_groups` those of PodGroups.
        """
        self.drivers = drivers
        self._path = directory / FILE_NAME
        self._fetch = fetch
        self._extended = extended
        self._pod_groups = pod_groups
        self._metrics = metrics or DraMetrics()
        self._health = health
        self._records: dict[Key, ClaimInfo] = {record.key: record for record in read_state(self._path)}
        # Weak references: a lock exists only while a task holds it or waits for it.
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._saving = asyncio.Lock()
        self._saved: bytes | None = None
        self._resync = asyncio.Event()
        self._metrics.count(self._in_use)
        drivers.add_listener(self._driver_changed)

    def add_health_listener(self, listener: Callable[[Iterable[str]], None]) -> None:
        """Call `listener` with the UIDs of the pods that use devices whose health changed."""
        if self._health is not None:
            self._health.add_listener(lambda driver, devices: listener(self.users(driver, devices)))

    async def prepare(self, pod: Pod) -> None:
        """Prepare all claims of a pod. Raises ClaimError. Idempotent, and may be cancelled at any point."""
        with self._metrics.operation("PrepareResources"):
            try:
                if claims := pod_claims(pod, extended=self._extended):
                    await self._prepare(pod, [await self._checked(pod, claim) for claim in claims])
            except ClaimError as err:
                raise ClaimError(f"prepare dynamic resources: {err}") from err

    async def unprepare(self, uid: str) -> None:
        """Unprepare all claims of a pod. Raises ClaimError. Idempotent, and may be cancelled at any point."""
        with self._metrics.operation("UnprepareResources"):
            try:
                await self._unprepare(uid)
            except ClaimError as err:
                raise ClaimError(f"unprepare dynamic resources: {err}") from err

    def cdi_devices(self, pod: Pod, container: Container) -> tuple[str, ...]:
        """Return the CDI names of a container's devices. Raises ClaimError when a claim has no record."""
        found: dict[str, None] = {}
        for name, requests in requests_of(pod, container, extended=self._extended).items():
            record = self._record_of(pod, name)
            for request in requests:
                found |= dict.fromkeys(record.cdi_devices(request))
        return tuple(found)

    def claims(self, pod: Pod, container: Container) -> list[ClaimUse]:
        """Return a container's claims for the pod-resources API; empty while one of them has no record."""
        try:
            records = [
                self._record_of(pod, name) for name in requests_of(pod, container, extended=self._extended)
            ]
        except ClaimError as err:
            log.v(4).info(
                "Resource claim is not prepared", pod=pod.full_name, containerName=container.name, err=err
            )
            return []
        return [_use(record) for record in records]

    def health(self, pod: Pod, container: Container) -> list[ResourceStatus]:
        """Return the health of the devices of a container's claims; empty if health is not tracked."""
        if self._health is None or not container.resources.claims:
            return []
        names = dict(claim_names(pod))
        found: dict[str, ResourceStatus] = {}
        for used in container.resources.claims:
            record = self._records.get((pod.metadata.namespace, names.get(used.name, "")))
            if record is None:
                continue
            reports = [
                self._health.health_of(driver, device)
                for driver, devices in sorted(record.devices.items())
                for device in devices
                if serves(used.request, device.requests)
            ]
            if reports:
                name = f"claim:{used.name}/{used.request}" if used.request else f"claim:{used.name}"
                by_id = {report.resource_id: report for report in reversed(reports)}
                found[name] = ResourceStatus(name=name, resources=list(reversed(by_id.values())))
        return list(found.values())

    def users(self, driver: str, devices: Collection[tuple[str, str]]) -> set[str]:
        """Return the UIDs of the pods that use one of a driver's devices (pool and name)."""
        return {
            uid
            for record in self._records.values()
            if any((device.pool, device.device) in devices for device in record.devices.get(driver, ()))
            for uid in record.pods
        }

    def records(self, uid: str) -> list[ClaimInfo]:
        """Return the claims of a pod."""
        return [record for record in self._records.values() if uid in record.pods]

    async def run(self, active: Active) -> NoReturn:
        """Unprepare the claims of pods that no longer exist, until cancelled.

        Runs every SWEEP_SECONDS, and when a driver becomes usable.
        """
        error_logs: dict[str, ErrorLogLimiter] = {}
        clock = asyncio.get_running_loop().time
        while True:
            self._resync.clear()
            for uid in self._removed_pods(active()):
                error_log = error_logs.setdefault(
                    uid,
                    ErrorLogLimiter(
                        log, "Failed to unprepare resource claims of removed pod, will retry", podUID=uid
                    ),
                )
                try:
                    await self._unprepare(uid)
                except ClaimError as err:
                    error_log.failed(err, clock())
                else:
                    error_log.succeeded(clock())
                    del error_logs[uid]
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._resync.wait()
            except TimeoutError:
                continue

    # Preparing

    async def _checked(self, pod: Pod, pod_claim: PodClaim) -> ClaimInfo:
        """Fetch a claim and return its record, if the pod may use it and its drivers are registered."""
        try:
            claim = await self._fetch(pod.metadata.namespace, pod_claim.name)
        except KubeError as err:
            raise ClaimError(f"fetch ResourceClaim {pod_claim.name}: {err_text(err)}") from err
        drivers = drivers_of(pod, pod_claim, claim, pod_groups=self._pod_groups)
        for driver in drivers:
            self.drivers.needed(driver, pod.uid)
        return ClaimInfo(
            pod.metadata.namespace, pod_claim.name, claim.metadata.uid, devices=dict.fromkeys(drivers, ())
        )

    async def _prepare(self, pod: Pod, fresh: Sequence[ClaimInfo]) -> None:
        async with self._locked(record.key for record in fresh):
            for record in fresh:
                known = self._records.get(record.key)
                if known is not None and known.uid != record.uid:
                    raise ClaimError(
                        f"old ResourceClaim with same name {known.name} and different UID {known.uid} "
                        "still exists (previous pod force-deleted?!)"
                    )
            mine = [self._records.setdefault(record.key, record) for record in fresh]
            for record in mine:
                record.pods.add(pod.uid)
            await self._save()
            due = [record for record in mine if not record.prepared]
            for driver, claims in by_driver(due).items():
                plugin = self.drivers.needed(driver, pod.uid)
                try:
                    response = await plugin.prepare(claims)
                except PluginError as err:
                    raise ClaimError(f"NodePrepareResources: {err}") from err
                for uid, devices in read_prepared(claims, response).items():
                    next(claim for claim in claims if claim.uid == uid).devices[driver] = devices
            for record in due:
                record.prepared = True
            await self._save()

    # Unpreparing

    async def _unprepare(self, uid: str) -> None:
        self.drivers.forget(uid)
        if not (keys := {record.key for record in self.records(uid)}):
            return
        async with self._locked(keys):
            mine = [record for record in self.records(uid) if record.key in keys]
            last = [record for record in mine if record.pods == {uid}]
            for record in mine:
                if record in last:
                    # A driver that fails may have unprepared it nevertheless: the next pod prepares it again.
                    record.prepared = False
                else:
                    record.pods.discard(uid)
            failed: dict[str, str] = {}
            for driver, claims in by_driver(last).items():
                try:
                    check_unprepared(claims, await self.drivers.get(driver).unprepare(claims))
                except PluginError as err:
                    failed[driver] = f"NodeUnprepareResources: {err}"
                except ClaimError as err:
                    failed[driver] = str(err)
            for record in last:
                if not record.devices.keys() & failed.keys():
                    del self._records[record.key]
            await self._save()
        if failed:
            raise ClaimError("; ".join(failed.values()))

    def _removed_pods(self, active: Collection[str] | None) -> list[str]:
        if active is None:
            return []
        known = {uid for record in self._records.values() for uid in record.pods}
        return sorted(known.difference(active))

    def _driver_changed(self, driver: str, usable: bool) -> None:
        if usable:
            self._resync.set()

    # Records

    @asynccontextmanager
    async def _locked(self, keys: Iterable[Key]) -> AsyncIterator[None]:
        """Lock these claims within the block, in sorted order to avoid deadlocks."""
        async with AsyncExitStack() as stack:
            for key in sorted(set(keys)):
                await stack.enter_async_context(self._locks.setdefault(key, asyncio.Lock()))
            yield

    async def _save(self) -> None:
        """Write the state file if its content changed. Raises ClaimError."""
        async with self._saving:
            content = encode(self._records.values())
            if content == self._saved:
                return
            try:
                await finish_in_thread(lambda: write_state(self._path, content))
            except OSError as err:
                raise ClaimError(f"checkpoint ResourceClaim state: {err}") from err
            self._saved = content

    def _record_of(self, pod: Pod, name: str) -> ClaimInfo:
        record = self._records.get((pod.metadata.namespace, name))
        if record is None:
            raise ClaimError(f"unable to get information for ResourceClaim {name}")
        return record

    def _in_use(self) -> Mapping[str, int]:
        counts = Counter({ANY_DRIVER: 0})
        for record in self._records.values():
            if record.prepared:
                counts.update((ANY_DRIVER, *record.devices))
        return counts


def _use(record: ClaimInfo) -> ClaimUse:
    devices = tuple(
        ClaimedDevice(driver, device.pool, device.device, device.cdi_devices, device.share_id)
        for driver, prepared in sorted(record.devices.items())
        for device in prepared
    )
    return ClaimUse(record.namespace, record.name, devices)
