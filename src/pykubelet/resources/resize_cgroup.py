"""A pod's own cgroup while the pod is resized: what it is set to, what it shall be, one setting at a time.

Which setting comes when is decided elsewhere (`resize_plan.py`). A limit that the pod no longer wishes for
stays: taking limits away in place is not something that Kubernetes does.
"""

from __future__ import annotations

from pykubelet.resources.cgroup_driver import CgroupDriver
from pykubelet.resources.cgroup_names import CgroupName
from pykubelet.resources.cgroup_values import UNLIMITED, CgroupValues, shares_of_weight, weight_of_shares
from pykubelet.resources.in_force import whole_pages
from pykubelet.resources.qos import MIN_SHARES
from pykubelet.resources.resize_plan import Part, PodLimits

_NO_BOUND = 2**63 - 1


class PodGroup:
    """The cgroup of one pod; everything here may raise OSError."""

    def __init__(
        self, groups: CgroupDriver, name: CgroupName, values: CgroupValues, *, unified: bool
    ) -> None:
        """Take where it is and what the pod was promised."""
        self._groups = groups
        self._name = name
        self._values = groups.granted(values)
        self._unified = unified

    def settings(self) -> CgroupValues:
        """Give what it is set to in cpu and memory."""
        return self._groups.files.read(self._name)

    def now(self) -> PodLimits:
        """Give what it is set to, in numbers that can be compared."""
        return _limits(self.settings())

    def wanted(self, now: PodLimits) -> PodLimits:
        """Give what it shall be set to; what the pod does not say stays."""
        shares = self._values.shares or now.shares
        if self._unified:
            # The kernel's weights are coarser; the same weight is no change.
            shares = shares_of_weight(weight_of_shares(shares))
        memory = whole_pages(self._values.memory) if self._values.memory else now.memory
        return PodLimits(memory, self._values.quota or now.quota, shares)

    @property
    def period(self) -> int:
        """The microseconds over which the quota of cpu is measured."""
        return self._values.period

    @property
    def memory_limit(self) -> int | None:
        """Give the bytes that the pod shall have, None when it says nothing."""
        return self._values.memory

    async def set(self, part: Part) -> None:
        """Make one setting what it shall be."""
        values = self._values
        await self._groups.write(
            self._name,
            CgroupValues(
                shares=values.shares if part == "shares" else None,
                quota=values.quota if part == "quota" else None,
                memory=values.memory if part == "memory" else None,
                period=values.period,
            ),
        )

    def memory_usage(self) -> int:
        """Give the bytes that are in use."""
        return self._groups.files.memory_usage(self._name)


def _limits(values: CgroupValues) -> PodLimits:
    return PodLimits(values.memory or _NO_BOUND, values.quota or UNLIMITED, values.shares or MIN_SHARES)
