"""State of a Job: a pure function from its record and the phases of its pods to its next record.

A record lists the pods that the node has to run or to keep. It is stored before they are offered, so a
kubelet that is killed at any point continues with the same pods, and a finished Job stays finished. A pod
that has finished keeps its final status in the record: the next kubelet process does not start it again.

The numbers of pods in a record are bounded: `MAX_PARALLELISM` active ones, and the last finished ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from pykubelet.api.meta import ObjectStruct
from pykubelet.api.pod_status import ContainerState, ContainerStatus, PodStatus
from pykubelet.podconfig.workloads.kinds import JobSpec
from pykubelet.podconfig.workloads.templates import stable_uid, template_hash
from pykubelet.util.backoff import exponential_delay

KEPT_PODS = 5
"""Finished pods that stay known with their logs, for each of the two outcomes."""
DEFAULT_BACKOFF_LIMIT = 6
FIRST_DELAY_SECONDS = 10.0
MAX_DELAY_SECONDS = 360.0
"""Delay before a failed pod is replaced: doubled with each failure."""
MAX_MESSAGE = 500
MAX_STATUSES = 20
"""Bounds of a recorded final status: characters of each message, and containers of each type."""
COMPLETE: Literal["Complete"] = "Complete"
FAILED: Literal["Failed"] = "Failed"
Outcome = Literal["", "Complete", "Failed"]


class JobPodRecord(ObjectStruct):
    """A pod of a Job."""

    serial: int
    index: int | None = None
    restarts: int = 0
    """Restarts of its containers, which count as failures with `restartPolicy: OnFailure`."""
    status: PodStatus | None = None
    """Final status; None while the pod is active."""


class JobRecord(ObjectStruct):
    """State of one run of a Job."""

    uid: str
    template: str = ""
    """Hash of what defines a run: a change begins a new one."""
    started: float | None = None
    """Unix time from which `activeDeadlineSeconds` counts; None while suspended."""
    finished: float | None = None
    outcome: Outcome = ""
    reason: str = ""
    message: str = ""
    next_serial: int = 0
    succeeded: int = 0
    failed: int = 0
    last_failure: float = 0.0
    recent_failures: int = 0
    """Failures since the last success, which determine the delay of the next pod."""
    done: list[int] = []
    """Completed indexes of an Indexed Job."""
    pods: list[JobPodRecord] = []

    @property
    def active(self) -> list[JobPodRecord]:
        """Pods that have not finished."""
        return [pod for pod in self.pods if pod.status is None]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Next state of a Job."""

    record: JobRecord
    wake_at: float | None = None
    """Unix time at which the state changes by itself."""


StatusOf = Callable[[str], PodStatus | None]
"""Returns the current status of a pod by its uid; None while it is unknown."""


def pod_uid(run: str, serial: int) -> str:
    """Return the uid of a pod of a run of a Job."""
    return stable_uid(run, str(serial))


def run_hash(spec: JobSpec) -> str:
    """Return the hash of what defines a run of a Job; limits and suspension can change during a run."""
    return stable_uid(template_hash(spec.template), str(spec.completions), str(spec.completion_mode))


def new_record(spec: JobSpec, identity: str, now: float) -> JobRecord:
    """Return the record of a new run; `identity` is unique among the Jobs of the node."""
    template = run_hash(spec)
    return JobRecord(uid=stable_uid(identity, template, repr(now)), template=template)


def plan_job(spec: JobSpec, before: JobRecord, status_of: StatusOf, now: float) -> JobPlan:
    """Return the next record of a Job; `before` is not modified."""
    record = _with_results(before, status_of, now)
    if record.outcome:
        return _finished(spec, record, now)
    if spec.suspend:
        return JobPlan(_replace(record, started=None, pods=_without_active(record)))
    if record.started is None:
        record = _replace(record, started=now)
    assert record.started is not None
    if _is_complete(spec, record):
        return _finished(spec, _ended(record, COMPLETE, "CompletionsReached", "", now), now)
    deadline = None if spec.active_deadline_seconds is None else record.started + spec.active_deadline_seconds
    if deadline is not None and now >= deadline:
        message = f"Job was active longer than {spec.active_deadline_seconds} s"
        return _finished(spec, _ended(record, FAILED, "DeadlineExceeded", message, now), now)
    if _past_backoff_limit(spec, record):
        message = "Job has reached the specified backoff limit"
        return _finished(spec, _ended(record, FAILED, "BackoffLimitExceeded", message, now), now)
    record, retry_at = _with_new_pods(spec, record, now)
    times = [time for time in (deadline, retry_at) if time is not None]
    return JobPlan(record, min(times, default=None))


def _replace(record: JobRecord, **fields: object) -> JobRecord:
    return msgspec.structs.replace(record, **fields)


def _with_results(record: JobRecord, status_of: StatusOf, now: float) -> JobRecord:
    """Return the record with the results of the pods that have finished since."""
    pods, done = [], list(record.done)
    succeeded, failed, last_failure = record.succeeded, record.failed, record.last_failure
    ended: list[PodStatus] = []
    for pod in record.pods:
        status = status_of(pod_uid(record.uid, pod.serial)) if pod.status is None else None
        if status is None:
            pods.append(pod)
            continue
        restarts = max(pod.restarts, sum(c.restart_count for c in status.container_statuses))
        if status.phase not in ("Succeeded", "Failed"):
            pods.append(pod if restarts == pod.restarts else msgspec.structs.replace(pod, restarts=restarts))
            continue
        pods.append(msgspec.structs.replace(pod, restarts=restarts, status=_final(status)))
        ended.append(status)
        if status.phase == "Failed":
            failed, last_failure = failed + 1, now
        elif pod.index is None or pod.index not in done:
            succeeded += 1
            done += [] if pod.index is None else [pod.index]
    return _replace(
        record,
        pods=_bounded(pods),
        succeeded=succeeded,
        failed=failed,
        last_failure=last_failure,
        recent_failures=_recent_failures(record.recent_failures, ended),
        done=sorted(done),
    )


def _recent_failures(before: int, ended: list[PodStatus]) -> int:
    """Return the failures since the last success, after these pods have ended."""
    for status in sorted(ended, key=lambda status: (_finish_time(status), status.phase == "Succeeded")):
        before = before + 1 if status.phase == "Failed" else 0
    return before


def _finish_time(status: PodStatus) -> float:
    ends = (c.state.terminated.finished_at for c in status.container_statuses if c.state.terminated)
    return max((end.timestamp() for end in ends if end is not None), default=0.0)


def _final(status: PodStatus) -> PodStatus:
    """Return the part of a final status that is recorded."""
    return PodStatus(
        phase=status.phase,
        reason=status.reason[:MAX_MESSAGE],
        message=status.message[:MAX_MESSAGE],
        start_time=status.start_time,
        pod_ip=status.pod_ip,
        conditions=[
            msgspec.structs.replace(condition, message=msgspec.UNSET)
            for condition in status.conditions[:MAX_STATUSES]
        ],
        qos_class=status.qos_class,
        init_container_statuses=[_final_container(c) for c in status.init_container_statuses[:MAX_STATUSES]],
        container_statuses=[_final_container(c) for c in status.container_statuses[:MAX_STATUSES]],
    )


def _final_container(status: ContainerStatus) -> ContainerStatus:
    ended = status.state.terminated
    if ended is not None and isinstance(ended.message, str):
        ended = msgspec.structs.replace(ended, message=ended.message[:MAX_MESSAGE])
    return ContainerStatus(
        name=status.name,
        image=status.image,
        image_id=status.image_id,
        container_id=status.container_id,
        restart_count=status.restart_count,
        ready=False,
        started=False,
        state=ContainerState(terminated=ended),
    )


def _bounded(pods: list[JobPodRecord]) -> list[JobPodRecord]:
    """Return the active pods, and the last finished ones of each outcome."""
    dropped: set[int] = set()
    for phase in ("Succeeded", "Failed"):
        serials = [pod.serial for pod in pods if pod.status is not None and pod.status.phase == phase]
        dropped.update(serials[:-KEPT_PODS])
    return [pod for pod in pods if pod.serial not in dropped]


def _without_active(record: JobRecord) -> list[JobPodRecord]:
    return [pod for pod in record.pods if pod.status is not None]


def _ended(record: JobRecord, outcome: Outcome, reason: str, message: str, now: float) -> JobRecord:
    return _replace(
        record,
        outcome=outcome,
        reason=reason,
        message=message,
        finished=now,
        pods=_without_active(record),
        done=[],
    )


def _finished(spec: JobSpec, record: JobRecord, now: float) -> JobPlan:
    """Return the plan of a finished Job, whose pods are removed after its time to live."""
    if spec.ttl_seconds_after_finished is None or not record.pods or record.finished is None:
        return JobPlan(record)
    expires = record.finished + spec.ttl_seconds_after_finished
    return JobPlan(_replace(record, pods=[])) if now >= expires else JobPlan(record, expires)


def completions_of(spec: JobSpec) -> int | None:
    """Return the number of completions; None for pods that take work from a queue."""
    return 1 if spec.completions is None and spec.parallelism is None else spec.completions


def _is_complete(spec: JobSpec, record: JobRecord) -> bool:
    completions = completions_of(spec)
    if completions is not None:
        return record.succeeded >= completions
    # Without completions the pods take work from a queue: one that succeeds has found it empty.
    return record.succeeded > 0 and not record.active


def _past_backoff_limit(spec: JobSpec, record: JobRecord) -> bool:
    limit = DEFAULT_BACKOFF_LIMIT if spec.backoff_limit is None else spec.backoff_limit
    if record.failed > limit:
        return True
    if spec.template.spec.restart_policy != "OnFailure":
        return False
    restarts = sum(pod.restarts for pod in record.active)
    return restarts > 0 if limit == 0 else restarts >= limit


def _with_new_pods(spec: JobSpec, record: JobRecord, now: float) -> tuple[JobRecord, float | None]:
    """Return the record with the pods to start now, and the time at which the next one may start."""
    parallelism = 1 if spec.parallelism is None else spec.parallelism
    active = record.active
    completions = completions_of(spec)
    if completions is not None:
        desired = min(parallelism, completions - record.succeeded)
    else:
        desired = len(active) if record.succeeded else parallelism
    if len(active) > desired:
        excess = {pod.serial for pod in active[desired:]}
        return _replace(record, pods=[pod for pod in record.pods if pod.serial not in excess]), None
    if len(active) == desired:
        return record, None
    if record.recent_failures:
        retry_at = record.last_failure + retry_delay(record.recent_failures)
        # The clock may have been set back: no delay is longer than the longest.
        if now < retry_at <= now + MAX_DELAY_SECONDS:
            return record, retry_at
    serials = range(record.next_serial, record.next_serial + desired - len(active))
    indexes = _free_indexes(spec, record, len(serials))
    new = [JobPodRecord(serial=serial, index=index) for serial, index in zip(serials, indexes, strict=True)]
    return _replace(record, pods=[*record.pods, *new], next_serial=serials.stop), None


def retry_delay(failures: int) -> float:
    """Return the seconds between the last failure and the next pod, after failures without a success."""
    return exponential_delay(FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS, failures)


def _free_indexes(spec: JobSpec, record: JobRecord, count: int) -> list[int | None]:
    if spec.completion_mode != "Indexed" or spec.completions is None:
        return [None] * count
    taken = {*record.done, *(pod.index for pod in record.active)}
    free = [index for index in range(spec.completions) if index not in taken]
    return [*free[:count]]
