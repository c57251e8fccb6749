"""What a container gets with its devices: the answers of its plugins, put together.

Pure. Two plugins may want the same thing, such as a common library: then it is there once. When they
disagree about it, the first wins, in the order of the resources' names, and the disagreement is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pykubelet.resources import device_plugin_pb2 as pb
from pykubelet.resources.device_table import Holding
from pykubelet.resources.grants import DeviceGrants, DeviceNode, HostMount

T = TypeVar("T")


def grants_of(holdings: Mapping[str, Holding]) -> tuple[DeviceGrants, list[str]]:
    """Put together what a container has, by resource; gives also what its plugins disagree about."""
    env: dict[str, str] = {}
    annotations: dict[str, str] = {}
    devices: dict[str, DeviceNode] = {}
    mounts: dict[str, HostMount] = {}
    cdi: dict[str, None] = {}
    clashes: list[str] = []
    for _, holding in sorted(holdings.items()):
        answer = pb.ContainerAllocateResponse.FromString(holding.answer)
        clashes += _add(env, sorted(answer.envs.items()), "environment variable")
        clashes += _add(annotations, sorted(answer.annotations.items()), "annotation")
        nodes = (DeviceNode(one.host_path, one.container_path, one.permissions) for one in answer.devices)
        clashes += _add(devices, ((node.container_path, node) for node in nodes), "device")
        wanted = (HostMount(one.host_path, one.container_path, one.read_only) for one in answer.mounts)
        clashes += _add(mounts, ((mount.container_path, mount) for mount in wanted), "mount")
        cdi.update(dict.fromkeys(one.name for one in answer.cdi_devices))
    grants = DeviceGrants(
        devices=tuple(devices.values()),
        cdi_devices=tuple(cdi),
        mounts=tuple(mounts.values()),
        env=env,
        annotations=annotations,
    )
    return grants, clashes


def _add(known: dict[str, T], more: Iterable[tuple[str, T]], what: str) -> list[str]:
    return [f"{what} {name}" for name, value in more if known.setdefault(name, value) != value]
