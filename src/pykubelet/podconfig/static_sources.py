"""Start of the configured static pod sources: a manifest file or directory, and a URL."""

from __future__ import annotations

from pathlib import Path

from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.podconfig.file_source import Emit, FileSource
from pykubelet.podconfig.local_objects import LOCAL_KINDS, LocalObjects
from pykubelet.podconfig.mux import PodMux
from pykubelet.podconfig.url_source import UrlSource
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)


def start_sources(
    config: KubeletConfiguration,
    node_name: str,
    mux: PodMux,
    emit: Emit,
    scope: TaskScope,
    *,
    objects: LocalObjects | None,
) -> None:
    """Start the configured sources and register them with the mux.

    `objects` receives the configMaps and secrets of the manifests; None on a cluster node.
    """
    if config.static_pod_path:
        log.info("Adding static pod path", path=config.static_pod_path)
        file_source = FileSource(
            Path(config.static_pod_path),
            config.file_check_frequency,
            node_name,
            emit,
            serve=objects.offer if objects is not None else None,
        )
        mux.expect("file")
        scope.start(file_source.run(), name="source-file")
    if config.static_pod_url:
        log.info("Adding pod URL", url=config.static_pod_url)
        url_source = UrlSource(
            config.static_pod_url,
            config.static_pod_url_header,
            config.http_check_frequency,
            node_name,
            emit,
            served=LOCAL_KINDS if config.static_pod_path and objects is not None else frozenset(),
        )
        mux.expect("http")
        scope.start(url_source.run(), name="source-http")
