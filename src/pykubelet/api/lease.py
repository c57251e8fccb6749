"""Leases, by which a node shows that it is alive.

The struct is complete, because a lease is renewed by replacing it. Its times have microseconds,
always six digits of them: the API server refuses any other number.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct


class LeaseSpec(ObjectStruct):
    """Who holds the lease, since when and for how long; times as `micro_time` writes them."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    strategy: str | None = None
    preferred_holder: str | None = None


class Lease(ObjectStruct):
    """A lease."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: LeaseSpec = field(default_factory=LeaseSpec)


def micro_time(moment: datetime) -> str:
    """Write a time with its microseconds: `2026-07-24T08:30:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
