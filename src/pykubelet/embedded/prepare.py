"""What has to be decided and written before containerd starts.

Choices are made once and remembered: a pod that runs keeps its address and its layers, whatever the
machine looks like at the next start. The configurations are written anew at every start, so that
they follow the machine and the version of this program.
"""

from ipaddress import IPv4Network

from pykubelet.embedded.containerd_config import containerd_config
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.needs import Machine, choose_snapshotter
from pykubelet.embedded.pod_network import choose_subnet, conflist
from pykubelet.embedded.registry import open_registry
from pykubelet.embedded.state import OUTSIDE, State, before_us, load, save
from pykubelet.host import iptables, links
from pykubelet.host.clock import boot_id
from pykubelet.host.mounts import remove_tree
from pykubelet.logs import get_logger

log = get_logger(__name__)

_ETHERNET_MTU = 1500


async def remember(instance: Instance) -> State:
    """Give the choices of earlier starts, or make them now, one private runtime after the other.

    Raises EmbeddedError when the state is damaged or no network is free.
    """
    kept = load(instance)
    async with open_registry() as registry:
        others = registry.others(instance)
        used = await links.used_networks(except_link=instance.bridge)
        used += [IPv4Network(other.subnet) for other in others]
        if kept is None:
            kept = await _first_choices(instance, others, used)
        else:
            _follow_the_machine(instance, kept, used)
        save(instance, kept)
        registry.enter(instance)
    return kept


async def configure(
    instance: Instance, machine: Machine, kept: State, *, pause_image: str, cgroup_driver: str
) -> None:
    """Write the configurations of the pods' network and of containerd."""
    uplink = await links.uplink_mtu()
    # Larger packets than the way out can carry would be lost or cut.
    mtu = uplink if uplink is not None and uplink < _ETHERNET_MTU else None
    network = conflist(instance, IPv4Network(kept.subnet), mtu)
    (instance.cni_conf / "10-pykubelet.conflist").write_text(network)
    instance.containerd_config.write_text(
        containerd_config(
            instance,
            machine,
            pause_image=pause_image,
            snapshotter=kept.snapshotter,
            cgroup_driver=cgroup_driver,
        )
    )


async def _first_choices(instance: Instance, others: list[State], used: list[IPv4Network]) -> State:
    paths = [str(path) for path in OUTSIDE if path.exists()]
    chains = await iptables.shared_chains_present()
    return State(
        boot_id=boot_id(),
        subnet=str(choose_subnet(used)),
        snapshotter=choose_snapshotter(instance.data_dir),
        found_paths=before_us(paths, [other.found_paths for other in others]),
        found_chains=before_us(chains, [other.found_chains for other in others]),
    )


def _follow_the_machine(instance: Instance, kept: State, used: list[IPv4Network]) -> None:
    """Change what an earlier start chose where the machine leaves no other way."""
    if kept.boot_id != boot_id():
        log.info("The machine was restarted: forgetting the containers of before")
        for stale in (instance.containerd_state, instance.cni_leases):
            remove_tree(stale)
        kept.boot_id = boot_id()
    subnet = IPv4Network(kept.subnet)
    # Pods that have addresses keep them; without a bridge there are none.
    if any(subnet.overlaps(network) for network in used) and not links.link_exists(instance.bridge):
        kept.subnet = str(choose_subnet(used))
        remove_tree(instance.cni_leases)
        log.warning("The pods' network is used by others now: choosing another", was=subnet, now=kept.subnet)
