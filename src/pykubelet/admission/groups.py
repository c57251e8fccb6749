"""Pods that want exactly the groups they name, on a node whose runtime always adds those of the image."""

from __future__ import annotations

from pykubelet.admission.link import Attempt, Refusal


class SupplementalGroups:
    """Refuses `supplementalGroupsPolicy: Strict` where the runtime does not know it."""

    for_running = False

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Compare the pod's policy with what the node's status says of its runtime."""
        features = attempt.node.status.features
        known = features is not None and features.supplemental_groups_policy is True
        if attempt.pod.spec.security_context.supplemental_groups_policy != "Strict" or known:
            return None
        return Refusal(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        )
