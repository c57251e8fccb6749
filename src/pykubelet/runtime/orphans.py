"""Pods that only the runtime still knows: enough of their spec to stop them well.

Everything comes from the labels and annotations that their containers were made with, so it works
for pods of an earlier agent, of the reference kubelet, or of a manifest that is long gone.
"""

from __future__ import annotations

from datetime import UTC, datetime

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Lifecycle, Pod, PodSpec
from pykubelet.runtime.labels import parse_container
from pykubelet.runtime.observed import ObservedPod


def restored_pod(observed: ObservedPod) -> Pod:
    """Make a pod of what the runtime remembers of it."""
    spec = PodSpec()
    meta = ObjectMeta(
        name=observed.name,
        namespace=observed.namespace,
        uid=observed.uid,
        deletion_timestamp=datetime.now(UTC),
    )
    for container in observed.containers:
        if any(known.name == container.name for known in spec.containers):
            continue
        info = parse_container(container.labels, container.annotations)
        lifecycle = Lifecycle(pre_stop=info.pre_stop) if info.pre_stop is not None else None
        spec.containers.append(Container(name=container.name, image=container.image, lifecycle=lifecycle))
        if info.pod_grace is not None:
            spec.termination_grace_period_seconds = info.pod_grace
        if info.deletion_grace is not None:
            meta.deletion_grace_period_seconds = info.deletion_grace
    return Pod(metadata=meta, spec=spec)
