"""A starter with nothing around it but a runtime, and one start with it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pykubelet.api.pod import Container
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.options import RuntimeNodeOptions
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.start import ContainerStarter, PodStartContext
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.volumes.plugin import MountedVolume
from tests.runtime.making import make_pod


async def start(
    root: Path,
    runtime: object,
    node: RuntimeNodeOptions,
    container: Container,
    volumes: dict[str, MountedVolume] | None = None,
    last: ObservedContainer | None = None,
) -> None:
    """Start a pod's only container in a sandbox that is there; raises StartError."""
    cri, nothing = cast(Any, SimpleNamespace(runtime=runtime)), cast(Any, None)
    observer = Observer(cri)
    await observer.observe_sandbox("sandbox")
    starter = ContainerStarter(
        cri,
        observer,
        node,
        PodDirs(root),
        nothing,
        nothing,
        nothing,
        PodHistory(),
        lambda *_: None,
        nothing,
        lambda: None,
        None,
    )
    pod = make_pod(container)
    await starter.start_container(
        pod,
        container,
        PresentImage("sha256:x", 0, ""),
        "sandbox",
        pb.PodSandboxConfig(),
        PodStartContext("/kubepods", volumes or {}),
        (),
        ObservedPod(uid=pod.uid, containers=(last,) if last is not None else ()),
    )
