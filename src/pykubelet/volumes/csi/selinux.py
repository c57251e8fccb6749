"""Mounting volumes with a pod's SELinux label instead of relabelling each file, where the machine has it.

That needs a driver that can (`seLinuxMount`), a volume that no other pod has at the same time
(`ReadWriteOncePod`), and a pod of which all containers that use it have the same label, and that does not
want each file to be relabelled (`seLinuxChangePolicy: Recursive`).
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.pod import Pod, SELinuxOptions
from pykubelet.api.storage import CsiDriverSpec
from pykubelet.host.selinux import FS, has_selinux
from pykubelet.volumes.csi.volume import CsiVolume

RECURSIVE = "Recursive"
_POLICIES = Path("/etc/selinux")


def mount_label(
    volume: CsiVolume, spec: CsiDriverSpec | None, fs: Path = FS, policies: Path = _POLICIES
) -> str:
    """Give the label to mount a volume with; empty when it is not to be mounted with one."""
    if spec is None or not spec.se_linux_mount or volume.access_modes != ("ReadWriteOncePod",):
        return ""
    if volume.wanted.pod.spec.security_context.se_linux_change_policy == RECURSIVE:
        return ""
    options = _options(volume.wanted.pod, volume.wanted.volume.name)
    if options is None or not has_selinux(fs):
        return ""
    default = _file_label(policies)
    if default is None:
        return ""
    user, role, kind, level = default
    return ":".join((options.get("user") or user, role, kind, options.get("level") or level))


def _options(pod: Pod, volume: str) -> dict[str, str] | None:
    """Give the options of the containers that use a volume; None when they have none, or different ones.

    A container's own take the place of the pod's, as they do for its processes.
    """
    spec = pod.spec
    found = set()
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if all(mount.name != volume for mount in container.volume_mounts):
            continue
        context = container.security_context
        own = context.se_linux_options if context is not None else None
        options = own if own is not None else spec.security_context.se_linux_options
        if options is not None:
            found.add(tuple(sorted(_fields(options).items())))
    return (dict(found.pop()) or None) if len(found) == 1 else None


def _fields(options: SELinuxOptions) -> dict[str, str]:
    found = {"user": options.user, "role": options.role, "type": options.type, "level": options.level}
    return {name: value for name, value in found.items() if value}


def _file_label(policies: Path) -> tuple[str, str, str, str] | None:
    """Read the label that the machine's policy gives to containers' files."""
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
