"""Configuration of containerd and of the pod network, written before containerd starts.

Choices (subnet, snapshotter) are made at the first start and stored in the state: running pods keep their
addresses and layers, whatever changes on the host. The configuration files are written at every start, so
that they follow the host and the version of pykubelet.

containerd: all paths are below the data directory, plugins that cost memory or wake up periodically are
disabled, and host features are filled in. The format is version 3 for containerd 2.x and version 2 for older
ones, which refuse to start with a newer format; sections that a version does not know are ignored.

Pod network: one bridge per private runtime with its own /24, masquerading and host ports. IPv4 only,
because a private node serves a single host.
"""

import json
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from pykubelet.linux import iptables
from pykubelet.linux import network as links
from pykubelet.linux.host_info import boot_id
from pykubelet.linux.mounts import remove_tree
from pykubelet.logs import get_logger
from pykubelet.standalone.data_dir import SHARED_DIRECTORIES, State, load_state, preexisting, save_state
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.instance_registry import open_registry
from pykubelet.standalone.requirements import HostRequirements, choose_snapshotter
from pykubelet.util.files import write_if_changed

log = get_logger(__name__)
_OOM_SCORE = -999
"""As in upstream's unit files: the OOM killer must choose containers before their runtime."""
_DISABLED = (
    # Unused file systems; each probes the host at start.
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.zfs",
    # The kubelet restarts containers; this plugin would wake up every ten seconds for nothing.
    "io.containerd.internal.v1.restart",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)
_COMMON = """\
# Written by pykubelet at every start; changes are lost.
version = {version}
root = {root}
state = {state}
oom_score = {oom_score}
disabled_plugins = {disabled}

[grpc]
address = {socket}
uid = 0
gid = 0

[debug]
level = "info"

[plugins."io.containerd.internal.v1.opt"]
path = {opt}

# How much of its time garbage collection may take. It is also how often it looks for work: with the
# usual 0.02 an idle containerd wakes up twenty times a second, with this one once.
[plugins."io.containerd.gc.v1.scheduler"]
pause_threshold = 0.001

[plugins."io.containerd.nri.v1.nri"]
disable = true

[plugins."io.containerd.grpc.v1.cri"]
disable_tcp_service = true
stream_server_address = "127.0.0.1"
stream_server_port = "0"
"""
_VERSION_2 = """\
sandbox_image = {pause_image}
netns_mounts_under_state_dir = true
restrict_oom_score_adj = {restrict_oom}
disable_apparmor = {disable_apparmor}
max_container_log_line_size = 16384
max_concurrent_downloads = 3
tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = {cni_plugin_dir}
conf_dir = {cni_conf}
max_conf_num = 1

# A directory per registry with a hosts.toml, for mirrors and certificates; without it the registry itself.
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = {registry_hosts}

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = {snapshotter}
default_runtime_name = "runc"
"""
_VERSION_3 = """\

[plugins."io.containerd.cri.v1.images"]
snapshotter = {snapshotter}
max_concurrent_downloads = 3

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = {pause_image}

# A directory per registry with a hosts.toml, for mirrors and certificates; without it the registry itself.
[plugins."io.containerd.cri.v1.images".registry]
config_path = {registry_hosts}

[plugins."io.containerd.cri.v1.runtime"]
netns_mounts_under_state_dir = true
restrict_oom_score_adj = {restrict_oom}
disable_apparmor = {disable_apparmor}
max_container_log_line_size = 16384
tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.cri.v1.runtime".cni]
{cni_plugin_dirs}
conf_dir = {cni_conf}
max_conf_num = 1

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
"""
_HANDLER = """\

[plugins.{section}.containerd.runtimes.{name}]
runtime_type = "io.containerd.runc.v2"

[plugins.{section}.containerd.runtimes.{name}.options]
BinaryName = {runc}
Root = {runc_root}
SystemdCgroup = {systemd_cgroup}
"""
_SECTIONS = {2: '"io.containerd.grpc.v1.cri"', 3: '"io.containerd.cri.v1.runtime"'}
"""Section of the runtime handlers by version of the format."""
_FIRST_WITH_VERSION_3 = (2, 0, 0)
_FIRST_WITH_CNI_DIRS = (2, 1, 0)


def config_version(containerd: tuple[int, int, int]) -> int:
    """Return the version of the configuration format for a version of containerd."""
    return 3 if containerd >= _FIRST_WITH_VERSION_3 else 2


def handler_section(instance: Instance, host: HostRequirements, name: str, *, cgroup_driver: str) -> str:
    """Return the section of a runtime handler that runs containers with runc."""
    return _HANDLER.format(
        section=_SECTIONS[config_version(host.containerd_version)],
        name=name,
        runc=toml(host.programs["runc"]),
        runc_root=toml(instance.containerd_state / "runc"),
        systemd_cgroup=toml(cgroup_driver == "systemd"),
    )


def containerd_config(
    instance: Instance, host: HostRequirements, *, pause_image: str, snapshotter: str, cgroup_driver: str
) -> str:
    """Return containerd's configuration; `cgroup_driver` is `cgroupfs` or `systemd`."""
    disabled = (
        [*_DISABLED] if snapshotter == "native" else [*_DISABLED, "io.containerd.snapshotter.v1.native"]
    )
    version = config_version(host.containerd_version)
    plugin_dir = toml(host.cni_plugin_dir)
    several = host.containerd_version >= _FIRST_WITH_CNI_DIRS
    template = _COMMON + {2: _VERSION_2, 3: _VERSION_3}[version]
    text = template.format(
        version=version,
        root=toml(instance.containerd_root),
        state=toml(instance.containerd_state),
        oom_score=_OOM_SCORE if host.may_lower_oom_score else 0,
        disabled=json.dumps(disabled),
        socket=toml(instance.socket),
        opt=toml(instance.containerd / "opt"),
        pause_image=toml(pause_image),
        restrict_oom=toml(not host.may_lower_oom_score),
        disable_apparmor=toml(not host.apparmor),
        cni_plugin_dir=plugin_dir,
        cni_plugin_dirs=f"bin_dirs = [{plugin_dir}]" if several else f"bin_dir = {plugin_dir}",
        cni_conf=toml(instance.cni_conf),
        registry_hosts=toml(instance.registry_hosts),
        snapshotter=toml(snapshotter),
    )
    return text + handler_section(instance, host, "runc", cgroup_driver=cgroup_driver)


def toml(value: str | Path | bool) -> str:
    """Return a value in TOML; its basic strings are JSON's, except for DEL, which TOML must escape."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


_SIZE = 256
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
_FIRST = IPv4Address("10.85.0.0")
"""First candidate: the range that CNI's examples use for pods."""


def choose_subnet(used: Iterable[IPv4Network]) -> IPv4Network:
    """Return the first /24, from 10.85.0.0 on, that overlaps none of the used networks.

    Raises EmbeddedError when every private address is in use.
    """
    networks = sorted(used)
    for first, last in _private_ranges():
        start = first
        while start <= last:
            candidate = IPv4Network((start, 24))
            clash = next((network for network in networks if network.overlaps(candidate)), None)
            if clash is None:
                return candidate
            start = (int(clash.broadcast_address) // _SIZE + 1) * _SIZE
    raise EmbeddedError(
        "no private /24 network is free for pods: every one overlaps a route of this machine (see 'ip route')"
    )


def conflist(instance: Instance, subnet: IPv4Network, mtu: int | None = None) -> str:
    """Return the CNI configuration list of the pod network."""
    bridge: dict[str, object] = {
        "type": "bridge",
        "bridge": instance.bridge,
        "isGateway": True,
        "ipMasq": True,
        # A pod must be able to reach itself through its own host port.
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": str(subnet)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(instance.cni_leases),
        },
    }
    if mtu is not None:
        bridge["mtu"] = mtu
    document = {
        # The newest version that the plugins of all supported distributions implement.
        "cniVersion": "0.4.0",
        "name": instance.name,
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _private_ranges() -> Iterator[tuple[int, int]]:
    for text in _PRIVATE:
        network = IPv4Network(text)
        first = (
            max(int(network.network_address), int(_FIRST))
            if _FIRST in network
            else int(network.network_address)
        )
        yield first, int(network.broadcast_address)


_ETHERNET_MTU = 1500


async def load_or_create_state(instance: Instance) -> State:
    """Return the choices of earlier starts, or make them, while holding the lock of the registry.

    Raises EmbeddedError when the state is damaged or no subnet is free.
    """
    state = load_state(instance)
    async with open_registry() as registry:
        other_states = registry.other_states(instance)
        used = await links.used_networks(except_link=instance.bridge)
        used += [IPv4Network(other.subnet) for other in other_states]
        if state is None:
            state = await _first_choices(instance, other_states, used)
        else:
            _adapt_to_host(instance, state, used)
        save_state(instance, state)
        registry.register(instance)
    return state


async def configure(
    instance: Instance, host: HostRequirements, state: State, *, pause_image: str, cgroup_driver: str
) -> None:
    """Write the configuration files of the pod network and of containerd."""
    uplink = await links.uplink_mtu()
    # Packets above the MTU of the uplink would be dropped or fragmented.
    mtu = uplink if uplink is not None and uplink < _ETHERNET_MTU else None
    network = conflist(instance, IPv4Network(state.subnet), mtu)
    write_if_changed(instance.cni_conf / "10-pykubelet.conflist", network.encode(), 0o644)
    config = containerd_config(
        instance,
        host,
        pause_image=pause_image,
        snapshotter=state.snapshotter,
        cgroup_driver=cgroup_driver,
    )
    write_if_changed(instance.containerd_config, config.encode(), 0o644)


async def _first_choices(instance: Instance, other_states: list[State], used: list[IPv4Network]) -> State:
    paths = [str(path) for path in SHARED_DIRECTORIES if path.exists()]
    chains = await iptables.shared_chains_present()
    return State(
        boot_id=boot_id(),
        subnet=str(choose_subnet(used)),
        snapshotter=choose_snapshotter(instance.data_dir),
        found_paths=preexisting(paths, [other.found_paths for other in other_states]),
        found_chains=preexisting(chains, [other.found_chains for other in other_states]),
    )


def _adapt_to_host(instance: Instance, state: State, used: list[IPv4Network]) -> None:
    """Drop runtime state of an earlier boot, and change the subnet if it conflicts and no pod uses it."""
    if state.boot_id != boot_id():
        log.info("Host was rebooted, removing containerd state of the previous boot")
        for stale in (instance.containerd_state, instance.cni_leases):
            remove_tree(stale)
        state.boot_id = boot_id()
    subnet = IPv4Network(state.subnet)
    # Running pods keep their addresses; without the bridge no pod has one.
    if any(subnet.overlaps(network) for network in used) and not links.link_exists(instance.bridge):
        state.subnet = str(choose_subnet(used))
        remove_tree(instance.cni_leases)
        log.warning("Pod subnet conflicts, chose a new one", oldSubnet=subnet, subnet=state.subnet)
