"""What the engine asks those who make pods' resource claims ready."""

from __future__ import annotations

from typing import Protocol

from pykubelet.api.pod import Pod


class PodClaims(Protocol):
    """Makes claims ready and gives them back; both may be repeated, and cancelled anywhere."""

    async def prepare(self, pod: Pod) -> None:
        """Have all claims of a pod ready, before its sandbox is made; raises ClaimError."""
        ...

    async def unprepare(self, uid: str) -> None:
        """Give back what a pod has of which nothing runs any more; raises ClaimError."""
        ...


class NoClaims:
    """A node without an API server has no claims; a pod that names some is refused when it is read."""

    async def prepare(self, pod: Pod) -> None:
        """Do nothing."""

    async def unprepare(self, uid: str) -> None:
        """Do nothing."""


NO_CLAIMS = NoClaims()


def has_claims(pod: Pod) -> bool:
    """Whether a pod has claims, its own or one for its extended resources."""
    return bool(pod.spec.resource_claims) or pod.status.extended_resource_claim_status is not None
