"""SELinux labels of volumes: a volume is mounted with the pod's label instead of relabelling each file.

This is done on a host with SELinux if the volume's plugin supports the mount option `context=`, all
containers that use the volume have the same label, and the pod does not require relabelling
(`seLinuxChangePolicy: Recursive`). The volume must be persistent and of the access mode ReadWriteOncePod;
with the feature gate SELinuxMount, of any access mode. Labels are derived from the host's policy; everything
here is stateless.
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.pod import Pod, SELinuxOptions
from pykubelet.api.storage import READ_WRITE_ONCE_POD
from pykubelet.linux.kernel import FS, has_selinux
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.plugin import VolumeToMount

RECURSIVE = "Recursive"
_POLICIES = Path("/etc/selinux")


def supports_context_mount(volume: VolumeToMount, *, all_modes: bool, fs: Path = FS) -> bool:
    """Return whether a volume may have a label on this host; `all_modes`: the gate SELinuxMount."""
    persistent = volume.persistent
    if persistent is None or volume.block or not has_selinux(fs):
        return False
    return all_modes or persistent.spec.access_modes == [READ_WRITE_ONCE_POD]


def mount_label(volume: VolumeToMount, *, supported: bool, fs: Path = FS, policies: Path = _POLICIES) -> str:
    """Return the SELinux label to mount a volume with; empty to mount it without a label.

    `supported`: whether the volume's plugin supports it. Raises VolumePluginError if containers that use the
    volume have different labels.
    """
    if not has_selinux(fs):
        return ""
    labels = _labels(volume.pod, volume.pod_volume.name, policies)
    if len(labels) > 1:
        raise VolumePluginError(f"multiple SELinux labels found: {','.join(sorted(labels))}")
    if not labels or not supported or _relabels(volume.pod):
        return ""
    (label,) = labels
    return label


def label_conflict(volume: str, known: str, requested: str) -> VolumePluginError:
    """Return the error for a volume that another pod on this node has with another label."""
    return VolumePluginError(f'conflicting SELinux labels of volume {volume}: "{known}" and "{requested}"')


def context_option(label: str) -> str:
    """Return the mount option for a label; it is quoted, because a label may contain a comma."""
    return f'context="{label}"'


def _relabels(pod: Pod) -> bool:
    return pod.spec.security_context.se_linux_change_policy == RECURSIVE


def _labels(pod: Pod, volume: str, policies: Path) -> set[str]:
    """Return the file labels of the containers that use a volume; none without SELinux options.

    A container's own options replace those of the pod, as they do for its processes.
    """
    spec = pod.spec
    found = set()
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if all(mount.name != volume for mount in container.volume_mounts):
            continue
        context = container.security_context
        own = context.se_linux_options if context is not None else None
        options = own if own is not None else spec.security_context.se_linux_options
        if options is not None and (label := _file_label(options, policies)):
            found.add(label)
    return found


def _file_label(options: SELinuxOptions, policies: Path) -> str:
    """Return the label of files for a process with these options; empty without options or a policy."""
    if not (options.user or options.role or options.type or options.level):
        return ""
    default = _default_file_label(policies)
    if default is None:
        return ""
    user, role, kind, level = default
    return ":".join((options.user or user, role, kind, options.level or level))


def _default_file_label(policies: Path) -> tuple[str, str, str, str] | None:
    """Return user, role, type and level of container files in the host's policy; None if not found."""
    try:
        for line in (policies / "config").read_text().splitlines():
            key, _, name = line.partition("=")
            if key.strip() == "SELINUXTYPE":
                contexts = policies / name.strip() / "contexts" / "lxc_contexts"
                return _read_contexts(contexts.read_text())
    except OSError:
        pass
    return None


def _read_contexts(text: str) -> tuple[str, str, str, str] | None:
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "file":
            parts = value.strip().strip('"').split(":", 3)
            if len(parts) == 4:
                return parts[0], parts[1], parts[2], parts[3]
    return None
