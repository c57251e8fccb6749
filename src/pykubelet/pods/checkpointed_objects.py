"""What pods use of the API server, remembered: the checkpoints answer while the server cannot.

Everything that the API server gives is kept with the pod that asked for it (`checkpoints.py`); when it
cannot give it, the pod gets what it had last. A token of before a reboot may have ended: the pod
starts with it all the same, and gets a new one as soon as there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.api.selector import LabelSelector
from pykubelet.logs import get_logger
from pykubelet.pods.checkpoints import Checkpoint, Checkpoints
from pykubelet.pods.objects import ObjectError, ObjectMissing, PodObjects

log = get_logger(__name__)

T = TypeVar("T")
HandlerOf = Callable[[Pod], Awaitable[str]]


class CheckpointedObjects:
    """A `PodObjects` that falls back on the pods' checkpoints."""

    def __init__(self, objects: PodObjects, checkpoints: Checkpoints, handler_of: HandlerOf) -> None:
        self._objects = objects
        self._checkpoints = checkpoints
        self._handler_of = handler_of

    def register(self, pod: Pod) -> None:
        """Keep what a pod refers to from now on."""
        self._objects.register(pod)

    def unregister(self, uid: str) -> None:
        """Let go of what a pod needed."""
        self._objects.unregister(uid)

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Give a configMap, if need be the one that the pod had last."""
        try:
            found = await self._objects.config_map(pod, name)
        except ObjectError as err:
            return self._last(pod, err, lambda known: known.config_maps.get(name))
        self._checkpoints.keep_used(pod.uid, config_map=found)
        return found

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Give a secret, if need be the one that the pod had last."""
        try:
            found = await self._objects.secret(pod, name)
        except ObjectError as err:
            return self._last(pod, err, lambda known: known.secrets.get(name))
        self._checkpoints.keep_used(pod.uid, secret=found)
        return found

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Give a token, if need be the one that the pod had last, which may have ended."""
        key = f"{audience}:{seconds}"
        try:
            found = await self._objects.token(pod, audience=audience, seconds=seconds)
        except ObjectError as err:
            return self._last(pod, err, lambda known: known.tokens.get(key))
        self._checkpoints.keep_used(pod.uid, token=(key, found))
        return found

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Give root certificates, if need be those that the pod had last."""
        key = name or f"{signer}:{to_json(selector).decode()}"
        try:
            found = await self._objects.trust_bundle(pod, name=name, signer=signer, selector=selector)
        except ObjectError as err:
            return self._last(pod, err, lambda known: known.trust_bundles.get(key))
        self._checkpoints.keep_used(pod.uid, trust_bundle=(key, found))
        return found

    async def handler(self, pod: Pod) -> str:
        """Give the runtime handler of the pod's class, if need be the one that the class meant last."""
        name = pod.spec.runtime_class_name
        if not name:
            return ""
        try:
            found = await self._handler_of(pod)
        except ObjectError as err:
            return self._last(pod, err, lambda known: known.handlers.get(name))
        self._checkpoints.keep_used(pod.uid, handler=(name, found))
        return found

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a pod's uid when something that it uses has changed."""
        self._objects.listen(listener)

    def _last(self, pod: Pod, err: ObjectError, look: Callable[[Checkpoint], T | None]) -> T:
        known = self._checkpoints.of(pod.uid)
        last = look(known) if known is not None and not isinstance(err, ObjectMissing) else None
        if last is None:
            raise err
        log.v(2).info("Using what a pod had last", pod=pod.full_name, podUID=pod.uid, err=err)
        return last
