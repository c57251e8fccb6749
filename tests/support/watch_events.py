"""Pods and watch events as an API server writes them, and a source that plays a script."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import Page, RawPage, Resource
from pykubelet.apiserver.reflector import StoreDelta, WatchEvent


def pod(
    name: str, version: int | str = 1, uid: str = "", namespace: str = "default", **spec: Any
) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
    }
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {"nodeName": "one", **spec}}


def event(kind: str, obj: Any) -> dict[str, Any]:
    return {"type": kind, "object": obj}


def watch_event(kind: str, obj: Any) -> WatchEvent:
    return msgspec.json.decode(json.dumps(event(kind, obj)).encode(), type=WatchEvent)


def status(code: int, reason: str, **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": "m", "details": details}


class Heard:
    """Follows updates as an owner would, and remembers them."""

    def __init__(self) -> None:
        self.updates: list[StoreDelta[Pod]] = []
        self.pods: dict[str, Pod] = {}

    async def __call__(self, update: StoreDelta[Pod]) -> None:
        self.follow(update)

    def follow(self, update: StoreDelta[Pod]) -> None:
        self.updates.append(update)
        for gone in update.removed:
            assert self.pods.pop(gone.full_name).uid == gone.uid
        for changed in update.changed:
            known = self.pods.get(changed.full_name)
            assert known is None or known.uid == changed.uid
            self.pods[changed.full_name] = changed

    @property
    def versions(self) -> dict[str, str]:
        return {name: found.metadata.resource_version for name, found in self.pods.items()}


Step = Any
"""A page (RawPage), an error to raise, a list of things to stream, or a function that returns one of them."""


class ScriptedSource:
    """Plays an API server without a network; times are of the loop, so looptime applies."""

    def __init__(self, *steps: Step) -> None:
        self.steps = deque(steps)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.times: list[float] = []
        self.pauses: list[float] = []
        self.default: Callable[[], Step] | None = None
        self.streams_lists = False

    def _next(self, verb: str, params: Any) -> Step:
        self.asked.append((verb, dict(params)))
        self.times.append(asyncio.get_running_loop().time())
        if not self.steps and self.default is not None:
            step = self.default()
        else:
            assert self.steps, f"nobody expected to {verb} {dict(params)}"
            step = self.steps.popleft()
        if isinstance(step, BaseException):
            raise step
        return step

    async def list_page(self, resource: Resource[Any], namespace: str, params: Any) -> RawPage:
        step = self._next("list", params)
        assert isinstance(step, Page), f"a list was asked for, not {step}"
        return step

    @asynccontextmanager
    async def watch(
        self, resource: Resource[Any], namespace: str, params: Any, *, seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        step = self._next("watch", params)
        assert isinstance(step, list), f"a watch was asked for, not {step}"
        yield self._stream(step)

    async def _stream(self, steps: list[Any]) -> AsyncIterator[bytes]:
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, int | float):
                await asyncio.sleep(step)
            else:
                yield step if isinstance(step, bytes) else json.dumps(step).encode() + b"\n"

    def disable_streaming(self) -> None:
        self.streams_lists = False

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(seconds)


def page(*objects: Any, version: str = "100", continues: str = "") -> RawPage:
    return Page([msgspec.Raw(json.dumps(obj).encode()) for obj in objects], version, continues)
