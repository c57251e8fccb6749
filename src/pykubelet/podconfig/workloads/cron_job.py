"""State of a CronJob: a pure function from its record, its schedule and the time to its next record.

After a time in which the node did not run, or slept, only the last missed run is started, and none after
`startingDeadlineSeconds`. With `concurrencyPolicy: Allow` at most `MAX_ACTIVE_JOBS` Jobs run: further runs
are skipped, which the record reports. A Job keeps the template with which it was started.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import tzinfo

import msgspec

from pykubelet.api.meta import ObjectStruct
from pykubelet.podconfig.workloads.job import (
    FAILED,
    JobPlan,
    JobRecord,
    StatusOf,
    new_record,
    plan_job,
)
from pykubelet.podconfig.workloads.kinds import CronJobSpec, JobSpec
from pykubelet.podconfig.workloads.schedule import Schedule, time_zone
from pykubelet.podconfig.workloads.templates import job_name

MAX_ACTIVE_JOBS = 10
"""Jobs of a CronJob that run at the same time."""
MAX_HISTORY = 10
"""Finished Jobs of each outcome that stay known, at most."""
DEFAULT_SUCCESSFUL, DEFAULT_FAILED = 3, 1


class ChildJob(ObjectStruct):
    """A Job of a CronJob."""

    name: str
    scheduled: int
    """Unix time of the schedule."""
    spec: JobSpec
    record: JobRecord


class CronJobRecord(ObjectStruct):
    """State of a CronJob."""

    uid: str
    since: int
    """Unix time after which runs are due: the last run, or the first sight of this schedule."""
    schedule: str = ""
    """Schedule and time zone that `since` belongs to."""
    last_schedule: int | None = None
    jobs: list[ChildJob] = []
    skipped: int = 0
    """Runs that were skipped because too many Jobs are active."""
    message: str = ""
    """Reason of the last skipped run."""


@dataclass(frozen=True, slots=True)
class CronJobPlan:
    """Next state of a CronJob."""

    record: CronJobRecord
    wake_at: float | None = None


def plan_cron_job(
    name: str, spec: CronJobSpec, before: CronJobRecord | None, status_of: StatusOf, now: float, uid: str
) -> CronJobPlan:
    """Return the next record of a CronJob; `before` is None for a new one, and is not modified."""
    written = f"{spec.schedule} {spec.time_zone or ''}".rstrip()
    record = before or CronJobRecord(uid=uid, since=int(now))
    if record.schedule != written:
        # A changed schedule has no missed runs.
        record = _replace(record, schedule=written, since=int(now))
    elif record.since > now + _CLOCK_STEP_SECONDS:
        # The clock was set back: without this no run would start for as long.
        record = _replace(record, since=int(now))
    plans = [(job, plan_job(job.spec, job.record, status_of, now)) for job in record.jobs]
    record = _replace(record, jobs=[_with_record(job, plan) for job, plan in plans])
    times = [plan.wake_at for _, plan in plans if plan.wake_at is not None]
    if not spec.suspend:
        record, started, next_run = _with_due_run(name, spec, record, status_of, now)
        times += started
        if next_run is not None:
            times.append(float(next_run))
    return CronJobPlan(_replace(record, jobs=_with_history(spec, record.jobs)), min(times, default=None))


_CLOCK_STEP_SECONDS = 120.0


def _replace(record: CronJobRecord, **fields: object) -> CronJobRecord:
    return msgspec.structs.replace(record, **fields)


def _with_record(job: ChildJob, plan: JobPlan) -> ChildJob:
    return job if plan.record == job.record else msgspec.structs.replace(job, record=plan.record)


def _with_due_run(
    name: str, spec: CronJobSpec, record: CronJobRecord, status_of: StatusOf, now: float
) -> tuple[CronJobRecord, list[float], int | None]:
    """Return the record with the Job that is due, the times at which it changes, and the next run."""
    next_run = _next_run(spec.schedule, spec.time_zone, record.since)
    if next_run is None or next_run > now:
        return record, [], next_run
    due = Schedule.parse(spec.schedule).last_until(int(now), record.since, _zone(spec.time_zone))
    if due is None:
        return record, [], None
    next_run = _next_run(spec.schedule, spec.time_zone, due)
    deadline = spec.starting_deadline_seconds
    if deadline is not None and now - due > deadline:
        message = f"run of {due} was skipped: it is later than startingDeadlineSeconds"
        return _replace(record, since=due, skipped=record.skipped + 1, message=message), [], next_run
    active = [job for job in record.jobs if not job.record.outcome]
    if active and spec.concurrency_policy == "Forbid":
        # It stays due until the active Job has finished, or the starting deadline has passed.
        return record, [], next_run
    jobs = record.jobs
    if active and spec.concurrency_policy == "Replace":
        jobs = [job for job in jobs if job.record.outcome]
    elif len(active) >= MAX_ACTIVE_JOBS:
        message = f"run of {due} was skipped: {MAX_ACTIVE_JOBS} Jobs are active, the most on a node"
        return _replace(record, since=due, skipped=record.skipped + 1, message=message), [], next_run
    child_name = job_name(name, due)
    if any(job.name == child_name for job in jobs):
        # The clock was set back: this run has taken place.
        return _replace(record, since=due), [], next_run
    child_spec = spec.job_template.spec
    run = new_record(child_spec, f"{record.uid}/{child_name}", now)
    started = plan_job(child_spec, run, status_of, now)
    child = ChildJob(name=child_name, scheduled=due, spec=child_spec, record=started.record)
    record = _replace(record, since=due, last_schedule=due, jobs=[*jobs, child])
    return record, [started.wake_at] if started.wake_at is not None else [], next_run


@functools.lru_cache(maxsize=256)
def _next_run(schedule: str, zone: str | None, since: int) -> int | None:
    """Return the first run after a time; cached, because the state of all Jobs is computed often."""
    return Schedule.parse(schedule).next_after(since, _zone(zone))


def _zone(name: str | None) -> tzinfo | None:
    return time_zone(name) if name is not None else None


def _with_history(spec: CronJobSpec, jobs: list[ChildJob]) -> list[ChildJob]:
    """Return the active Jobs, and the last finished ones within the history limits."""
    dropped: set[str] = set()
    for failed, limit, default in (
        (False, spec.successful_jobs_history_limit, DEFAULT_SUCCESSFUL),
        (True, spec.failed_jobs_history_limit, DEFAULT_FAILED),
    ):
        names = [job.name for job in jobs if job.record.outcome and (job.record.outcome == FAILED) is failed]
        keep = min(MAX_HISTORY, default if limit is None else limit)
        dropped.update(names[: max(0, len(names) - keep)])
    return [job for job in jobs if job.name not in dropped and not (job.record.outcome and _has_expired(job))]


def _has_expired(job: ChildJob) -> bool:
    return job.spec.ttl_seconds_after_finished is not None and not job.record.pods
