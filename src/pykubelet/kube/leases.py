"""The node's lease: the sign of life by which the cluster knows that the node is there.

One small object per node, replaced at each heartbeat. It belongs to the node, so that it goes when
the node goes; a lease without an owner gets one as soon as the node is known.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

import msgspec

from pykubelet.api.lease import Lease, micro_time
from pykubelet.api.meta import ObjectMeta, OwnerReference
from pykubelet.kube.errors import Conflict, NotFound
from pykubelet.kube.resources import LEASES, Resource

NAMESPACE = "kube-node-lease"


class LeaseStore(Protocol):
    """Where leases are kept: an ApiClient."""

    async def get(self, resource: Resource[Lease], name: str, namespace: str = "") -> Lease:
        """Get a lease."""

    async def create(self, resource: Resource[Lease], obj: Lease, namespace: str = "") -> Lease:
        """Create a lease."""

    async def update(self, resource: Resource[Lease], obj: Lease) -> Lease:
        """Replace a lease."""


def renewed(known: Lease | None, node: str, node_uid: str, seconds: int, now: datetime) -> Lease:
    """Give the lease as it should be now; `node_uid` is empty while the node's is not known."""
    lease = known or Lease(metadata=ObjectMeta(name=node, namespace=NAMESPACE))
    spec = msgspec.structs.replace(
        lease.spec, holder_identity=node, lease_duration_seconds=seconds, renew_time=micro_time(now)
    )
    meta = lease.metadata
    if node_uid and not meta.owner_references:
        owner = OwnerReference(api_version="v1", kind="Node", name=node, uid=node_uid)
        meta = msgspec.structs.replace(meta, owner_references=[owner])
    return Lease(metadata=meta, spec=spec)


async def heartbeat(
    store: LeaseStore, node: str, node_uid: str, seconds: int, known: Lease | None, now: datetime
) -> Lease | None:
    """Renew the lease once and give it as the API server has it now; raises KubeError.

    `known` is what the last heartbeat gave: with it, one request is enough. A lease is not created
    before the node is known, since nobody would ever remove it: then there is none.
    """
    if known is not None:
        try:
            return await store.update(LEASES, renewed(known, node, node_uid, seconds, now))
        except (Conflict, NotFound):
            # Someone else wrote or removed it: look again.
            pass
    try:
        found = await store.get(LEASES, node, NAMESPACE)
    except NotFound:
        if not node_uid:
            return None
        return await store.create(LEASES, renewed(None, node, node_uid, seconds, now), NAMESPACE)
    return await store.update(LEASES, renewed(found, node, node_uid, seconds, now))
