"""SELinux labels of volumes: a volume is mounted with the pod's label instead of relabelling each file.

This is done on a host with SELinux if the volume's plugin supports the mount option `context=`, all
containers that use the volume have the same label, and the pod does not require relabelling
(`seLinuxChangePolicy: Recursive`). The volume must be persistent and of the access mode ReadWriteOncePod;
with the feature gate SELinuxMount, of any access mode. Labels are derived from the host's policy.

`SELinuxAdmission` counts the volumes with a label, and the label conflicts inside a pod and between pods that
share a volume: errors where labels are used for the mount, warnings for other access modes. Its state is in
memory only; pods of a previous kubelet process are admitted again when their volumes are refreshed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from pykubelet.api.pod import Pod, SELinuxOptions
from pykubelet.api.storage import READ_WRITE_ONCE_POD
from pykubelet.linux.kernel import FS, has_selinux
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.metrics import SELinuxMetrics
from pykubelet.volumes.plugin import VolumePlugin, VolumeToMount

RECURSIVE = "Recursive"
_MODES = (
    ("ReadWriteMany", "RWX"),
    ("ReadOnlyMany", "ROX"),
    ("ReadWriteOnce", "RWO"),
    (READ_WRITE_ONCE_POD, "RWOP"),
)
"""Access modes and their names in metrics; a volume with several counts under the first."""
_POLICIES = Path("/etc/selinux")


class MultipleLabelsError(VolumePluginError):
    """Raised when the containers of a pod that use a volume have different SELinux labels."""


@runtime_checkable
class ContextMountPlugin(Protocol):
    """Volume plugin that can mount volumes with a SELinux label."""

    async def supports_context_mount(self, volume: VolumeToMount) -> bool:
        """Return whether a volume can be mounted with a label. Raises VolumePluginError if unknown."""


@dataclass(slots=True)
class _LabelledVolume:
    label: str
    """Label of the first pod, which the volume would have if labels were used for all access modes."""
    users: set[str] = field(default_factory=set)
    """UIDs of the pods that have the volume."""


class SELinuxAdmission:
    """Check of the SELinux labels of pods' volumes before they are set up, with its metrics."""

    def __init__(
        self, metrics: SELinuxMetrics, *, all_modes: bool, fs: Path = FS, policies: Path = _POLICIES
    ) -> None:
        self._metrics = metrics
        self._all_modes = all_modes
        self._fs = fs
        self._policies = policies
        self._volumes: dict[str, _LabelledVolume] = {}

    async def admit(self, volume: VolumeToMount, plugin: VolumePlugin, plugin_name: str) -> None:
        """Check the labels of a volume; does nothing on a host without SELinux.

        `plugin_name` is the one in metrics. Raises VolumePluginError if the volume would be mounted with a
        label and the containers, or the pods that share it, have different ones.
        """
        if not has_selinux(self._fs):
            return
        supported = isinstance(plugin, ContextMountPlugin) and await plugin.supports_context_mount(volume)
        enforced = supports_context_mount(volume, all_modes=self._all_modes, fs=self._fs)
        # The volume of a pod's own spec is not shared, whatever its name is.
        key = volume.name if volume.persistent is not None else f"{volume.uid}/{volume.name}"
        known, mode = self._volumes.get(key), _access_mode(volume)
        is_new_user = known is None or volume.uid not in known.users
        try:
            label = mount_label(volume, supported=supported, fs=self._fs, policies=self._policies)
        except MultipleLabelsError:
            if enforced:
                self._metrics.pod_errors.labels(mode).inc()
                raise
            label = ""
            if is_new_user:
                self._metrics.pod_warnings.labels(mode).inc()
        if known is None:
            known = self._volumes[key] = _LabelledVolume(label)
            if label:
                self._metrics.admitted.labels(plugin_name, mode).inc()
        elif is_new_user and supported and label != known.label:
            if enforced:
                self._metrics.volume_errors.labels(plugin_name, mode).inc()
                raise label_conflict(volume.name, known.label, label)
            self._metrics.volume_warnings.labels(plugin_name, mode).inc()
        known.users.add(volume.uid)

    def forget(self, uid: str) -> None:
        """Remove a pod, and the volumes that no other pod has."""
        for key, known in list(self._volumes.items()):
            known.users.discard(uid)
            if not known.users:
                del self._volumes[key]


def _access_mode(volume: VolumeToMount) -> str:
    if volume.persistent is None:
        return "inline"
    modes = volume.persistent.spec.access_modes
    return next((name for mode, name in _MODES if mode in modes), "")


def supports_context_mount(volume: VolumeToMount, *, all_modes: bool, fs: Path = FS) -> bool:
    """Return whether a volume may have a label on this host; `all_modes`: the gate SELinuxMount."""
    persistent = volume.persistent
    if persistent is None or volume.block or not has_selinux(fs):
        return False
    return all_modes or persistent.spec.access_modes == [READ_WRITE_ONCE_POD]


def mount_label(volume: VolumeToMount, *, supported: bool, fs: Path = FS, policies: Path = _POLICIES) -> str:
    """Return the SELinux label to mount a volume with; empty to mount it without a label.

    `supported`: whether the volume's plugin supports it. Raises MultipleLabelsError if containers that use
    the volume have different labels.
    """
    if not has_selinux(fs):
        return ""
    labels = _labels(volume.pod, volume.pod_volume.name, policies)
    if len(labels) > 1:
        raise MultipleLabelsError(f"multiple SELinux labels found: {','.join(sorted(labels))}")
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

    Empty options count as an empty label: the runtime chooses the label of that container.

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
        if options is not None:
            found.add(_file_label(options, policies))
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
