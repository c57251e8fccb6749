"""Mounting volumes with a pod's SELinux label instead of relabelling each file, where the machine has it.

That needs a driver that can (`seLinuxMount`), a volume that no other pod has at the same time
(`ReadWriteOncePod`), and a pod whose containers all have the same label.
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.pod import Pod, SELinuxOptions
from pykubelet.api.storage import CsiDriverSpec
from pykubelet.volumes.csi.volume import CsiVolume

_FS = Path("/sys/fs/selinux")
_POLICIES = Path("/etc/selinux")


def has_selinux(fs: Path = _FS) -> bool:
    """Whether the machine has SELinux."""
    return (fs / "enforce").exists()


def mount_label(
    volume: CsiVolume, spec: CsiDriverSpec | None, fs: Path = _FS, policies: Path = _POLICIES
) -> str:
    """Give the label to mount a volume with; empty when it is not to be mounted with one."""
    if spec is None or not spec.se_linux_mount or volume.access_modes != ("ReadWriteOncePod",):
        return ""
    options = _options(volume.wanted.pod)
    if options is None or not has_selinux(fs):
        return ""
    default = _file_label(policies)
    if default is None:
        return ""
    user, role, kind, level = default
    return ":".join((options.get("user") or user, role, kind, options.get("level") or level))


def _options(pod: Pod) -> dict[str, str] | None:
    """Give the pod's options, with its containers' over them; None when it has none, or they differ."""
    common = _fields(pod.spec.security_context.se_linux_options)
    found = set()
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        context = container.security_context
        own = _fields(context.se_linux_options) if context is not None else {}
        found.add(tuple(sorted((common | own).items())))
    if len(found) != 1:
        return None
    return dict(found.pop()) or None


def _fields(options: SELinuxOptions | None) -> dict[str, str]:
    if options is None:
        return {}
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
