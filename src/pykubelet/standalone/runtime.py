"""Private runtime of a running kubelet: preparation, start and supervision of containerd.

    async with PrivateRuntime(Instance.at(path)) as runtime:
        await run_kubelet(runtime.endpoint)

If containerd exits it is restarted with exponential back-off, at first after 0.1 seconds; containers are
not affected, since their shims keep running. On exit from the context containerd is stopped and containers
keep running, to be found by the next start. A failed start leaves nothing running, and removes everything
it created if it was the first on this data directory. A containerd that hangs without exiting is not
restarted here: the kubelet detects it through CRI and reports the node as not ready, and only an operator
can decide on a restart.

An iptables rule keeps pods away from services on the node's loopback (CVE-2020-8558). The CNI plugin
`portmap` sets `route_localnet` on the bridge, so that host ports work on 127.0.0.1. With it the kernel
accepts packets for 127.0.0.0/8 from the bridge, which a pod with NET_RAW can send: to services that rely on
being reachable from the node only, such as the read-only port. The upstream kubelet's KUBE-FIREWALL drops
such packets in the INPUT chain unless their source is 127.0.0.0/8, which a pod can forge as well. This rule
drops all of them, before address translation: on the bridge itself no packet of a host port has such a
destination, since replies are addressed to the bridge until they are translated back.

The rule carries the label of the CNI network, by which `pykubelet down` finds and removes it
(`linux.iptables.remove_network`). It stays while the kubelet is stopped, because pods keep running.
`keep_guard` adds it again after another process flushed the iptables rules.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Self

from pykubelet.linux.processes import CommandError, end, run
from pykubelet.logs import get_logger
from pykubelet.standalone import seed_images
from pykubelet.standalone.containerd_config import configure, load_or_create_state
from pykubelet.standalone.daemon import START_TIMEOUT, Daemon, log_is_long, rotate_log, stop_orphans
from pykubelet.standalone.data_dir import claim, closed_directory, hold_lock, make_directories, save_state
from pykubelet.standalone.instance import NAMESPACE, EmbeddedError, Instance
from pykubelet.standalone.requirements import (
    UNKNOWN_VERSION,
    HostRequirements,
    Version,
    format_version,
    inspect_host,
)
from pykubelet.standalone.teardown import (
    dead_sockets,
    delete_container,
    erase,
    find_shims,
    shim_id,
    shim_sockets,
)
from pykubelet.util.backoff import exponential_delay
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
CHECK_SECONDS = 10.0
"""Seconds between checks that the rule exists."""


def guard_rule(instance: Instance) -> list[str]:
    """Return the rule as arguments of iptables, for the chain PREROUTING of the table mangle."""
    label = f'name: "{instance.name}" id: "loopback"'
    match = ["-i", instance.bridge, "-d", "127.0.0.0/8", "-m", "comment", "--comment", label]
    return ["PREROUTING", *match, "-j", "DROP"]


async def ensure_guard(instance: Instance) -> bool:
    """Ensure that the rule exists; return whether it was missing. Raises CommandError."""
    rule = guard_rule(instance)
    command = ("iptables", "--wait", "5", "-t", "mangle")
    try:
        await run(*command, "-C", *rule)
    except CommandError:
        await run(*command, "-I", *rule)
        return True
    return False


async def require_guard(instance: Instance) -> None:
    """Ensure that the rule exists before any pod starts. Raises EmbeddedError."""
    try:
        await ensure_guard(instance)
    except CommandError as err:
        raise EmbeddedError(
            f"cannot protect the node's loopback from pods on {instance.bridge}: {err}; "
            "check that 'iptables -t mangle -S' works as root"
        ) from err


async def keep_guard(instance: Instance, interval: float = CHECK_SECONDS) -> None:
    """Add the rule again whenever it is missing, checking every `interval` seconds, until cancelled."""
    while True:
        await asyncio.sleep(interval)
        try:
            if await ensure_guard(instance):
                log.warning("Restored loopback rule after iptables flush", bridge=instance.bridge)
        except CommandError as err:
            log.error(err, "Failed to restore loopback rule, will retry", bridge=instance.bridge)


_FIRST_WITH_TASK_V3: Version = (2, 0, 0)
_TASK_V3 = 3


def unmanageable_ids(instance: Instance, version: Version) -> set[str]:
    """Return the IDs of the containers whose shims this version of containerd cannot use.

    A shim of containerd 2.x implements version 3 of the task API, which older versions do not have: at their
    start they would kill its containers and leave the shim. 2.x uses the shims of older versions.
    """
    if version >= _FIRST_WITH_TASK_V3 or version == UNKNOWN_VERSION:
        return set()
    found = set()
    for path in (instance.containerd_state / "io.containerd.runtime.v2.task" / NAMESPACE).glob(
        "*/bootstrap.json"
    ):
        try:
            task_version = json.loads(path.read_bytes())["version"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(task_version, int) and task_version >= _TASK_V3:
            found.add(path.parent.name)
    return found


async def end_unmanageable(instance: Instance, host: HostRequirements) -> None:
    """End the containers of a newer containerd, after a downgrade; the kubelet starts their pods again."""
    ids = unmanageable_ids(instance, host.containerd_version)
    if not ids:
        return
    log.warning(
        "Containers of a newer containerd cannot be managed by this one, restarting their pods",
        version=format_version(host.containerd_version),
        containers=len(ids),
    )
    await stop_orphans(instance)
    for id in sorted(ids):
        try:
            await delete_container(instance, id, str(host.programs["runc"]))
        except CommandError as err:
            log.error(err, "Failed to delete the container of a newer containerd", containerID=id)
    for shim in find_shims(instance):
        if shim_id(shim) in ids:
            await end(shim, grace=0)
    for path in dead_sockets(shim_sockets(instance, ids)):
        path.unlink(missing_ok=True)


FIRST_DELAY = 0.1
LONGEST_DELAY = 10.0
HEALTHY_AFTER = 60.0
_LOG_CHECK = 60.0


def exits_in_a_row(before: int, lived: float) -> int:
    """Return the number of successive exits of containerd, given its uptime in seconds before this one."""
    return 1 if lived >= HEALTHY_AFTER else before + 1


class PrivateRuntime:
    """A private containerd, as an async context manager; `cgroup_driver` is `cgroupfs` or `systemd`.

    Entering raises EmbeddedError with one line that contains the cause and a remedy.
    """

    def __init__(
        self, instance: Instance, *, cgroup_driver: str = "cgroupfs", start_timeout: float = START_TIMEOUT
    ) -> None:
        self.instance = instance
        self.endpoint = instance.endpoint
        self.pause_image = seed_images.PAUSE_IMAGE
        self.busybox_image = seed_images.BUSYBOX_IMAGE
        self.restarts = 0
        """Number of restarts of containerd."""
        self.host: HostRequirements | None = None
        """Executables and features of the host, known after the start."""
        self._cgroup_driver = cgroup_driver
        self._start_timeout = start_timeout
        self._daemon: Daemon | None = None
        self._resources = AsyncExitStack()

    @property
    def pid(self) -> int | None:
        """Pid of the running containerd; None if it is not running."""
        return self._daemon.pid if self._daemon is not None else None

    async def __aenter__(self) -> Self:
        if os.geteuid() != 0:
            raise EmbeddedError("root is needed to run containers: use sudo")
        try:
            with ExitStack() as until_failure:
                claim(self.instance)
                until_failure.enter_context(hold_lock(self.instance, "up"))
                tasks = await self._start_or_undo()
                self._resources.push(until_failure.pop_all())
                self._resources.push_async_exit(tasks)
        except CommandError as err:
            raise EmbeddedError(str(err)) from err
        except OSError as err:
            raise EmbeddedError(f"data directory {self.instance.data_dir} cannot be used: {err}") from err
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    async def _start_or_undo(self) -> AsyncExitStack:
        """Start everything and return the stack to close at the end; undo a failed first start."""
        first = not self.instance.state.exists()
        try:
            async with AsyncExitStack() as until_failure:
                await self._start(until_failure)
                return until_failure.pop_all()
        except (EmbeddedError, CommandError, OSError):
            # Manifests are the user's files: a directory that contains any is never removed.
            if first and not _has_entries(self.instance.manifests):
                await erase(self.instance)
            raise

    async def _start(self, resources: AsyncExitStack) -> None:
        host = self.host = await asyncio.to_thread(inspect_host)
        seeds = await seed_images.find_seeds(host)
        make_directories(self.instance)
        if closed := closed_directory(self.instance.containerd):
            log.warning(
                "Other users cannot pass a directory, pods with hostUsers: false do not start",
                path=closed,
                remedy=f"chmod o+x {closed}",
            )
        stored = await load_or_create_state(self.instance)
        await configure(
            self.instance, host, stored, pause_image=self.pause_image, cgroup_driver=self._cgroup_driver
        )
        # Before the CNI plugins can enable route_localnet for the first pod.
        await require_guard(self.instance)
        await end_unmanageable(self.instance, host)
        daemon = Daemon(self.instance, host, start_timeout=self._start_timeout)
        resources.push_async_callback(daemon.stop)
        await daemon.start()
        importer = [
            *(str(host.programs["ctr"]), f"--address={self.instance.socket}", f"--namespace={NAMESPACE}"),
            *("images", "import", f"--snapshotter={stored.snapshotter}", "-"),
        ]
        async with await daemon.connect() as cri:
            stored.seeds = await seed_images.import_images(seeds, stored.seeds, cri, importer)
        save_state(self.instance, stored)
        self._daemon = daemon
        tasks = TaskScope()
        await tasks.__aenter__()
        # An exception in the caller's block must not be raised again by the tasks: they are only cancelled.
        resources.push_async_callback(tasks.__aexit__, None, None, None)
        tasks.start(self._supervise(daemon), name="containerd-supervisor")
        tasks.start(self._rotate_log_periodically(), name="containerd-log")
        tasks.start(keep_guard(self.instance), name="loopback-guard")
        log.info(
            "Started private containerd",
            pid=daemon.pid,
            endpoint=self.endpoint,
            path=host.programs["containerd"],
            version=format_version(host.containerd_version),
        )

    async def _supervise(self, daemon: Daemon) -> None:
        loop = asyncio.get_running_loop()
        exits = 0
        while True:
            since = loop.time()
            status = await daemon.wait()
            exits = exits_in_a_row(exits, loop.time() - since)
            delay = exponential_delay(FIRST_DELAY, LONGEST_DELAY, exits)
            log.error(None, "Private containerd exited, restarting", status=status, delaySeconds=delay)
            await asyncio.sleep(delay)
            try:
                await daemon.start()
            except (EmbeddedError, OSError) as err:
                log.error(err, "Failed to restart private containerd, containers keep running")
                continue
            self.restarts += 1
            log.info("Restarted private containerd", pid=daemon.pid)

    async def _rotate_log_periodically(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK)
            try:
                if log_is_long(self.instance.containerd_log):
                    await asyncio.to_thread(rotate_log, self.instance.containerd_log)
            except OSError as err:
                log.error(err, "Failed to truncate containerd log", path=self.instance.containerd_log)


def _has_entries(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())
