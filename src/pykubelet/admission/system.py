"""Pods for other operating systems, by their label or by their `os` field."""

from __future__ import annotations

from pykubelet.admission.link import Attempt, Refusal

OS_LABEL = "kubernetes.io/os"
OURS = "linux"


class OperatingSystem:
    """Refuses pods that are not for this operating system, whatever label the node got."""

    for_running = False

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Look at the pod's own label first, then at its field."""
        if attempt.pod.metadata.labels.get(OS_LABEL, OURS) != OURS:
            return Refusal(
                "PodOSSelectorNodeLabelDoesNotMatch",
                "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
            )
        wanted = attempt.pod.spec.os
        if wanted is not None and wanted.name != OURS:
            return Refusal("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS")
        return None
