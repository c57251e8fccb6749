"""Workload controller: offers the pods of Jobs and CronJobs together with the other pods of the file source.

It stands between the file source and the mux on a node without an API server. `offer` receives the workloads
of a scan and `emit` its pods; one task computes the next records (`job.py`, `cron_job.py`), writes those
that have changed, and then emits the full set. A set is emitted only after the records have been read, so a
restarted kubelet removes no pod of a Job and starts none twice. While there are neither workloads nor
records, `emit` passes the pods on immediately.

If a record cannot be written, the pods of the previous records and all other pods are offered, and the write
is retried; pods of no unwritten record are ever offered. The record of a Job whose manifest is gone is
removed; while its manifest has problems or is stopped, or the directory of manifests is missing, it stays. At
most `MAX_JOBS` Jobs and CronJobs run: more are reported as problems.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.config.errors import Problem
from pykubelet.logs import get_logger
from pykubelet.podconfig.file_source import Emit
from pykubelet.podconfig.static_pods import complete_static_pod, without_duplicates
from pykubelet.podconfig.stopped import stopped_path
from pykubelet.podconfig.wait_for import JobOutcome
from pykubelet.podconfig.workloads.cron_job import CronJobRecord, plan_cron_job
from pykubelet.podconfig.workloads.job import (
    COMPLETE,
    JobPodRecord,
    JobRecord,
    new_record,
    plan_job,
    pod_uid,
    run_hash,
)
from pykubelet.podconfig.workloads.kinds import CronJobSpec, JobSpec, Workload
from pykubelet.podconfig.workloads.records import (
    DIRECTORY,
    Key,
    WorkloadRecord,
    read_records,
    record_path,
    write_records,
)
from pykubelet.podconfig.workloads.templates import job_pod, owner_of, stable_uid
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
MAX_JOBS = 200
"""Jobs and CronJobs of a node."""
CHECK_SECONDS = 30.0
"""Longest time between two looks at the clock, which may be set, and stands still while the host sleeps."""
RETRY_SECONDS = 5.0
"""Seconds until the next attempt to write a record."""
Titled = tuple[str, Workload]


@dataclass(frozen=True, slots=True)
class _Offer:
    """Last set of the file source."""

    source: str
    pods: Sequence[Pod]
    problems: Sequence[Problem]
    workloads: Mapping[Key, Titled]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a Job, with the spec that it began with."""

    namespace: str
    name: str
    spec: JobSpec
    record: JobRecord


class WorkloadController:
    """Controller of the Jobs and CronJobs of a standalone node.

    `status_of` returns the current status of a pod by its uid; `clock` returns Unix time in seconds.
    """

    def __init__(
        self,
        root: Path,
        node_name: str,
        emit: Emit,
        status_of: Callable[[str], PodStatus | None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = root / DIRECTORY
        self._node_name = node_name
        self._emit_set = emit
        self._status_of = status_of
        self._clock = clock
        self._workloads: dict[Key, Titled] = {}
        self._offered: _Offer | None = None
        self._records: dict[Key, WorkloadRecord] | None = None
        """Written records; None before they have been read."""
        self._unreadable: dict[str, str] = {}
        self._restored: set[str] = set()
        """Uids of pods that finished before this process started."""
        self._pods: dict[str, Pod] = {}
        """Offered pods of Jobs by uid."""
        self._of_completed: frozenset[str] = frozenset()
        """Uids of those whose Job has completed."""
        self._hashes: dict[Key, tuple[JobSpec, str]] = {}
        """Hashes of the runs of the offered Jobs: templates are large, and steps are frequent."""
        self._changed = asyncio.Event()
        self._busy = False
        self._problems: frozenset[Problem] = frozenset()
        self._write_error = ""

    def offer(self, workloads: Iterable[Titled]) -> list[Problem]:
        """Replace the full set of workloads, given with their files in order; return the problems."""
        found: dict[Key, Titled] = {}
        problems = []
        for origin, workload in workloads:
            known = found.get(workload.key)
            if known is not None:
                where = "here" if known[0] == origin else f"in {known[0]}"
                problems.append(
                    Problem(origin, f"{workload.title} is already {where}: rename one, or remove it")
                )
            elif len(found) >= MAX_JOBS:
                problems.append(
                    Problem(origin, f"{workload.title}: a node runs at most {MAX_JOBS} Jobs and CronJobs")
                )
            else:
                found[workload.key] = origin, workload
        self._workloads = found
        self._hashes = {key: known for key, known in self._hashes.items() if key in found}
        return problems

    def emit(self, source: str, pods: list[Pod], problems: list[Problem]) -> None:
        """Receive the full set of pods of the file source, after `offer`."""
        self._offered = _Offer(source, pods, problems, self._workloads)
        self._changed.set()
        if not self._workloads and not self._records and self._records is not None and not self._busy:
            self._emit_set(source, pods, problems)

    def handle_status(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        """Handle a new status of a pod."""
        if pod.uid in self._pods:
            self._changed.set()

    def job_outcome(self, namespace: str, name: str) -> JobOutcome | None:
        """Return the outcome of a Job and its reason; None if there is no such Job."""
        record = (self._records or {}).get(("Job", namespace, name))
        if record is None or record.job is None:
            return None if ("Job", namespace, name) not in self._workloads else ("", "")
        return record.job.outcome, record.job.reason

    def has_completed(self, pod: Pod) -> bool:
        """Return whether the Job of a pod has completed, so that a failure of the pod is in the past."""
        return pod.uid in self._of_completed

    async def run(self) -> None:
        """Control the Jobs until cancelled."""
        while True:
            self._changed.clear()
            try:
                delay = await self._step()
                self._log_write_error("")
            except OSError as err:
                self._log_write_error(str(err))
                delay = RETRY_SECONDS
            finally:
                self._busy = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(delay, 0.0), CHECK_SECONDS)):
                    await self._changed.wait()

    async def _step(self) -> float:
        """Compute, write and emit the current state; return the seconds until it may change by itself."""
        offered = self._offered
        if offered is None:
            return CHECK_SECONDS
        self._busy = True
        if self._records is None:
            records, self._unreadable = await asyncio.to_thread(read_records, self._directory)
            self._records = records
            self._restored = {
                pod_uid(run.record.uid, entry.serial)
                for record in records.values()
                for run in _runs(record)
                for entry in run.record.pods
                if entry.status is not None
            }
        if self._unreadable:
            # An operator removes the file of a held workload to run it again.
            self._unreadable = await asyncio.to_thread(_still_present, self._directory, self._unreadable)
        now = self._clock()
        problems: list[Problem] = []
        after: dict[Key, WorkloadRecord] = {}
        wakes: list[float] = []
        for key, (origin, workload) in offered.workloads.items():
            bad = self._unreadable.get(record_path(self._directory, key).name)
            if bad is not None:
                path = record_path(self._directory, key)
                problems.append(
                    Problem(
                        origin,
                        f"{workload.title} is held, because {path} cannot be read ({bad}): "
                        "remove that file to run it again",
                    )
                )
                continue
            after[key], wake = self._plan(workload, origin, self._records.get(key), now)
            wakes += [wake] if wake is not None else []
        troubled = {problem.path for problem in offered.problems}
        gone = self._records.keys() - after.keys()
        held = {key for key in gone if await self._is_held(self._records[key].origin, troubled)}
        changes: dict[Key, WorkloadRecord | None] = {
            key: record for key, record in after.items() if record != self._records.get(key)
        }
        changes |= dict.fromkeys(gone - held)
        if changes:
            try:
                await finish_in_thread(partial(write_records, self._directory, changes))
            except OSError:
                # On a full disk the other pods of the node must run nevertheless.
                self._emit_all(offered, self._written(offered, self._records), problems)
                raise
            self._records = {**after, **{key: self._records[key] for key in held}}
        self._emit_all(offered, after, problems)
        return min(wakes, default=now + CHECK_SECONDS) - now

    def _plan(
        self, workload: Workload, origin: str, before: WorkloadRecord | None, now: float
    ) -> tuple[WorkloadRecord, float | None]:
        kind, namespace, name = workload.key
        record = before or WorkloadRecord(kind=kind, namespace=namespace, name=name)
        if isinstance(workload.spec, CronJobSpec):
            cron = plan_cron_job(
                name,
                workload.spec,
                record.cron_job,
                self._status_of,
                now,
                stable_uid(kind, namespace, name, repr(now)),
            )
            self._report_skipped(workload, record.cron_job, cron.record)
            return msgspec.structs.replace(record, origin=origin, cron_job=cron.record), cron.wake_at
        spec = workload.spec
        assert isinstance(spec, JobSpec)
        known = record.job
        if known is None or known.template != self._run_hash(workload.key, spec):
            known = new_record(spec, f"{namespace}/{name}", now)
        plan = plan_job(spec, known, self._status_of, now)
        if plan.record.outcome and not known.outcome:
            log.info(
                "Job finished",
                job=f"{namespace}/{name}",
                outcome=plan.record.outcome,
                reason=plan.record.reason,
                succeeded=plan.record.succeeded,
                failed=plan.record.failed,
            )
        return msgspec.structs.replace(record, origin=origin, job=plan.record), plan.wake_at

    def _written(self, offered: _Offer, records: Mapping[Key, WorkloadRecord]) -> dict[Key, WorkloadRecord]:
        """Return the written records of the offered workloads, whose pods are known from them."""
        found: dict[Key, WorkloadRecord] = {}
        for key, (_, workload) in offered.workloads.items():
            if (record := records.get(key)) is None:
                continue
            job, spec = record.job, workload.spec
            is_known = (
                job is None
                or not isinstance(spec, JobSpec)
                or job.template == self._run_hash(key, spec)
                or all(pod_uid(job.uid, entry.serial) in self._pods for entry in job.pods)
            )
            # The template of another run is not in the manifest any more.
            if is_known:
                found[key] = record
        return found

    def _run_hash(self, key: Key, spec: JobSpec) -> str:
        known = self._hashes.get(key)
        if known is None or known[0] is not spec:
            known = self._hashes[key] = spec, run_hash(spec)
        return known[1]

    async def _is_held(self, origin: str, troubled: set[str]) -> bool:
        """Return whether the record of a missing workload stays.

        Its manifest is stopped or has problems, or the directory of manifests is missing as a whole.
        """
        return origin in troubled or await asyncio.to_thread(_may_return, Path(origin))

    def _emit_all(
        self, offered: _Offer, records: Mapping[Key, WorkloadRecord], problems: list[Problem]
    ) -> None:
        pods: dict[str, Pod] = {}
        completed: set[str] = set()
        origins: list[tuple[str, Pod]] = [("", pod) for pod in offered.pods]
        for key, record in records.items():
            origin, workload = offered.workloads[key]
            for run in _runs(record, workload):
                for entry in run.record.pods:
                    uid = pod_uid(run.record.uid, entry.serial)
                    pods[uid] = self._pods.get(uid) or self._completed(run, entry, origin)
                    origins.append((origin, pods[uid]))
                    if run.record.outcome == COMPLETE:
                        completed.add(uid)
        self._pods, self._of_completed = pods, frozenset(completed)
        unique, duplicates = without_duplicates(origins)
        self._log_problems([*problems, *duplicates])
        self._emit_set(offered.source, unique, [*offered.problems, *problems, *duplicates])

    def _completed(self, run: _Run, entry: JobPodRecord, origin: str) -> Pod:
        pod = complete_static_pod(
            job_pod(
                run.namespace,
                run.name,
                run.spec,
                uid=pod_uid(run.record.uid, entry.serial),
                serial=entry.serial,
                index=entry.index,
                owner=owner_of("Job", run.namespace, run.name, run.record.uid),
            ),
            source="file",
            origin=origin,
            node_name=self._node_name,
            now=int(self._clock() * 1_000_000_000),
        )
        if entry.status is not None and pod.uid in self._restored:
            # Its containers may be gone: only with its final status it is not started again.
            pod.status = entry.status
        return pod

    def _report_skipped(self, workload: Workload, before: CronJobRecord | None, after: CronJobRecord) -> None:
        if before is not None and after.skipped != before.skipped:
            log.warning("Skipped run of CronJob", cronJob=workload.title, reason=after.message)

    def _log_problems(self, problems: Iterable[Problem]) -> None:
        current = frozenset(problems)
        for problem in sorted(current - self._problems):
            log.error(problem.message, "Failed to run pods of manifest", path=problem.path)
        self._problems = current

    def _log_write_error(self, message: str) -> None:
        if message and message != self._write_error:
            log.error(message, "Failed to store the state of Jobs, retrying", path=self._directory)
        self._write_error = message


def _may_return(manifest: Path) -> bool:
    return stopped_path(manifest).exists() or not manifest.parent.exists()


def _still_present(directory: Path, unreadable: Mapping[str, str]) -> dict[str, str]:
    return {name: problem for name, problem in unreadable.items() if os.path.lexists(directory / name)}


def _runs(record: WorkloadRecord, workload: Workload | None = None) -> list[_Run]:
    """Return the runs of a record; without a Job's workload their specs are empty."""
    namespace = record.namespace
    if record.cron_job is not None:
        return [_Run(namespace, child.name, child.spec, child.record) for child in record.cron_job.jobs]
    if record.job is None:
        return []
    spec = workload.spec if workload is not None and isinstance(workload.spec, JobSpec) else JobSpec()
    return [_Run(namespace, record.name, spec, record.job)]
