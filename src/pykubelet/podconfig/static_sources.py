"""The configured static pod sources: a manifest file or directory, and a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pykubelet.api.duration import Duration
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.objects.references import ALL_KINDS
from pykubelet.podconfig.file_source import Emit, FileSource
from pykubelet.podconfig.local_objects import LOCAL_KINDS, LocalObjects
from pykubelet.podconfig.mux import PodMux
from pykubelet.podconfig.url_source import UrlSource
from pykubelet.podconfig.validate import DEFAULT_OPTIONS, PodValidationOptions
from pykubelet.util.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.podconfig.workloads.controller import WorkloadController

log = get_logger(__name__)


STATIC_POD_GATE = "PreventStaticPodAPIReferences"


def served_kinds(gates: FeatureGates, *, standalone: bool) -> frozenset[str]:
    """Return the kinds of API objects that static pods may refer to, besides those of their manifests.

    Without the feature gate these are all but those that upstream rejected before it.
    """
    if standalone or gates.enabled(STATIC_POD_GATE):
        return frozenset()
    return ALL_KINDS - {"clustertrustbundles", "resourceclaims"}


def validation_options(gates: FeatureGates) -> PodValidationOptions:
    """Return the rules for static pods that depend on feature gates."""
    return PodValidationOptions(
        strict_ips=gates.enabled("StrictIPCIDRValidation"),
        deletion_cost=gates.enabled("PodDeletionCost"),
        merged_label_keys=gates.enabled("MatchLabelKeysInPodTopologySpread")
        and gates.enabled("MatchLabelKeysInPodTopologySpreadSelectorMerge"),
    )


class StaticSources:
    """The configured static pod sources of one node."""

    def __init__(
        self,
        config: KubeletConfiguration,
        node_name: str,
        mux: PodMux,
        emit: Emit,
        *,
        objects: LocalObjects | None,
        workloads: WorkloadController | None = None,
        served: frozenset[str] = frozenset(),
        options: PodValidationOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Initialize, without starting; `emit` is called with the pods of a source.

        `objects` receives the configMaps, secrets and claims of the manifests, and `workloads` the Jobs and
        CronJobs; None on a cluster node. `served` are further kinds of objects that pods may refer to,
        and `options` the rules for the pods.
        """
        self._mux = mux
        self._workloads = workloads
        self._file: FileSource | None = None
        self._url: UrlSource | None = None
        if config.static_pod_path:
            log.info("Adding static pod path", path=config.static_pod_path)
            self._file = FileSource(
                Path(config.static_pod_path),
                config.file_check_frequency,
                node_name,
                workloads.emit if workloads is not None else emit,
                serve=objects.offer if objects is not None else None,
                offer_workloads=workloads.offer if workloads is not None else None,
                served=served,
                options=options,
            )
        if config.static_pod_url:
            log.info("Adding pod URL", url=config.static_pod_url)
            self._url = UrlSource(
                config.static_pod_url,
                config.static_pod_url_header,
                config.http_check_frequency,
                node_name,
                emit,
                served=LOCAL_KINDS if config.static_pod_path and objects is not None else served,
                options=options,
            )

    def set_periods(self, *, file: Duration, url: Duration) -> None:
        """Change the time between two checks of each source, and check immediately."""
        if self._file is not None:
            self._file.set_period(file)
        if self._url is not None:
            self._url.set_period(url)

    def start(self, scope: TaskScope) -> None:
        """Start the sources and register them with the mux."""
        if self._file is not None:
            self._mux.expect("file")
            scope.start(self._file.run(), name="source-file")
            if self._workloads is not None:
                scope.start(self._workloads.run(), name="workloads")
        if self._url is not None:
            self._mux.expect("http")
            scope.start(self._url.run(), name="source-http")
