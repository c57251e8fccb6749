"""Mounts that are read-only all the way down: as far as the handler of the pod's sandbox can make them."""

from pathlib import Path

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import StartError
from pykubelet.kuberuntime.runtime_features import recursive_handlers
from pykubelet.volumes.plugin import MountedVolume
from tests.unit.kuberuntime.starting import start

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


async def mounted(root: Path, mode: str, handler: str, node: RuntimeNodeOptions) -> pb.Mount:
    """How a container's only volume is asked for."""
    runtime = Runtime(handler)
    mount = {"name": "v", "mountPath": "/v", "readOnly": True, "recursiveReadOnly": mode}
    container = from_document(Container, {"name": "main", "volumeMounts": [mount]})
    await start(root, runtime, node, container, {"v": MountedVolume(str(root))})
    (made,) = [mount for mount in runtime.config.mounts if mount.container_path == "/v"]
    return made


@pytest.mark.parametrize(("handler", "recursive"), [("", True), ("kata", False), ("unheard-of", False)])
async def test_recursive_read_only_if_possible_depends_on_runtime_handler(
    tmp_path: Path, handler: str, recursive: bool
) -> None:
    node = RuntimeNodeOptions(
        pod_logs_dir=str(tmp_path / "logs"), recursive_handlers=lambda: recursive_handlers(RUNTIME)
    )
    made = await mounted(tmp_path, "IfPossible", handler, node)
    assert (made.readonly, made.recursive_read_only) == (True, recursive)


async def test_recursive_read_only_enabled_unsupported_handler_raises(tmp_path: Path) -> None:
    node = RuntimeNodeOptions(
        pod_logs_dir=str(tmp_path / "logs"), recursive_handlers=lambda: recursive_handlers(RUNTIME)
    )
    assert (await mounted(tmp_path, "Enabled", "", node)).recursive_read_only
    with pytest.raises(StartError, match="it is not supported by the runtime"):
        await mounted(tmp_path, "Enabled", "kata", node)


def test_recursive_handlers_none_reported_returns_empty_set() -> None:
    assert recursive_handlers(pb.StatusResponse()) == frozenset()
