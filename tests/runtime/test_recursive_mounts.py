"""Mounts that are read-only all the way down: as far as the handler of the pod's sandbox can make them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.images import PresentImage
from pykubelet.pods.journal import Journal
from pykubelet.runtime.facts import NodeFacts
from pykubelet.runtime.node_facts import recursive_handlers
from pykubelet.runtime.observe import Observer
from pykubelet.runtime.observed import ObservedPod
from pykubelet.runtime.pod_dirs import PodDirs
from pykubelet.runtime.start import PodSetting, Starter, StartError
from pykubelet.volumes.mounted import MountedVolume
from tests.runtime.making import make_pod

RUNTIME = pb.StatusResponse(
    runtime_handlers=[
        pb.RuntimeHandler(name="", features=pb.RuntimeHandlerFeatures(recursive_read_only_mounts=True)),
        pb.RuntimeHandler(name="kata"),
    ]
)


class Runtime:
    """A runtime that keeps the last request for a container; its sandbox runs with some handler."""

    def __init__(self, handler: str) -> None:
        self._handler = handler
        self.config = pb.ContainerConfig()

    async def pod_sandbox_status(self, sandbox_id: str) -> pb.PodSandboxStatusResponse:
        return pb.PodSandboxStatusResponse(
            status=pb.PodSandboxStatus(id=sandbox_id, runtime_handler=self._handler)
        )

    async def create_container(self, _: str, config: pb.ContainerConfig, *__: object) -> str:
        self.config = config
        return "id"

    async def start_container(self, _: str) -> None:
        pass


async def start(root: Path, mode: str, handler: str, node: NodeFacts) -> pb.Mount:
    runtime = Runtime(handler)
    cri, nothing = cast(Any, SimpleNamespace(runtime=runtime)), cast(Any, None)
    observer, dirs = Observer(cri), PodDirs(root)
    await observer.new_sandbox("sandbox")
    starter = Starter(
        cri,
        observer,
        node,
        dirs,
        nothing,
        nothing,
        nothing,
        Journal(),
        lambda *_: None,
        nothing,
        lambda: None,
        None,
    )
    mount = {"name": "v", "mountPath": "/v", "readOnly": True, "recursiveReadOnly": mode}
    container = from_document(Container, {"name": "main", "volumeMounts": [mount]})
    pod = make_pod(container)
    await starter.container(
        pod,
        container,
        PresentImage("sha256:x", 0, ""),
        "sandbox",
        pb.PodSandboxConfig(),
        PodSetting("/kubepods", {"v": MountedVolume(str(root))}),
        (),
        ObservedPod(uid=pod.uid),
    )
    (made,) = [mount for mount in runtime.config.mounts if mount.container_path == "/v"]
    return made


@pytest.mark.parametrize(("handler", "recursive"), [("", True), ("kata", False), ("unheard-of", False)])
async def test_if_possible(tmp_path: Path, handler: str, recursive: bool) -> None:
    node = NodeFacts(pod_logs_dir=str(tmp_path / "logs"), recursive_handlers=recursive_handlers(RUNTIME))
    made = await start(tmp_path, "IfPossible", handler, node)
    assert (made.readonly, made.recursive_read_only) == (True, recursive)


async def test_where_it_has_to_be(tmp_path: Path) -> None:
    node = NodeFacts(pod_logs_dir=str(tmp_path / "logs"), recursive_handlers=recursive_handlers(RUNTIME))
    assert (await start(tmp_path, "Enabled", "", node)).recursive_read_only
    with pytest.raises(StartError, match="it is not supported by the runtime"):
        await start(tmp_path, "Enabled", "kata", node)


def test_a_runtime_that_does_not_tell_its_handlers_can_do_it_with_none() -> None:
    assert recursive_handlers(pb.StatusResponse()) == frozenset()
