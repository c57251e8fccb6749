"""What is asked of which driver, and what drivers' answers mean.

Pure. A driver answers for each claim that it was asked about: with devices, or with a reason why not. One
that leaves a claim out, or speaks of others, has not done what was asked, whatever else it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pykubelet.resources import dra_pb2 as pb
from pykubelet.resources.dra_claims import ClaimError
from pykubelet.resources.dra_state import ClaimRecord, PreparedDevice

_PREPARE, _UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"


class _Result(Protocol):
    @property
    def error(self) -> str: ...


def by_driver(records: Iterable[ClaimRecord]) -> dict[str, list[ClaimRecord]]:
    """Give the claims that each driver has to do with, in the order of their names."""
    found: dict[str, list[ClaimRecord]] = {}
    for record in records:
        for driver in record.devices:
            found.setdefault(driver, []).append(record)
    return dict(sorted(found.items()))


def read_prepared(
    asked: Sequence[ClaimRecord], answer: pb.NodePrepareResourcesResponse
) -> dict[str, tuple[PreparedDevice, ...]]:
    """Give the devices of each claim by its uid; raises ClaimError unless all were prepared."""
    _check(_PREPARE, asked, answer.claims)
    return {uid: tuple(map(_device, result.devices)) for uid, result in answer.claims.items()}


def check_unprepared(asked: Sequence[ClaimRecord], answer: pb.NodeUnprepareResourcesResponse) -> None:
    """Raise ClaimError unless all claims were given back."""
    _check(_UNPREPARE, asked, answer.claims)


def _check(call: str, asked: Sequence[ClaimRecord], results: Mapping[str, _Result]) -> None:
    names = {record.uid: record.name for record in asked}
    for uid in sorted(results):
        if uid not in names:
            raise ClaimError(f"{call} returned result for unknown claim UID {uid}")
        if error := results[uid].error:
            raise ClaimError(f"{call} failed for ResourceClaim {names[uid]}: {error}")
    if left := len(names.keys() - results.keys()):
        raise ClaimError(f"{call} skipped {left} ResourceClaims")


def _device(device: pb.Device) -> PreparedDevice:
    return PreparedDevice(
        device.pool_name,
        device.device_name,
        tuple(device.request_names),
        tuple(device.cdi_device_ids),
        device.share_id if device.HasField("share_id") else None,
    )
