"""How full those volumes are that are not the node's own: network shares, disks, what drivers give.

A kind that knows better is asked (a CSI driver tells what its storage says). Of all others the file system
is asked, in a thread of its own that nobody has to wait for: a server that is away answers never. It is
not asked again while an old question is open. Of a volume that is a block device only the size is known.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.tasks import in_own_thread
from pykubelet.volumes.holdings import Holding
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.usage import OWN_KINDS, UNMEASURED, Usage
from pykubelet.volumes.usage_count import FileSystem, file_system

log = get_logger(__name__)

ANSWER_SECONDS = 10.0


@runtime_checkable
class Measuring(Protocol):
    """A kind that knows how full its volumes are."""

    async def usage(self, pod: Pod) -> Mapping[str, Usage]:
        """Give the usage of the pod's volumes of this kind, by the pod's names for them; raises nothing."""


class OtherUsage:
    """Measures volumes of other kinds; `held` gives those that a pod has, by its uid."""

    def __init__(
        self,
        held: Callable[[str], Iterable[Holding]],
        kinds: Mapping[str, object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._held = held
        self._kinds = kinds
        self._clock = clock
        self._open: set[str] = set()
        """Paths about which a thread still asks."""

    async def of_pod(self, pod: Pod) -> dict[str, Usage]:
        """Give the usage of a pod's volumes, by name, as far as it can be had; raises nothing."""
        held = [h for h in self._held(pod.uid) if h.wanted.kind not in {*OWN_KINDS, *UNMEASURED}]
        knowing = {
            name: kind
            for name in sorted({holding.wanted.kind for holding in held})
            if isinstance(kind := self._kinds.get(name), Measuring)
        }
        plain = {
            holding.wanted.volume.name: holding.mounted
            for holding in held
            if holding.mounted is not None and holding.wanted.kind not in knowing
        }
        parts = await asyncio.gather(
            *(_asked(kind, pod) for kind in knowing.values()),
            *(self._one(pod, name, mounted) for name, mounted in plain.items()),
        )
        return {name: usage for part in parts for name, usage in part.items()}

    async def _one(self, pod: Pod, name: str, mounted: MountedVolume) -> dict[str, Usage]:
        place = mounted.device or mounted.path
        if not place or place in self._open:
            return {}
        self._open.add(place)

        def ask() -> FileSystem:
            try:
                return _device(place) if mounted.device else file_system(Path(place))
            finally:
                self._open.discard(place)  # only now: whoever asked may long have given up

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await in_own_thread(ask, name=f"usage-{name}", patience=0)
        except (OSError, TimeoutError) as err:
            log.v(4).info(
                "Could not measure a volume",
                pod=pod.full_name,
                podUID=pod.uid,
                volumeName=name,
                err=err if str(err) else "its file system does not answer",
            )
            return {}
        return {name: Usage.of_file_system(found, self._clock())}


async def _asked(kind: Measuring, pod: Pod) -> Mapping[str, Usage]:
    try:
        return await kind.usage(pod)
    except Exception as err:  # anything may go wrong in others' kinds, and the agent has to go on
        log.error(err, "A kind of volumes cannot tell how full they are", pod=pod.full_name, podUID=pod.uid)
        return {}


def _device(path: str) -> FileSystem:
    """Give the size of a block device; raises OSError."""
    device = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.lseek(device, 0, os.SEEK_END)
    finally:
        os.close(device)
    return FileSystem(capacity=size, available=0, used=0, inodes=0, inodes_free=0)
