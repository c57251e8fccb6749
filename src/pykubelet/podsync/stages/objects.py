"""Stage of the API objects that a pod refers to: cached from the first sync until no container runs."""

from __future__ import annotations

from pykubelet.api.pod import Pod, PodSpec
from pykubelet.objects.base import PodObjects
from pykubelet.podsync.stages.base import Stage


class ObjectStage(Stage):
    """ConfigMaps, secrets and tokens of a pod.

    They are registered before the pod waits for its start slot, so that they are fetched in the meantime.
    """

    name = "objects"

    def __init__(self, objects: PodObjects) -> None:
        self._objects = objects
        self._registered: dict[str, PodSpec] = {}

    def update(self, pod: Pod) -> None:
        """Register the objects of a new spec."""
        if self._registered.get(pod.uid) != pod.spec:
            self._objects.register(pod)
            self._registered[pod.uid] = pod.spec

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Unregister the objects."""
        self._objects.unregister(uid)
        self._registered.pop(uid, None)
