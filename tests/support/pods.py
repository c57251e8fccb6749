"""Pods and statuses for tests, in a few words."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.pod_status import (
    ContainerState,
    ContainerStateRunning,
    ContainerStateTerminated,
    ContainerStateWaiting,
    ContainerStatus,
    PodCondition,
    PodStatus,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = datetime(2026, 1, 2, tzinfo=UTC)


def make_pod(
    uid: str = "u1",
    name: str = "web",
    *,
    policy: str = "Always",
    containers: tuple[str, ...] = ("main",),
    init: tuple[str, ...] = (),
    version: int = 1,
    deleting: bool = False,
    status: PodStatus | None = None,
    **meta: Any,
) -> Pod:
    pod = Pod(
        metadata=ObjectMeta(
            name=name,
            namespace="default",
            uid=uid,
            generation=1,
            resource_version=str(version),
            annotations={"kubernetes.io/config.source": "api"},
            deletion_timestamp=NOW if deleting else None,
            deletion_grace_period_seconds=30 if deleting else None,
        ),
        spec=PodSpec(
            containers=[Container(name=one) for one in containers],
            init_containers=[Container(name=one) for one in init],
            restart_policy=policy,
        ),
        status=status or PodStatus(phase="Pending"),
    )
    for key, value in meta.items():
        setattr(pod.metadata, key, value)
    return pod


def waiting(reason: str = "ContainerCreating") -> ContainerState:
    return ContainerState(waiting=ContainerStateWaiting(reason=reason))


def running() -> ContainerState:
    return ContainerState(running=ContainerStateRunning(started_at=NOW))


def ended(code: int = 0, message: str = "") -> ContainerState:
    state = ContainerStateTerminated(exit_code=code, finished_at=NOW, message=message or msgspec.UNSET)
    return ContainerState(terminated=state)


def container(name: str = "main", state: ContainerState | None = None, **facts: Any) -> ContainerStatus:
    return ContainerStatus(name=name, state=state or running(), **facts)


def condition(
    kind: str, status: str = "True", reason: str = "", at: datetime = NOW, *, observed_generation: int = 1
) -> PodCondition:
    return PodCondition(
        type=kind,
        status=status,
        reason=reason or msgspec.UNSET,
        last_transition_time=at,
        observed_generation=observed_generation,
    )


def make_status(
    phase: str = "Running", *containers: ContainerStatus, ready: str = "True", **fields: Any
) -> PodStatus:
    conditions = fields.pop("conditions", [condition("Ready", ready), condition("ContainersReady", ready)])
    return PodStatus(
        phase=phase,
        observed_generation=fields.pop("observed_generation", 1),
        start_time=fields.pop("start_time", NOW),
        conditions=conditions,
        container_statuses=list(containers) or [container()],
        **fields,
    )
