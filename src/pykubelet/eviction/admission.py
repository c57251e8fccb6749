"""Node conditions that the eviction manager has set, and the rejection of pods because of them.

Under memory pressure only BestEffort pods are rejected, unless they tolerate the taint of memory pressure;
with any other pressure all pods. Critical pods are always admitted."""

from __future__ import annotations

from collections.abc import Callable

from pykubelet.admission.handler import AdmitRejection, PodAdmitAttributes
from pykubelet.admission.predicates import tolerates
from pykubelet.api.node import Taint
from pykubelet.cm.qos import qos_class
from pykubelet.eviction.messages import EVICTED, node_condition_message
from pykubelet.eviction.signals import NodeConditionType
from pykubelet.podconfig.static_pods import is_critical_pod

MEMORY_PRESSURE_TAINT = Taint(key="node.kubernetes.io/memory-pressure", effect="NoSchedule")


class PressureConditions:
    """Node conditions that are True at present; the eviction manager sets them."""

    def __init__(self) -> None:
        self._conditions: tuple[NodeConditionType, ...] = ()
        self._listeners: list[Callable[[], None]] = []

    @property
    def current(self) -> tuple[NodeConditionType, ...]:
        """Conditions that are True."""
        return self._conditions

    def has(self, condition: NodeConditionType) -> bool:
        """Return whether a condition is True."""
        return condition in self._conditions

    def set(self, conditions: tuple[NodeConditionType, ...]) -> None:
        """Replace the conditions."""
        if conditions != self._conditions:
            self._conditions = conditions
            for listener in self._listeners:
                listener()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change; it must not block."""
        self._listeners.append(listener)


class PressureAdmission:
    """Admission handler that rejects pods while the node is under pressure (`PodAdmitHandler`)."""

    for_running = False

    def __init__(self, conditions: PressureConditions, *, comparing: bool, pod_level: bool) -> None:
        """Initialize; `comparing`: whether tolerations may compare numbers."""
        self._conditions = conditions
        self._comparing = comparing
        self._pod_level = pod_level

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Return the rejection of a pod, or None to admit it."""
        pod, conditions = attempt.pod, self._conditions.current
        if not conditions or is_critical_pod(pod):
            return None
        if conditions == ("MemoryPressure",):
            if qos_class(pod, pod_level=self._pod_level) != "BestEffort":
                return None
            if any(
                tolerates(toleration, MEMORY_PRESSURE_TAINT, comparing=self._comparing)
                for toleration in pod.spec.tolerations
            ):
                return None
        return AdmitRejection(EVICTED, node_condition_message(conditions))
