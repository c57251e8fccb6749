"""A starter with nothing around it but a runtime, and one start with it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.config_builder import ConfigBuilder, PodStartContext
from pykubelet.kuberuntime.configuration.container_images import ContainerImages
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.pod_logs import PodLogs
from pykubelet.kuberuntime.start import ContainerStarter, OnCreated, StartRecords
from pykubelet.objects.base import PodObjects
from pykubelet.objects.services import no_services
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.volumes.plugin import MountedVolume
from tests.support.containers import make_pod


def make_starter(
    cri: Any,
    observer: Observer,
    node: RuntimeNodeOptions,
    root: Path,
    history: PodHistory,
    *,
    on_created: OnCreated = lambda *_: None,
    resolv_conf: str | None = None,
    objects: PodObjects | None = None,
    services: Callable[[Pod], Mapping[str, str] | None] = no_services,
    node_event: Record = no_record,
    image_manager: Any = None,
    metrics: StartMetrics | None = None,
) -> ContainerStarter:
    """Return a starter without volumes and hooks."""
    nothing = cast(Any, None)
    images = ContainerImages(image_manager, history, objects)
    configs = ConfigBuilder(
        node, PodDirs(root), images, nothing, lambda: resolv_conf, objects=objects, services=services
    )
    logs = PodLogs(node.pod_logs_dir, None)
    return ContainerStarter(
        cri,
        observer,
        configs,
        images,
        logs,
        nothing,
        StartRecords(history, node_event, metrics or StartMetrics()),
        on_created,
    )


async def start(
    root: Path,
    runtime: object,
    node: RuntimeNodeOptions,
    container: Container,
    volumes: dict[str, MountedVolume] | None = None,
    last: ObservedContainer | None = None,
) -> None:
    """Start a pod's only container in a sandbox that is there; raises StartError."""
    cri = cast(Any, SimpleNamespace(runtime=runtime))
    observer = Observer(cri)
    await observer.observe_sandbox("sandbox")
    starter = make_starter(cri, observer, node, root, PodHistory())
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
