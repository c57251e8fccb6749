"""What a pod as a whole has got, read back from what its cgroup is set to.

Once a pod runs, its status tells this instead of what was asked for. The two differ where the kernel
counts otherwise: shares are coarser than millicores, cgroup v1 has a number even for no limit at all,
and what no cgroup bounds (`ephemeral-storage`) is not told.
"""

from __future__ import annotations

import os

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.resources.cgroup_values import CgroupValues
from pykubelet.resources.qos import DEFAULT_PERIOD, MIN_QUOTA, MIN_SHARES, SHARES_PER_CPU, pod_requests

_MILLI = 10**6
_LEAST_LIMIT = MIN_QUOTA * 1000 // DEFAULT_PERIOD
"""The smallest limit of cpu that the kernel knows, in millicores."""


def resources_in_force(
    pod: Pod, values: CgroupValues, *, unified: bool, pod_level: bool = True
) -> tuple[Resources, Resources]:
    """Give the limits and the requests of a pod whose cgroup is set to `values`."""
    limits, requests = dict[str, Quantity](), dict[str, Quantity]()
    if (whole := pod.spec.resources) is not None:
        limits, requests = dict(whole.limits), dict(whole.requests)
    promised = -(-(values.shares or 0) * 1000 // SHARES_PER_CPU)
    if _tells_more(promised, requests, MIN_SHARES):
        requests["cpu"] = Quantity(promised * _MILLI)
    bound = values.quota * 1000 // values.period if values.quota and values.quota > 0 else 0
    if bound and _tells_more(bound, limits, _LEAST_LIMIT):
        limits["cpu"] = Quantity(bound * _MILLI)
    memory = pod_requests(pod, pod_level=pod_level).get("memory")
    if memory is not None:
        requests.setdefault("memory", memory)
    if values.memory:
        limits["memory"] = Quantity.of(whole_pages(values.memory), "binary")
    elif not unified:
        limits["memory"] = Quantity.of(whole_pages(2**63 - 1), "binary")
    return limits, requests


def whole_pages(size: int) -> int:
    """Give the bytes that the kernel makes of a limit: it bounds memory by whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    return size // page * page


def _tells_more(milli: int, asked: Resources, least: int) -> bool:
    """Whether an amount is more than the kernel's least, which stands for anything up to that."""
    known = asked.get("cpu")
    return milli > least or (known is not None and known.milli > least)
