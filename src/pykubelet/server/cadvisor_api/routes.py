"""Routes of cAdvisor's REST API: `/metrics` and `/api/`.

| path | response |
|---|---|
| `/metrics` | the metrics of `/metrics/cadvisor` |
| `/api/v1.3/machine`, `/api/v2.0/machine` | hardware, as at `/spec/` |
| `/api/v1.3/containers/PATH` | spec, latest sample and children of a cgroup |
| `/api/v1.3/subcontainers/PATH` | the same of a cgroup and all below it |
| `/api/v2.0/attributes`, `version`, `storage` | host, file systems |
| `/api/v2.0/spec/PATH`, `stats/PATH`, `summary/PATH` | by path; `?recursive=true` includes all below it |
| `/api/v2.1/machinestats`, `stats/PATH` | what cAdvisor's Go client reads |

A cgroup that the kubelet does not sample (one that is neither the root's, a pod's nor a container's) does not
exist here. Documents about many cgroups are rendered and sent in chunks, in the turns and within the limits
that they share with scrapes. `max_age` samples the usage of the requested cgroups again, one per turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from pykubelet.api.meta import to_json
from pykubelet.linux.hardware import Hardware
from pykubelet.server.auth.identity import HttpError
from pykubelet.server.cadvisor_api import documents
from pykubelet.server.cadvisor_api.requests import (
    ApiPath,
    RequestOptions,
    parse_options,
    parse_path,
    read_info_request,
)
from pykubelet.server.cadvisor_api.samples import Document, HostFacts, known, storage_entry
from pykubelet.server.metrics.stats_metrics import ScrapeLimit, StatsSource, cadvisor_routes, send_page
from pykubelet.server.stats import in_chunks
from pykubelet.stats.samples import FilesystemUsage, Record
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.text import quoted

SOURCE_TIMEOUT_SECONDS = 15.0
"""Seconds within which samples must be refreshed."""
_JSON = "application/json"
_BY_UUID = Path("/dev/disk/by-uuid")
_LONGEST_UUID = 64


def cadvisor_api_routes(
    source: StatsSource,
    filesystems: Filesystems,
    machine_info: Callable[[], Awaitable[Hardware]],
    sample_now: Callable[[Iterable[str]], None],
    limit: ScrapeLimit | None = None,
) -> list[web.RouteDef]:
    """Return all routes.

    `machine_info` returns cAdvisor's MachineInfo, `sample_now` samples the usage of cgroups by path
    (`Collector.sample_now`).
    """
    api = CadvisorApi(source, filesystems, machine_info, sample_now, limit or ScrapeLimit())
    return [
        *cadvisor_routes(source, api.limit, path="/metrics"),
        web.get("/api{below:(/.*)?}", api.respond, allow_head=False),
        web.post("/api{below:(/.*)?}", api.respond),
    ]


class CadvisorApi:
    """Handler of all requests below `/api`."""

    def __init__(
        self,
        source: StatsSource,
        filesystems: Filesystems,
        machine_info: Callable[[], Awaitable[Hardware]],
        sample_now: Callable[[Iterable[str]], None],
        limit: ScrapeLimit,
    ) -> None:
        self._source = source
        self._filesystems = filesystems
        self._machine_info = machine_info
        self._sample_now = sample_now
        self.limit = limit

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Respond to a request; raises HttpError for one that cannot be served."""
        path = parse_path(request.path)
        with self.limit.acquire(request):
            pieces = await self._pieces(request, path)
            return await send_page(request, in_chunks(b"", pieces), self.limit, _JSON)

    async def _pieces(self, request: web.Request, path: ApiPath) -> Iterator[bytes]:
        if path.type == "machine":
            return iter([to_json(await self._machine_info())])
        if path.version.startswith("v1"):
            return await self._containers(request, path)
        options = parse_options(request.query)
        match path.type:
            case "version":
                return iter([to_json("")])  # as the kubelet's cAdvisor, which has no version of its own
            case "attributes":
                return iter([to_json(self._attributes(await self._machine_info()))])
            case "storage":
                return await self._storage(request.query.get("label", ""), request.query.get("uuid", ""))
            case "machinestats":
                return await self._machine_stats(options)
            case _:
                return await self._by_path(path, options)

    async def _containers(self, request: web.Request, path: ApiPath) -> Iterator[bytes]:
        wanted = await read_info_request(request)
        host, records = await self._samples()
        children = _children(records)

        def document(record: Record) -> Document:
            below = children.get(record.target.path, ())
            return documents.container_info(record, wanted.select(record.usage), below, host)

        if path.type == "containers":
            found = _exact(records, path.container)
            if found is None:
                name = quoted(path.container)
                raise HttpError(404, f"failed to get container {name} with error: unknown container {name}\n")
            return iter([to_json(document(found))])
        below = _subtree(records, path.container)
        if not below:
            name = quoted(path.container)
            raise HttpError(
                404, f"failed to get subcontainers for container {name} with error: no containers found\n"
            )
        return _array(document(record) for record in below)

    async def _by_path(self, path: ApiPath, options: RequestOptions) -> Iterator[bytes]:
        host, records = await self._samples()
        found = _requested(records, path.container, options)
        if options.max_age is not None:
            await self._refresh(found, options.max_age)
        if path.type == "spec":
            return _object((record, documents.spec_v2(record, host)) for record in found)
        if path.type == "summary":
            return _object((record, documents.derived_stats(record)) for record in found)

        def stats(record: Record, render: Callable[..., Document]) -> list[Document]:
            usage = record.usage if options.count else None
            return [] if usage is None else [render(record, usage, host)]

        if path.version == "v2.0":
            return _object((record, stats(record, documents.stats_v20)) for record in found)
        return _object(
            (
                record,
                {"spec": documents.spec_v2(record, host), "stats": stats(record, documents.stats_v21)},
            )
            for record in found
            if record.target.kind != "root"  # whose samples are at machinestats
        )

    async def _machine_stats(self, options: RequestOptions) -> Iterator[bytes]:
        host, records = await self._samples()
        root = _exact(records, "/")
        if root is None:
            raise HttpError(404, 'unknown container "/"\n')
        if options.max_age is not None:
            await self._refresh([root], options.max_age)
        usage = root.usage if options.count else None
        return _array([] if usage is None else [documents.machine_stats(root, usage, host)])

    async def _storage(self, label: str, uuid: str) -> Iterator[bytes]:
        await self._filesystems.refresh(10.0)
        found = self._filesystems.all()
        if uuid:
            device = await asyncio.to_thread(_device_with_uuid, uuid)
            usage = next((usage for usage in found if usage.device == device), None)
            if usage is None:
                raise HttpError(404, f"no filesystem has the UUID {quoted(uuid)}\n")
            return iter([to_json(storage_entry(usage))])
        entries = [storage_entry(usage) for usage in found]
        if label:
            entries = [entry for entry in entries if label in entry["labels"]]
            if not entries:
                raise HttpError(404, f"no filesystem has the label {quoted(label)}\n")
        return _array(entries)

    def _attributes(self, hardware: Hardware) -> Document:
        """Return Attributes (v2)."""
        facts, inventory = self._source.machine(), msgspec.to_builtins(hardware)
        names = (
            *("num_cores", "cpu_frequency_khz", "memory_capacity", "machine_id", "system_uuid", "hugepages"),
            *("filesystems", "disk_map", "network_devices", "topology", "cloud_provider", "instance_type"),
        )
        versions = {"kernel_version": facts.kernel_version, "container_os_version": facts.os_version}
        return known(versions | {name: inventory.get(name) for name in names})

    async def _samples(self) -> tuple[HostFacts, Sequence[Record]]:
        """Return the facts about the host, and records with details. Raises HttpError (500)."""
        try:
            async with asyncio.timeout(SOURCE_TIMEOUT_SECONDS):
                await self._source.prepare(detailed=True)
        except (OSError, TimeoutError) as err:
            raise HttpError(500, f"failed to read statistics: {str(err) or 'timed out'}\n") from None
        facts = HostFacts(
            machine=self._source.machine(),
            filesystems=_distinct(self._source.filesystems()),
            device_name=self._source.device_name,
            has_pressure=self._source.has_pressure(),
        )
        return facts, self._source.records()

    async def _refresh(self, records: Iterable[Record], max_age: float) -> None:
        for record in records:
            if record.usage is None or record.usage.time < time.time() - max_age:
                path = record.target.path
                await self.limit.turns.take(lambda path=path: self._sample_now([path]))  # type: ignore[misc]


def _requested(records: Sequence[Record], path: str, options: RequestOptions) -> Sequence[Record]:
    """Return the records that the options select. Raises HttpError (400 or 404)."""
    if options.id_type != "name":
        # The containers of a Kubernetes node are in neither namespace.
        if not options.recursive:
            name = quoted(path.removeprefix("/"))
            raise HttpError(404, f"unable to find container {name} in {quoted(options.id_type)} namespace\n")
        if path != "/":
            raise HttpError(
                400, f"invalid request for {options.id_type} container {quoted(path)} with subcontainers\n"
            )
        return ()
    if options.recursive:
        found = _subtree(records, path)
    else:
        exact = _exact(records, path)
        found = [] if exact is None else [exact]
    if not found:
        raise HttpError(404, f"unknown container {quoted(path)}\n")
    return found


def _exact(records: Iterable[Record], path: str) -> Record | None:
    return next((record for record in records if record.target.path == path), None)


def _subtree(records: Iterable[Record], path: str) -> list[Record]:
    below = path.rstrip("/") + "/"
    return [
        record for record in records if record.target.path == path or record.target.path.startswith(below)
    ]


def _children(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the paths directly below each sampled path; cgroups between two sampled ones are skipped."""
    paths = {record.target.path for record in records}
    children: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths - {"/"}):
        parent = path
        while parent != "/":
            parent = parent.rpartition("/")[0] or "/"
            if parent in paths:
                children[parent].append(path)
                break
    return children


def _distinct(filesystems: Iterable[FilesystemUsage]) -> list[FilesystemUsage]:
    return list({usage.device: usage for usage in filesystems}.values())


def _device_with_uuid(uuid: str) -> str:
    """Return the device with the UUID of a file system; empty if there is none. Blocks briefly."""
    if len(uuid) > _LONGEST_UUID or not uuid.replace("-", "").isalnum():
        return ""
    return str((_BY_UUID / uuid).resolve())


def _array(items: Iterable[Document]) -> Iterator[bytes]:
    separator = b"["
    for item in items:
        yield separator + to_json(item)
        separator = b","
    yield b"]" if separator == b"," else b"[]"


def _object(items: Iterable[tuple[Record, object]]) -> Iterator[bytes]:
    separator = b"{"
    for record, value in items:
        yield separator + to_json(record.target.path) + b":" + to_json(value)
        separator = b","
    yield b"}" if separator == b"," else b"{}"
