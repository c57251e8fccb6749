"""The private runtime of a running agent: prepared, started, and kept alive.

    async with PrivateRuntime(Instance.at(path)) as runtime:
        await agent(runtime.endpoint)

If containerd dies it is started again, at first after a tenth of a second, then with growing
pauses; the containers do not notice, since their shims live on. When the block is left containerd
is stopped and containers still go on, to be found again by the next one. A start that fails leaves
nothing running, and nothing at all if it was the first on this data directory.

A containerd that hangs without dying is not restarted here: the agent sees it through CRI and
reports the node as not ready, and only a person can know whether a restart helps.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from ipaddress import IPv4Network
from typing import Self

from pykubelet.embedded import claim, lock, needs, pod_network, seed_images, state
from pykubelet.embedded.containerd_config import containerd_config
from pykubelet.embedded.daemon import START_TIMEOUT, Daemon, bound_log
from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import NAMESPACE, Instance
from pykubelet.embedded.registry import open_registry
from pykubelet.embedded.teardown import erase
from pykubelet.host import iptables, links
from pykubelet.host.mounts import remove_tree
from pykubelet.host.processes import CommandError, boot_id
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

FIRST_DELAY = 0.1
LONGEST_DELAY = 10.0
HEALTHY_AFTER = 60.0
_LOG_CHECK = 60.0
_ETHERNET_MTU = 1500


def restart_delay(previous: float, lived: float) -> float:
    """Decide how long to wait before the next start, given the last wait and how long it lived since."""
    if previous == 0 or lived >= HEALTHY_AFTER:
        return FIRST_DELAY
    return min(previous * 2, LONGEST_DELAY)


class PrivateRuntime:
    """A containerd of our own, as an async context manager; `cgroup_driver` is `cgroupfs` or `systemd`.

    Entering raises EmbeddedError, one line with the cause and a remedy.
    """

    def __init__(
        self, instance: Instance, *, cgroup_driver: str = "cgroupfs", start_timeout: float = START_TIMEOUT
    ) -> None:
        self.instance = instance
        self.endpoint = instance.endpoint
        self.pause_image = seed_images.PAUSE_IMAGE
        self.busybox_image = ""
        """Known once it runs: its tag is the version of the machine's busybox."""
        self.restarts = 0
        """How often containerd has been started again."""
        self._cgroup_driver = cgroup_driver
        self._start_timeout = start_timeout
        self._daemon: Daemon | None = None
        self._resources = AsyncExitStack()

    @property
    def pid(self) -> int | None:
        """The containerd that runs now; None while there is none."""
        return self._daemon.pid if self._daemon is not None else None

    async def __aenter__(self) -> Self:
        if os.geteuid() != 0:
            raise EmbeddedError("root is needed to run containers: use sudo")
        machine = needs.inspect_machine()
        try:
            async with AsyncExitStack() as until_failure:
                fresh = claim.claim(self.instance)
                until_failure.enter_context(lock.hold(self.instance, "up"))
                try:
                    await self._start(machine, until_failure)
                except (EmbeddedError, CommandError, OSError):
                    if fresh:
                        await erase(self.instance)
                    raise
                self._resources = until_failure.pop_all()
        except CommandError as err:
            raise EmbeddedError(str(err)) from err
        except OSError as err:
            raise EmbeddedError(f"data directory {self.instance.data_dir} cannot be used: {err}") from err
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    async def _start(self, machine: needs.Machine, resources: AsyncExitStack) -> None:
        seeds = await seed_images.find_seeds(machine)
        claim.make_folders(self.instance)
        kept = await self._remember()
        await self._configure(machine, kept)
        daemon = Daemon(self.instance, machine, start_timeout=self._start_timeout)
        resources.push_async_callback(daemon.stop)
        await daemon.start()
        importer = [
            str(machine.programs["ctr"]),
            "--address",
            str(self.instance.socket),
            "--namespace",
            NAMESPACE,
        ]
        importer += ["images", "import", "--snapshotter", kept.snapshotter, "-"]
        async with await daemon.connect() as cri:
            kept.seeds = await seed_images.plant(seeds, kept.seeds, cri, importer)
        state.save(self.instance, kept)
        self.busybox_image = seeds[-1].name
        self._daemon = daemon
        tasks = TaskScope()
        await tasks.__aenter__()
        # What goes wrong in the owner's block is not the tasks' failure: they only end.
        resources.push_async_callback(tasks.__aexit__, None, None, None)
        tasks.start(self._supervise(daemon), name="containerd-supervisor")
        tasks.start(self._bound_log(), name="containerd-log")
        log.info("The private containerd runs", pid=daemon.pid, endpoint=self.endpoint)

    async def _remember(self) -> state.State:
        """Read or make the state; choices that involve other private runtimes are made one by one."""
        kept = state.load(self.instance)
        async with open_registry() as registry:
            others = registry.others(self.instance)
            used = await links.used_networks(except_link=self.instance.bridge)
            used += [IPv4Network(other.subnet) for other in others]
            if kept is None:
                kept = state.State(
                    boot_id=boot_id(),
                    subnet=str(pod_network.choose_subnet(used)),
                    snapshotter=needs.choose_snapshotter(self.instance.data_dir),
                    found_paths=state.before_us(
                        (str(path) for path in state.OUTSIDE if path.exists()),
                        (other.found_paths for other in others),
                    ),
                    found_chains=state.before_us(
                        await iptables.shared_chains_present(), (other.found_chains for other in others)
                    ),
                )
            else:
                self._refresh(kept, used)
            state.save(self.instance, kept)
            registry.enter(self.instance)
        return kept

    def _refresh(self, kept: state.State, used: list[IPv4Network]) -> None:
        """Adapt what an earlier start chose to a machine that has changed since."""
        if kept.boot_id != boot_id():
            log.info("The machine was restarted: forgetting the containers of before")
            for stale in (self.instance.containerd_state, self.instance.cni_leases):
                remove_tree(stale)
            kept.boot_id = boot_id()
        subnet = IPv4Network(kept.subnet)
        # Pods that have addresses keep them; without a bridge there are none.
        if any(subnet.overlaps(network) for network in used) and not links.link_exists(self.instance.bridge):
            kept.subnet = str(pod_network.choose_subnet(used))
            remove_tree(self.instance.cni_leases)
            log.warning(
                "The pods' network is used by others now: choosing another", was=subnet, now=kept.subnet
            )

    async def _configure(self, machine: needs.Machine, kept: state.State) -> None:
        uplink = await links.uplink_mtu()
        mtu = uplink if uplink is not None and uplink < _ETHERNET_MTU else None
        network = pod_network.conflist(self.instance, IPv4Network(kept.subnet), mtu)
        (self.instance.cni_conf / "10-pykubelet.conflist").write_text(network)
        text = containerd_config(
            self.instance,
            machine,
            pause_image=self.pause_image,
            snapshotter=kept.snapshotter,
            cgroup_driver=self._cgroup_driver,
        )
        self.instance.containerd_config.write_text(text)

    async def _supervise(self, daemon: Daemon) -> None:
        loop = asyncio.get_running_loop()
        delay = 0.0
        while True:
            since = loop.time()
            status = await daemon.wait()
            delay = restart_delay(delay, loop.time() - since)
            log.error(None, "containerd ended: starting it again", status=status, delaySeconds=delay)
            await asyncio.sleep(delay)
            try:
                await daemon.start()
            except (EmbeddedError, OSError) as err:
                log.error(err, "containerd does not start again; containers go on without it")
                continue
            self.restarts += 1
            log.info("containerd is back", pid=daemon.pid)

    async def _bound_log(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK)
            try:
                await asyncio.to_thread(bound_log, self.instance.containerd_log)
            except OSError as err:
                log.error(err, "Could not shorten containerd's log", path=self.instance.containerd_log)
