"""Which resource claims a pod has, whether it may use them, and which of their devices a container gets.

Pure. A pod names claims of its own namespace, or templates: the cluster then makes claims for the pod and
writes their names into its status. The scheduler may make one more, for extended resources that drivers
serve. Texts are the ones that people search for when they find them in events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pykubelet.api.names import is_extended_resource
from pykubelet.api.pod import Container, Pod, PodResourceClaim
from pykubelet.api.resource_claim import ResourceClaim

DEVICE_CLASS_PREFIX = "deviceclass.resource.kubernetes.io/"
"""An extended resource of this prefix stands for a device class by its name."""


class ClaimError(Exception):
    """A pod's claims cannot be made ready, or given back; the text is for the pod's events."""


@dataclass(frozen=True, slots=True)
class WantedClaim:
    """A claim that a pod wants to use; `made` for it, and so not for anybody else."""

    name: str
    made: bool = False


def wanted_claims(pod: Pod, *, extended: bool = True) -> list[WantedClaim]:
    """Give the claims of a pod, each once; raises ClaimError while one of them does not exist yet.

    `extended`: whether claims for extended resources count.
    """
    found = [claim for one in pod.spec.resource_claims if (claim := _named(pod, one)) is not None]
    if extended and (status := pod.status.extended_resource_claim_status) is not None:
        found.append(WantedClaim(status.resource_claim_name))
    return list({claim.name: claim for claim in found}.values())


def drivers_of(pod: Pod, wanted: WantedClaim, claim: ResourceClaim) -> list[str]:
    """Give the drivers of a claim that the pod may use; raises ClaimError when it may not, or not yet."""
    where, name = claim.metadata, claim.metadata.name
    if wanted.made and not any(
        owner.controller and owner.uid == pod.uid for owner in claim.metadata.owner_references
    ):
        raise ClaimError(
            f"ResourceClaim {where.namespace}/{name} was not created for Pod {pod.full_name} "
            "(Pod is not owner)"
        )
    if not any(consumer.uid == pod.uid for consumer in claim.status.reserved_for):
        raise ClaimError(
            f"pod {pod.metadata.name} ({pod.uid}) is not allowed to use ResourceClaim {name} ({where.uid})"
        )
    if claim.status.allocation is None:
        raise ClaimError(f"ResourceClaim {name}: not allocated")
    return sorted({result.driver for result in claim.status.allocation.devices.results})


def requests_of(pod: Pod, container: Container, *, extended: bool = True) -> dict[str, list[str]]:
    """Give the claims that a container uses, each with the requests of it; "" is all of them.

    Raises ClaimError while one of them does not exist yet.
    """
    found: dict[str, list[str]] = {}
    for one in pod.spec.resource_claims:
        requests = [used.request for used in container.resources.claims if used.name == one.name]
        if requests and (claim := _named(pod, one)) is not None:
            found.setdefault(claim.name, []).extend(requests)
    status = pod.status.extended_resource_claim_status
    if extended and status is not None:
        asked = {
            name
            for name, amount in container.resources.requests.items()
            if amount.nanos and (is_extended_resource(name) or name.startswith(DEVICE_CLASS_PREFIX))
        }
        for mapping in status.request_mappings:
            if mapping.container_name == container.name and mapping.resource_name in asked:
                found.setdefault(status.resource_claim_name, []).append(mapping.request_name)
    return found


def serves(request: str, names: Collection[str]) -> bool:
    """Whether a device that was given for the requests `names` is one for this request.

    A device without names is for all. A name may be of a part of a request, `gpu/small`; drivers mostly
    leave the part out.
    """
    return not request or not names or any(_same(request, name) for name in names)


def claim_names(pod: Pod) -> Iterator[tuple[str, str]]:
    """Give the pod's own name of each claim, and the claim's, as far as they are known."""
    for one in pod.spec.resource_claims:
        try:
            claim = _named(pod, one)
        except ClaimError:
            continue
        if claim is not None:
            yield one.name, claim.name


def _named(pod: Pod, wanted: PodResourceClaim) -> WantedClaim | None:
    """Give the claim that stands behind one of the pod's; None when none is needed."""
    if wanted.resource_claim_name is not None:
        return WantedClaim(wanted.resource_claim_name)
    if wanted.resource_claim_template_name is None:
        raise ClaimError(
            f'pod "{pod.full_name}", spec.resourceClaim "{wanted.name}": none of the supported fields are set'
        )
    for made in pod.status.resource_claim_statuses:
        if made.name == wanted.name:
            return WantedClaim(made.resource_claim_name, made=True) if made.resource_claim_name else None
    raise ClaimError(f'pod "{pod.full_name}": ResourceClaim not created yet')


def _same(request: str, name: str) -> bool:
    shorter, longer = sorted((request, name), key=len)
    return shorter == longer or longer.startswith(f"{shorter}/")
