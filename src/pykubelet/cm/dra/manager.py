"""Resource claims on this node: made ready before a pod's containers start, given back after they have ended.

What is guaranteed:

- A claim is known on disk before a driver hears of it, so whatever a driver may have done is undone in the
  end, by this agent or a later one.
- A claim that several pods use is prepared for the first and unprepared after the last; what is done to one
  claim is done one after the other, so that no pod begins to use what is just being taken away.
- A pod that fails the checks leaves no trace, so that it can be deleted although its driver never comes.
- Claims of pods that are gone are given back by `run`, as soon as their drivers are there.

What is asked of which driver, and what drivers' answers mean.

Pure. A driver answers for each claim that it was asked about: with devices, or with a reason why not. One
that leaves a claim out, or speaks of others, has not done what was asked, whatever else it says.
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
    read_state,
    requests_of,
    serves,
    wanted_claims,
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
    """Give the claims that each driver has to do with, in the order of their names."""
    found: dict[str, list[ClaimInfo]] = {}
    for record in records:
        for driver in record.devices:
            found.setdefault(driver, []).append(record)
    return dict(sorted(found.items()))


def read_prepared(
    asked: Sequence[ClaimInfo], answer: pb.NodePrepareResourcesResponse
) -> dict[str, tuple[PreparedDevice, ...]]:
    """Give the devices of each claim by its uid; raises ClaimError unless all were prepared."""
    _check(_PREPARE, asked, answer.claims)
    return {uid: tuple(map(_device, result.devices)) for uid, result in answer.claims.items()}


def check_unprepared(asked: Sequence[ClaimInfo], answer: pb.NodeUnprepareResourcesResponse) -> None:
    """Raise ClaimError unless all claims were given back."""
    _check(_UNPREPARE, asked, answer.claims)


def _check(call: str, asked: Sequence[ClaimInfo], results: Mapping[str, _Result]) -> None:
    names = {record.uid: record.name for record in asked}
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
"""How often claims of pods that are gone are looked for."""
Key = tuple[str, str]
Active = Callable[[], Collection[str] | None]
"""Gives the uids of the pods that may use claims; None while that is not known."""


class Fetch(Protocol):
    """Asks for a claim."""

    def __call__(self, namespace: str, name: str) -> Awaitable[ResourceClaim]:
        """Give it as it is now; raises KubeError."""
        ...


class DraManager:
    """The claims of one node; raises PolicyError when its state file is not sound."""

    def __init__(
        self,
        folder: Path,
        fetch: Fetch,
        drivers: DraPluginRegistry,
        *,
        extended: bool = True,
        metrics: DraMetrics | None = None,
        health: DeviceHealthCache | None = None,
    ) -> None:
        """`folder` is the agent's root; `extended`: whether claims for extended resources count."""
        self.drivers = drivers
        self._path = folder / FILE_NAME
        self._fetch = fetch
        self._extended = extended
        self._metrics = metrics or DraMetrics()
        self._health = health
        self._records: dict[Key, ClaimInfo] = {record.key: record for record in read_state(self._path)}
        # Those that somebody has or waits for: nobody else remembers them.
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._saving = asyncio.Lock()
        self._saved: bytes | None = None
        self._look = asyncio.Event()
        self._metrics.count(self._in_use)
        drivers.listen(self._driver_changed)

    def listen(self, wake: Callable[[str], None], wake_all: Callable[[Iterable[str]], None]) -> None:
        """Take who has pods' workers look again: when a driver has come, or the health of devices changes."""
        self.drivers.wake = wake
        if self._health is not None:
            self._health.changed = lambda driver, devices: wake_all(self.users(driver, devices))

    async def prepare(self, pod: Pod) -> None:
        """Have all claims of a pod ready; raises ClaimError. May be repeated, and cancelled anywhere."""
        with self._metrics.operation("PrepareResources"):
            try:
                if wanted := wanted_claims(pod, extended=self._extended):
                    await self._prepare(pod, [await self._checked(pod, one) for one in wanted])
            except ClaimError as err:
                raise ClaimError(f"prepare dynamic resources: {err}") from err

    async def unprepare(self, uid: str) -> None:
        """Give back whatever a pod has; raises ClaimError. May be repeated, and cancelled anywhere."""
        with self._metrics.operation("UnprepareResources"):
            try:
                await self._unprepare(uid)
            except ClaimError as err:
                raise ClaimError(f"unprepare dynamic resources: {err}") from err

    def cdi_devices(self, pod: Pod, container: Container) -> tuple[str, ...]:
        """Give the CDI names of a container's devices; raises ClaimError when a claim is not ready."""
        found: dict[str, None] = {}
        for name, requests in requests_of(pod, container, extended=self._extended).items():
            record = self._record_of(pod, name)
            for request in requests:
                found |= dict.fromkeys(record.cdi_devices(request))
        return tuple(found)

    def claims(self, pod: Pod, container: Container) -> list[ClaimUse]:
        """Give the claims of a container for the pod-resources API; none that is not ready."""
        try:
            records = [
                self._record_of(pod, name) for name in requests_of(pod, container, extended=self._extended)
            ]
        except ClaimError as err:
            log.v(4).info("A claim is not ready", pod=pod.full_name, container=container.name, err=err)
            return []
        return [_use(record) for record in records]

    def health(self, pod: Pod, container: Container) -> list[ResourceStatus]:
        """Tell how the devices of a container's claims are; nothing where nobody wants to know."""
        if self._health is None or not container.resources.claims:
            return []
        names = dict(claim_names(pod))
        found: dict[str, ResourceStatus] = {}
        for used in container.resources.claims:
            record = self._records.get((pod.metadata.namespace, names.get(used.name, "")))
            if record is None:
                continue
            told = [
                self._health.of(driver, device)
                for driver, devices in sorted(record.devices.items())
                for device in devices
                if serves(used.request, device.requests)
            ]
            if told:
                name = f"claim:{used.name}/{used.request}" if used.request else f"claim:{used.name}"
                each = {one.resource_id: one for one in reversed(told)}
                found[name] = ResourceStatus(name=name, resources=list(reversed(each.values())))
        return list(found.values())

    def users(self, driver: str, devices: Collection[tuple[str, str]]) -> set[str]:
        """Give the uids of the pods that have one of a driver's devices, which are named by pool and name."""
        return {
            uid
            for record in self._records.values()
            if any((one.pool, one.device) in devices for one in record.devices.get(driver, ()))
            for uid in record.pods
        }

    def records(self, uid: str) -> list[ClaimInfo]:
        """Give the claims that a pod has."""
        return [record for record in self._records.values() if uid in record.pods]

    async def run(self, active: Active) -> NoReturn:
        """Give back the claims of pods that are gone, now and then, until cancelled."""
        complaints: dict[str, ErrorLogLimiter] = {}
        clock = asyncio.get_running_loop().time
        while True:
            self._look.clear()
            for uid in self._gone(active()):
                complaint = complaints.setdefault(
                    uid, ErrorLogLimiter(log, "Cannot give back the claims of a pod that is gone", podUID=uid)
                )
                try:
                    await self._unprepare(uid)
                except ClaimError as err:
                    complaint.failed(err, clock())
                else:
                    complaint.succeeded(clock())
                    del complaints[uid]
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._look.wait()
            except TimeoutError:
                continue

    # Preparing

    async def _checked(self, pod: Pod, wanted: PodClaim) -> ClaimInfo:
        """Ask for a claim, and give the record of one that the pod may use and whose drivers are there."""
        try:
            claim = await self._fetch(pod.metadata.namespace, wanted.name)
        except KubeError as err:
            raise ClaimError(f"fetch ResourceClaim {wanted.name}: {err_text(err)}") from err
        drivers = drivers_of(pod, wanted, claim)
        for driver in drivers:
            self.drivers.needed(driver, pod.uid)
        return ClaimInfo(
            pod.metadata.namespace, wanted.name, claim.metadata.uid, devices=dict.fromkeys(drivers, ())
        )

    async def _prepare(self, pod: Pod, fresh: Sequence[ClaimInfo]) -> None:
        async with self._alone(record.key for record in fresh):
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
                    answer = await plugin.prepare(claims)
                except PluginError as err:
                    raise ClaimError(f"NodePrepareResources: {err}") from err
                for uid, devices in read_prepared(claims, answer).items():
                    next(one for one in claims if one.uid == uid).devices[driver] = devices
            for record in due:
                record.prepared = True
            await self._save()

    # Giving back

    async def _unprepare(self, uid: str) -> None:
        self.drivers.forget(uid)
        if not (keys := {record.key for record in self.records(uid)}):
            return
        async with self._alone(keys):
            mine = [record for record in self.records(uid) if record.key in keys]
            last = [record for record in mine if record.pods == {uid}]
            for record in mine:
                if record in last:
                    # A driver that fails may have undone it all the same: whoever comes next asks again.
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

    def _gone(self, active: Collection[str] | None) -> list[str]:
        if active is None:
            return []
        known = {uid for record in self._records.values() for uid in record.pods}
        return sorted(known.difference(active))

    def _driver_changed(self, driver: str, usable: bool) -> None:
        if usable:
            self._look.set()

    # What is known

    @asynccontextmanager
    async def _alone(self, keys: Iterable[Key]) -> AsyncIterator[None]:
        """Have claims for oneself; in one order for all, so that nobody waits for a waiter."""
        async with AsyncExitStack() as stack:
            for key in sorted(set(keys)):
                await stack.enter_async_context(self._locks.setdefault(key, asyncio.Lock()))
            yield

    async def _save(self) -> None:
        """Have the file say what is known, unless it does; raises ClaimError."""
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
        ClaimedDevice(driver, one.pool, one.device, one.cdi_devices, one.share_id)
        for driver, given in sorted(record.devices.items())
        for one in given
    )
    return ClaimUse(record.namespace, record.name, devices)
