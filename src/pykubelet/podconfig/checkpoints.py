"""Pods of the API server on this node's own disk, so that they survive a reboot without it.

With `--pod-checkpoint-dir`, every pod that the API server bound to this node has a file of its own:
the pod with its last status, and the configMaps, secrets and tokens that it used. One more holds what
the API server said of the node itself, as pods that ask for its labels would be refused without. When the
node comes up and the API server does not answer, the files speak; when it answers, its word wins.

A file is replaced as a whole and reaches the disk before it counts, and goes when its pod goes.
Secrets are in there: the folder and the files are for root only. Writing is done in a thread, a
little later and once for many changes; `run` ends with the last one written.

What pods use of the API server, remembered: the checkpoints answer while the server cannot.

Everything that the API server gives is kept with the pod that asked for it (`checkpoints.py`); when it
cannot give it, the pod gets what it had last. A token of before a reboot may have ended: the pod
starts with it all the same, and gets a new one as soon as there is one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from msgspec import field
from msgspec.structs import replace

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import ObjectMeta, ObjectStruct, from_json, to_json
from pykubelet.api.node import Node, NodeStatus
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.api.selector import LabelSelector
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectError, ObjectNotFound, PodObjects
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
GATHER_SECONDS = 0.5
"""How long changes are gathered before they are written."""
RETRY_SECONDS = 10.0
_SUFFIX, _UNFINISHED = ".json", ".new"
_NODE = "node"
"""The name of the node's own file, among those that are named by pods' uids."""
V = TypeVar("V")


class Checkpoint(ObjectStruct):
    """A pod and what it used, by the objects' names."""

    pod: Pod = field(default_factory=Pod)
    config_maps: dict[str, ConfigMap] = {}
    secrets: dict[str, Secret] = {}
    tokens: dict[str, str] = {}
    trust_bundles: dict[str, str] = {}
    handlers: dict[str, str] = {}
    """Which of the runtime's handlers a RuntimeClass means."""


class Checkpoints:
    """All pods' files in one folder."""

    def __init__(self, folder: Path) -> None:
        """Take the folder; raises OSError when it cannot be made or is not a folder of root's own."""
        self._folder = folder
        _claim(folder)
        self._node: Node | None = None
        self._known = {checkpoint.pod.uid: checkpoint for checkpoint in self._read()}
        self._dirty: set[str] = set()
        self._changed = asyncio.Event()

    def pods(self) -> list[Pod]:
        """The pods as they were last known, oldest first."""
        pods = [checkpoint.pod for checkpoint in self._known.values()]
        return sorted(pods, key=lambda pod: (str(pod.metadata.creation_timestamp), pod.full_name))

    def of(self, uid: str) -> Checkpoint | None:
        """What is known of a pod."""
        return self._known.get(uid)

    @property
    def node(self) -> Node | None:
        """What others said of the node: labels, taints, and resources that only they know."""
        return self._node

    def keep_node(self, node: Node) -> None:
        """Keep what pods are judged by, of a node as the API server has it."""
        meta = ObjectMeta(name=node.metadata.name, uid=node.metadata.uid, labels=node.metadata.labels)
        status = NodeStatus(allocatable=node.status.allocatable, features=node.status.features)
        known = Node(metadata=meta, spec=node.spec, status=status)
        if known != self._node:
            self._node = known
            self._touch(_NODE)

    def keep(self, pod: Pod, status: PodStatus | None = None) -> None:
        """Keep a pod, with the status that this node last gave it where that is newer."""
        known = self._known.setdefault(pod.uid, Checkpoint())
        pod = replace(pod, status=status) if status is not None else pod
        if known.pod != pod:
            known.pod = pod
            self._touch(pod.uid)

    def keep_used(
        self,
        uid: str,
        *,
        config_map: ConfigMap | None = None,
        secret: Secret | None = None,
        token: tuple[str, str] | None = None,
        trust_bundle: tuple[str, str] | None = None,
        handler: tuple[str, str] | None = None,
    ) -> None:
        """Keep something that a pod used; what is unchanged costs nothing."""
        if (known := self._known.get(uid)) is None:
            return
        changed = False
        if config_map is not None:
            changed |= _put(known.config_maps, config_map.metadata.name, config_map)
        if secret is not None:
            changed |= _put(known.secrets, secret.metadata.name, secret)
        if token is not None:
            changed |= _put(known.tokens, *token)
        if trust_bundle is not None:
            changed |= _put(known.trust_bundles, *trust_bundle)
        if handler is not None:
            changed |= _put(known.handlers, *handler)
        if changed:
            self._touch(uid)

    def forget(self, uid: str) -> None:
        """Drop a pod that is gone, with everything it used."""
        if self._known.pop(uid, None) is not None:
            self._touch(uid)

    async def run(self) -> NoReturn:
        """Write what changes until cancelled, and then the rest."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(GATHER_SECONDS)
                files = self._take()
                try:
                    await finish_in_thread(partial(_write, self._folder, files))
                except OSError as err:
                    log.error(err, "Could not write pod checkpoints; will be tried again")
                    self._dirty.update(files)
                    await asyncio.sleep(RETRY_SECONDS)
                    self._changed.set()
        finally:
            self._write_rest()

    def _write_rest(self) -> None:
        try:
            _write(self._folder, self._take())
        except OSError as err:
            log.error(err, "Could not write pod checkpoints before the end")

    def _take(self) -> dict[str, bytes | None]:
        """Give what is to be written, by uid: the file's content, or None for a file that must go."""
        self._changed.clear()
        dirty, self._dirty = self._dirty, set()
        found = {uid: self._node if uid == _NODE else self._known.get(uid) for uid in sorted(dirty)}
        return {uid: None if known is None else to_json(known) for uid, known in found.items()}

    def _touch(self, uid: str) -> None:
        self._dirty.add(uid)
        self._changed.set()

    def _read(self) -> Iterator[Checkpoint]:
        for path in sorted(self._folder.iterdir()):
            if path.suffix == _UNFINISHED:
                path.unlink()  # it was being written when the node went down
            if path.suffix != _SUFFIX:
                continue
            try:
                if path.stem == _NODE:
                    self._node = from_json(Node, path.read_bytes())
                    continue
                checkpoint = from_json(Checkpoint, path.read_bytes())
                if checkpoint.pod.uid != path.stem:
                    raise ValueError(f"it is about the pod {checkpoint.pod.uid or 'of no uid'}")
            except (OSError, ValueError) as err:
                log.error(err, "Ignored a pod checkpoint that cannot be read", path=path)
            else:
                yield checkpoint


def _claim(folder: Path) -> None:
    """Have the folder, for root alone if it holds nothing but checkpoints; raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        # Whoever can write here can have the node run anything.
        raise PermissionError(
            f"--pod-checkpoint-dir {folder}: others may write there, and what lies there will run: "
            f"chown {os.geteuid()} and chmod 700 it, or name another folder"
        )
    # A folder that is somebody else's as well, perhaps by a slip, stays as it is.
    if all(path.suffix in (_SUFFIX, _UNFINISHED) for path in folder.iterdir()):
        folder.chmod(0o700)


def _put(known: dict[str, V], name: str, value: V) -> bool:
    if known.get(name) == value:
        return False
    known[name] = value
    return True


def _write(folder: Path, files: Mapping[str, bytes | None]) -> None:
    for uid, data in files.items():
        path = folder / f"{uid}{_SUFFIX}"
        if data is None:
            path.unlink(missing_ok=True)
        else:
            _replace(path, data)
    if files:
        _sync_folder(folder)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(_UNFINISHED)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        last = look(known) if known is not None and not isinstance(err, ObjectNotFound) else None
        if last is None:
            raise err
        log.v(2).info("Using what a pod had last", pod=pod.full_name, podUID=pod.uid, err=err)
        return last
