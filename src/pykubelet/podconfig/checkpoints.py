"""Checkpoints of API server pods and their objects on disk (`--pod-checkpoint-dir`).

They let pods survive a reboot while the API server is unreachable. Every pod that the API server bound to
this node has a file: the pod with its last status, and the configMaps, secrets, tokens, certificates, trust
bundles, claims with their volumes, CSIDrivers and runtime handlers that it used. One more file holds the Node
object as the API server had it, because pods that select node labels would be rejected without it. The API
server's state replaces the checkpoints when it responds.

Files are replaced atomically, fsynced, and removed with their pod. They contain secrets: directory and files
are accessible to root only. Changes are batched and written in a thread; when `run` is cancelled, pending
changes are written before it ends. A failed write is retried.

`CheckpointedObjects` stores every object that the API server returns with the pod that requested it, and
returns the stored one while the API server is unavailable. A token from before a reboot may have expired: the
pod starts nevertheless, and gets a new one as soon as possible.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
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
from pykubelet.api.storage import CsiDriver, PersistentVolume, PersistentVolumeClaim
from pykubelet.api.volume import PodCertificateProjection
from pykubelet.logs import get_logger
from pykubelet.objects.base import (
    CertificateRefused,
    CredentialBundle,
    ObjectError,
    ObjectNotFound,
    PodObjects,
)
from pykubelet.objects.runtime_classes import HandlerLookup
from pykubelet.util.files import fsync_directory, write_atomically
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
GATHER_SECONDS = 0.5
"""Seconds during which changes are collected before they are written."""
RETRY_SECONDS = 10.0
_SUFFIX, _UNFINISHED = ".json", ".new"
_NODE = "node"
"""Stem of the node's file; the other files are named by pod UID."""
V = TypeVar("V")


class BoundClaim(ObjectStruct):
    """A claim and the persistent volume that it is bound to."""

    claim: PersistentVolumeClaim = field(default_factory=PersistentVolumeClaim)
    volume: PersistentVolume = field(default_factory=PersistentVolume)


class Checkpoint(ObjectStruct):
    """A pod and the objects that it used, by name."""

    pod: Pod = field(default_factory=Pod)
    config_maps: dict[str, ConfigMap] = {}
    secrets: dict[str, Secret] = {}
    tokens: dict[str, str] = {}
    trust_bundles: dict[str, str] = {}
    certificates: dict[str, CredentialBundle] = {}
    """Keys and certificates by volume and index of the source."""
    claims: dict[str, BoundClaim] = {}
    csi_drivers: dict[str, CsiDriver] = {}
    handlers: dict[str, str] = {}
    """Runtime handlers by RuntimeClass name."""


class Checkpoints:
    """The checkpoint files of one directory."""

    def __init__(self, directory: Path) -> None:
        """Initialize with a directory. Raises OSError if it cannot be created or others may write to it."""
        self._directory = directory
        _prepare_directory(directory)
        self._node: Node | None = None
        self._known = {checkpoint.pod.uid: checkpoint for checkpoint in self._read()}
        self._dirty: set[str] = set()
        self._changed = asyncio.Event()

    def pods(self) -> list[Pod]:
        """Return the checkpointed pods, oldest first."""
        pods = [checkpoint.pod for checkpoint in self._known.values()]
        return sorted(pods, key=lambda pod: (str(pod.metadata.creation_timestamp), pod.full_name))

    def get(self, uid: str) -> Checkpoint | None:
        """Return the checkpoint of a pod, None if it does not exist."""
        return self._known.get(uid)

    @property
    def node(self) -> Node | None:
        """The checkpointed Node: labels, taints, allocatable and features."""
        return self._node

    def save_node(self, node: Node) -> None:
        """Store the fields of the Node that pod admission needs."""
        meta = ObjectMeta(name=node.metadata.name, uid=node.metadata.uid, labels=node.metadata.labels)
        status = NodeStatus(allocatable=node.status.allocatable, features=node.status.features)
        known = Node(metadata=meta, spec=node.spec, status=status)
        if known != self._node:
            self._node = known
            self._mark_dirty(_NODE)

    def save(self, pod: Pod, status: PodStatus | None = None) -> None:
        """Store a pod, with the status that the kubelet last reported if given."""
        known = self._known.setdefault(pod.uid, Checkpoint())
        pod = replace(pod, status=status) if status is not None else pod
        if known.pod != pod:
            known.pod = pod
            self._mark_dirty(pod.uid)

    def save_used_objects(
        self,
        uid: str,
        *,
        config_map: ConfigMap | None = None,
        secret: Secret | None = None,
        token: tuple[str, str] | None = None,
        trust_bundle: tuple[str, str] | None = None,
        certificate: tuple[str, CredentialBundle] | None = None,
        claim: BoundClaim | None = None,
        csi_driver: CsiDriver | None = None,
        handler: tuple[str, str] | None = None,
    ) -> None:
        """Store objects that a pod used; unchanged ones are not written again."""
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
        if certificate is not None:
            changed |= _put(known.certificates, *certificate)
        if claim is not None:
            changed |= _put(known.claims, claim.claim.metadata.name, claim)
        if csi_driver is not None:
            changed |= _put(known.csi_drivers, csi_driver.metadata.name, csi_driver)
        if handler is not None:
            changed |= _put(known.handlers, *handler)
        if changed:
            self._mark_dirty(uid)

    def forget(self, uid: str) -> None:
        """Remove the checkpoint of a pod."""
        if self._known.pop(uid, None) is not None:
            self._mark_dirty(uid)

    async def run(self) -> NoReturn:
        """Write changes until cancelled, then write the pending ones."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(GATHER_SECONDS)
                files = self._pending_writes()
                try:
                    await finish_in_thread(partial(_write, self._directory, files))
                except OSError as err:
                    log.error(err, "Failed to write pod checkpoints, will retry")
                    self._dirty.update(files)
                    await asyncio.sleep(RETRY_SECONDS)
                    self._changed.set()
        finally:
            self._write_rest()

    def _write_rest(self) -> None:
        try:
            _write(self._directory, self._pending_writes())
        except OSError as err:
            log.error(err, "Failed to write pod checkpoints at shutdown")

    def _pending_writes(self) -> dict[str, bytes | None]:
        """Return the pending writes by UID: the contents of the file, or None to remove it."""
        self._changed.clear()
        dirty, self._dirty = self._dirty, set()
        found = {uid: self._node if uid == _NODE else self._known.get(uid) for uid in sorted(dirty)}
        return {uid: None if known is None else to_json(known) for uid, known in found.items()}

    def _mark_dirty(self, uid: str) -> None:
        self._dirty.add(uid)
        self._changed.set()

    def _read(self) -> Iterator[Checkpoint]:
        for path in sorted(self._directory.iterdir()):
            if path.suffix == _UNFINISHED:
                path.unlink()  # The write was interrupted by a crash.
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
                log.error(err, "Ignored unreadable pod checkpoint", path=path)
            else:
                yield checkpoint


def _prepare_directory(directory: Path) -> None:
    """Create the directory; restrict it to root if it contains only checkpoints. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        # Write access to this directory means control over the pods that the node runs.
        raise PermissionError(
            f"--pod-checkpoint-dir {directory}: others may write there, and what lies there will run: "
            f"chown {os.geteuid()} and chmod 700 it, or name another folder"
        )
    # A directory with other files, possibly configured by mistake, keeps its mode.
    if all(path.suffix in (_SUFFIX, _UNFINISHED) for path in directory.iterdir()):
        directory.chmod(0o700)


def _put(known: dict[str, V], name: str, value: V) -> bool:
    if known.get(name) == value:
        return False
    known[name] = value
    return True


def _write(directory: Path, files: Mapping[str, bytes | None]) -> None:
    for uid, data in files.items():
        path = directory / f"{uid}{_SUFFIX}"
        if data is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, data, temporary=path.with_suffix(_UNFINISHED))
    if files:
        fsync_directory(directory)


T = TypeVar("T")


class CheckpointedObjects:
    """PodObjects that fall back to the pods' checkpoints."""

    def __init__(self, objects: PodObjects, checkpoints: Checkpoints, get_handler: HandlerLookup) -> None:
        self._objects = objects
        self._checkpoints = checkpoints
        self._get_handler = get_handler

    def register(self, pod: Pod) -> None:
        """Cache the objects of a pod from now on."""
        self._objects.register(pod)

    def unregister(self, uid: str) -> None:
        """Release the objects of a pod."""
        self._objects.unregister(uid)

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Return a configMap, or the checkpointed one."""
        try:
            found = await self._objects.config_map(pod, name)
        except ObjectError as err:
            return self._checkpointed(pod, err, lambda known: known.config_maps.get(name))
        self._checkpoints.save_used_objects(pod.uid, config_map=found)
        return found

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Return a secret, or the checkpointed one."""
        try:
            found = await self._objects.secret(pod, name)
        except ObjectError as err:
            return self._checkpointed(pod, err, lambda known: known.secrets.get(name))
        self._checkpoints.save_used_objects(pod.uid, secret=found)
        return found

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Return a token, or the checkpointed one, which may have expired."""
        key = f"{audience}:{seconds}"
        try:
            found = await self._objects.token(pod, audience=audience, seconds=seconds)
        except ObjectError as err:
            return self._checkpointed(pod, err, lambda known: known.tokens.get(key))
        self._checkpoints.save_used_objects(pod.uid, token=(key, found))
        return found

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Return root certificates, or the checkpointed ones."""
        key = name or f"{signer}:{to_json(selector).decode()}"
        try:
            found = await self._objects.trust_bundle(pod, name=name, signer=signer, selector=selector)
        except ObjectError as err:
            return self._checkpointed(pod, err, lambda known: known.trust_bundles.get(key))
        self._checkpoints.save_used_objects(pod.uid, trust_bundle=(key, found))
        return found

    async def pod_certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        """Return a key and its certificate, or the checkpointed ones, which may have expired.

        A refusal of the signer is final: the checkpointed ones are not used then.
        """
        key = f"{volume}:{index}"
        try:
            found = await self._objects.pod_certificate(pod, volume, index, source)
        except ObjectError as err:
            return self._checkpointed(pod, err, lambda known: known.certificates.get(key))
        self._checkpoints.save_used_objects(pod.uid, certificate=(key, found))
        return found

    async def handler(self, pod: Pod) -> str:
        """Return the runtime handler of the pod's RuntimeClass, or the checkpointed one."""
        name = pod.spec.runtime_class_name
        if not name:
            return ""
        try:
            found = await self._get_handler(pod)
        except ObjectError as err:
            return self._checkpointed(pod, err, lambda known: known.handlers.get(name))
        self._checkpoints.save_used_objects(pod.uid, handler=(name, found))
        return found

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a listener, called with the UID of a pod when an object it uses changed."""
        self._objects.add_listener(listener)

    def _checkpointed(self, pod: Pod, err: ObjectError, select: Callable[[Checkpoint], T | None]) -> T:
        known = self._checkpoints.get(pod.uid)
        is_final = isinstance(err, ObjectNotFound | CertificateRefused)
        last = select(known) if known is not None and not is_final else None
        if last is None:
            raise err
        log.v(2).info("Using checkpointed object", pod=pod.full_name, podUID=pod.uid, err=err)
        return last
