"""containerd's configuration for a private runtime.

Everything that it would put at fixed places of the machine is moved below the data directory,
everything that costs memory or wakes up for nothing is switched off, and what depends on the
machine is filled in. Written in version 2 of the format, which containerd 1.3 to 2.x read; the
sections that only newer ones know are ignored by older ones.
"""

import json
from pathlib import Path

from pykubelet.embedded.instance import Instance
from pykubelet.embedded.needs import Machine

_OOM_SCORE = -999
"""As the reference's unit files: the kernel shall take containers before their runtime."""

_DISABLED = (
    # File systems that we do not use; each probes the machine at start.
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.zfs",
    # The agent restarts containers; this one would wake up every ten seconds to find none.
    "io.containerd.internal.v1.restart",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)

_TEMPLATE = """\
# Written by pykubelet at every start; changes are lost.
version = 2
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
sandbox_image = {pause_image}
netns_mounts_under_state_dir = true
restrict_oom_score_adj = {restrict_oom}
disable_apparmor = {disable_apparmor}
disable_tcp_service = true
stream_server_address = "127.0.0.1"
stream_server_port = "0"
max_container_log_line_size = 16384
max_concurrent_downloads = 3
tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = {cni_folder}
conf_dir = {cni_conf}
max_conf_num = 1

# A directory per registry with a hosts.toml, for mirrors and certificates; without it the registry itself.
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = {registry_hosts}

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = {snapshotter}
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = {runc}
Root = {runc_root}
SystemdCgroup = {systemd_cgroup}
"""


def containerd_config(
    instance: Instance, machine: Machine, *, pause_image: str, snapshotter: str, cgroup_driver: str
) -> str:
    """Write the configuration; `cgroup_driver` is `cgroupfs` or `systemd`."""
    disabled = (
        [*_DISABLED] if snapshotter == "native" else [*_DISABLED, "io.containerd.snapshotter.v1.native"]
    )
    return _TEMPLATE.format(
        root=toml(instance.containerd_root),
        state=toml(instance.containerd_state),
        oom_score=_OOM_SCORE if machine.may_lower_oom_score else 0,
        disabled=json.dumps(disabled),
        socket=toml(instance.socket),
        opt=toml(instance.containerd / "opt"),
        pause_image=toml(pause_image),
        restrict_oom=toml(not machine.may_lower_oom_score),
        disable_apparmor=toml(not machine.apparmor),
        cni_folder=toml(machine.cni_folder),
        cni_conf=toml(instance.cni_conf),
        registry_hosts=toml(instance.registry_hosts),
        snapshotter=toml(snapshotter),
        runc=toml(machine.programs["runc"]),
        runc_root=toml(instance.containerd_state / "runc"),
        systemd_cgroup=toml(cgroup_driver == "systemd"),
    )


def toml(value: str | Path | bool) -> str:
    """Write a value in TOML; its basic strings are JSON's, but for one control character."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
