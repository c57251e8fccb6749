"""What of the host a container sees: volumes, its hosts file, its termination log, devices.

The volumes are mounted on the host already; here it is only decided how each appears in the
container. Sub-paths are another matter: they are chosen by the pod's author inside of a volume that
others may write to, so someone must open them safely before (`sub_path` says which path), and hands
the result in with the facts.
"""

from __future__ import annotations

from collections.abc import Mapping

from pykubelet.api.expansion import expand_with
from pykubelet.api.pod import Container, Pod, VolumeMount
from pykubelet.api.text import readable
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.runtime.facts import ContainerFacts, IdMappings
from pykubelet.runtime.hosts_file import wants_hosts_file
from pykubelet.runtime.namespaces import id_messages
from pykubelet.runtime.problems import ConfigProblem, growth_is_a_problem

HOSTS_PATH = "/etc/hosts"

_PROPAGATION = {
    None: cri.PROPAGATION_PRIVATE,
    "None": cri.PROPAGATION_PRIVATE,
    "HostToContainer": cri.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": cri.PROPAGATION_BIDIRECTIONAL,
}


def container_mounts(
    pod: Pod, container: Container, env: Mapping[str, str], facts: ContainerFacts
) -> list[cri.Mount]:
    """Give a container's mounts, in the order of its spec; raises ConfigProblem."""
    mounts = [
        cri.Mount(host_path=grant.host_path, container_path=grant.container_path, readonly=grant.read_only)
        for grant in facts.grants.mounts
    ]
    mounts += [
        _volume_mount(container, index, mount, env, facts)
        for index, mount in enumerate(container.volume_mounts)
    ]
    covered = any(mount.mount_path == HOSTS_PATH for mount in container.volume_mounts)
    if facts.hosts_file and not covered and wants_hosts_file(pod, facts.pod_ips):
        mounts.append(_own_file(facts.hosts_file, HOSTS_PATH, facts))
    if facts.termination_log and container.termination_message_path:
        mounts.append(_own_file(facts.termination_log, _absolute(container.termination_message_path), facts))
    if facts.id_mappings is not None and pod.spec.host_users is False:
        _map_ids(mounts, facts.id_mappings)
    return mounts


def container_devices(container: Container, facts: ContainerFacts) -> list[cri.Device]:
    """Give a container's devices: those it was granted and its block volumes; raises ConfigProblem."""
    devices = [
        cri.Device(host_path=d.host_path, container_path=d.container_path, permissions=d.permissions)
        for d in facts.grants.devices
    ]
    for wish in container.volume_devices:
        if not wish.device_path.startswith("/"):
            raise ConfigProblem(f"error DevicePath `{wish.device_path}` must be an absolute path")
        volume = facts.block_volumes.get(wish.name)
        if volume is None:
            raise ConfigProblem(f'cannot find volume "{wish.name}" to pass into container "{container.name}"')
        devices.append(
            cri.Device(
                host_path=volume.host_path, container_path=wish.device_path, permissions=volume.permissions
            )
        )
    return devices


def sub_path(mount: VolumeMount, env: Mapping[str, str]) -> str:
    """Give the path inside of the volume that a mount shows, "" for the whole volume.

    Raises ConfigProblem when a variable in it has no value or it leads out of the volume.
    """
    path = _expanded(mount.sub_path_expr, env) if mount.sub_path_expr else mount.sub_path
    if path.startswith("/"):
        raise ConfigProblem(f"error SubPath `{readable(path)}` must not be an absolute path")
    if ".." in path.split("/"):
        raise ConfigProblem(f"unable to provision SubPath `{readable(path)}`: must not contain '..'")
    return path


def _expanded(expression: str, env: Mapping[str, str]) -> str:
    missing: set[str] = set()

    def value(name: str) -> str:
        if not env.get(name):
            missing.add(name)
        return env.get(name, "")

    with growth_is_a_problem():
        path = expand_with(expression, value)
    if missing:
        raise ConfigProblem(f"missing value for {', '.join(sorted(missing))}")
    return path


def _volume_mount(
    container: Container, index: int, mount: VolumeMount, env: Mapping[str, str], facts: ContainerFacts
) -> cri.Mount:
    inside = sub_path(mount, env)
    message = cri.Mount(
        container_path=_absolute(mount.mount_path),
        readonly=mount.read_only,
        propagation=_propagation(mount),
        recursive_read_only=_recursive_read_only(mount, facts.recursive_read_only),
    )
    if image := facts.image_volumes.get(mount.name):
        message.image.CopyFrom(image)
        message.image_sub_path = inside
        message.readonly = True
        return message
    volume = facts.volumes.get(mount.name)
    if volume is None:
        raise ConfigProblem(f'cannot find volume "{mount.name}" to mount into container "{container.name}"')
    host_path = facts.sub_paths.get(index) if inside else volume.path
    if host_path is None:
        raise ConfigProblem(
            f'failed to prepare subPath for volumeMount "{mount.name}" of container "{container.name}"'
        )
    message.host_path = host_path
    message.readonly = mount.read_only or volume.read_only
    message.selinux_relabel = volume.relabel and facts.node.selinux
    return message


def _own_file(host_path: str, container_path: str, facts: ContainerFacts) -> cri.Mount:
    return cri.Mount(host_path=host_path, container_path=container_path, selinux_relabel=facts.node.selinux)


def _map_ids(mounts: list[cri.Mount], mappings: IdMappings) -> None:
    """Let the files of each mount belong to the pod's users instead of the host's."""
    for mount in mounts:
        mount.uidMappings.extend(id_messages(mappings.uids))
        mount.gidMappings.extend(id_messages(mappings.gids))


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"


def _propagation(mount: VolumeMount) -> cri.MountPropagation:
    if mount.mount_propagation not in _PROPAGATION:
        raise ConfigProblem(f'invalid MountPropagation mode: "{mount.mount_propagation}"')
    return _PROPAGATION[mount.mount_propagation]


def _recursive_read_only(mount: VolumeMount, supported: bool) -> bool:
    mode = mount.recursive_read_only
    if mode in (None, "Disabled"):
        return False
    problem = ""
    if not mount.read_only:
        problem = "it is not read-only"
    elif mount.mount_propagation not in (None, "None"):
        problem = f'it is not compatible with propagation "{mount.mount_propagation}"'
    elif mode not in ("IfPossible", "Enabled"):
        problem = f'the mode "{mode}" is not known'
    elif mode == "Enabled" and not supported:
        problem = "it is not supported by the runtime"
    if problem:
        raise ConfigProblem(
            "failed to resolve recursive read-only mode: "
            f'volume "{mount.name}" requested recursive read-only mode, but {problem}'
        )
    return supported
