"""States of Jobs and CronJobs, step by step and under random results."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_json, to_json
from pykubelet.api.pod_status import (
    ContainerState,
    ContainerStateTerminated,
    ContainerStatus,
    PodStatus,
)
from pykubelet.podconfig.workloads.cron_job import (
    MAX_ACTIVE_JOBS,
    ChildJob,
    CronJobRecord,
    plan_cron_job,
)
from pykubelet.podconfig.workloads.job import (
    KEPT_PODS,
    JobPlan,
    JobRecord,
    new_record,
    plan_job,
    pod_uid,
    retry_delay,
)
from pykubelet.podconfig.workloads.kinds import CronJobSpec, JobSpec
from tests.unit.podconfig.workloads.making import cron_spec, job_spec

START = 1_700_000_040.0
"""A whole minute."""


class Run:
    """A Job whose pods end as told; every record passes through the file's format."""

    def __init__(self, spec: JobSpec, now: float = START) -> None:
        self.spec, self.now = spec, now
        self.statuses: dict[str, PodStatus] = {}
        self.record = new_record(spec, "default/once", now)
        self.plan = self.step()

    def step(self, seconds: float = 0.0) -> JobPlan:
        self.now += seconds
        self.plan = plan_job(self.spec, self.record, self.statuses.get, self.now)
        self.record = from_json(JobRecord, to_json(self.plan.record))
        assert self.record == self.plan.record
        assert plan_job(self.spec, self.record, self.statuses.get, self.now) == self.plan, "stable"
        return self.plan

    def end(self, serial: int, phase: str) -> JobPlan:
        self.statuses[pod_uid(self.record.uid, serial)] = PodStatus(phase=phase)
        return self.step()

    @property
    def active(self) -> list[int]:
        return [pod.serial for pod in self.record.active]


def test_plan_job_pod_succeeds_job_completes_and_keeps_its_pod() -> None:
    run = Run(job_spec())
    assert run.active == [0]
    run.end(0, "Running")
    assert run.record.outcome == ""
    run.end(0, "Succeeded")
    assert (run.record.outcome, run.record.succeeded, run.active) == ("Complete", 1, [])
    assert run.record.pods[0].status is not None
    assert run.step(10**6).wake_at is None
    assert len(run.record.pods) == 1, "without a time to live they stay"


def test_plan_job_failures_are_retried_after_growing_delays_up_to_limit() -> None:
    run = Run(job_spec(backoffLimit=2))
    plan = run.end(0, "Failed")
    assert (run.active, plan.wake_at) == ([], START + 10)
    run.step(9.9)
    assert run.active == []
    run.step(0.2)
    assert run.active == [1]
    plan = run.end(1, "Failed")
    assert plan.wake_at == pytest.approx(run.now + 20)
    run.step(20)
    assert run.active == [2]
    run.end(2, "Failed")
    assert (run.record.outcome, run.record.reason, run.record.failed) == ("Failed", "BackoffLimitExceeded", 3)
    assert run.step(10**6).record.next_serial == 3


def test_retry_delay_grows_and_is_bounded() -> None:
    assert [retry_delay(failed) for failed in (1, 2, 3, 7, 10**9)] == [10, 20, 40, 360, 360]


def test_plan_job_success_resets_the_retry_delay() -> None:
    """Verify that the delay counts failures since the last success, as upstream."""
    run = Run(job_spec(completions=3, parallelism=2, backoffLimit=9))
    run.end(0, "Failed")
    run.step(10)
    assert run.end(run.active[-1], "Failed").wake_at == pytest.approx(run.now + 20)
    run.end(run.active[0], "Succeeded")
    assert len(run.active) == 2, "after a success there is no delay"
    assert run.end(run.active[0], "Failed").wake_at == pytest.approx(run.now + 10)
    assert (run.record.failed, run.record.recent_failures) == (3, 1)


def test_plan_job_results_of_one_step_in_order_of_their_end() -> None:
    for failed_at, recent in ((1, 0), (2, 0), (3, 1)):
        run = Run(job_spec(completions=3, parallelism=2))
        for serial, phase, second in ((0, "Failed", failed_at), (1, "Succeeded", 2)):
            end = ContainerStateTerminated(
                exit_code=0, finished_at=datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)
            )
            status = ContainerStatus(name="main", state=ContainerState(terminated=end))
            run.statuses[pod_uid(run.record.uid, serial)] = PodStatus(
                phase=phase, container_statuses=[status]
            )
        run.step()
        assert run.record.recent_failures == recent


def test_plan_job_clock_set_back_does_not_delay_retry_for_long() -> None:
    run = Run(job_spec())
    run.end(0, "Failed")
    run.step(-(10**6))
    assert run.active == [1]


def test_plan_job_restarts_count_as_failures_with_on_failure() -> None:
    run = Run(job_spec(restart="OnFailure", backoffLimit=3))
    run.statuses[pod_uid(run.record.uid, 0)] = PodStatus(
        phase="Running", container_statuses=[ContainerStatus(name="main", restart_count=2)]
    )
    run.step()
    assert run.record.outcome == ""
    run.statuses[pod_uid(run.record.uid, 0)].container_statuses[0].restart_count = 3
    run.step()
    assert (run.record.reason, run.active) == ("BackoffLimitExceeded", [])


def test_plan_job_deadline_ends_active_pods() -> None:
    run = Run(job_spec(activeDeadlineSeconds=60))
    assert run.plan.wake_at == START + 60
    run.step(59.9)
    assert run.active == [0]
    run.step(0.1)
    assert (run.record.reason, run.record.pods) == ("DeadlineExceeded", [])


def test_plan_job_time_to_live_removes_pods_but_not_the_outcome() -> None:
    run = Run(job_spec(ttlSecondsAfterFinished=30))
    plan = run.end(0, "Succeeded")
    assert plan.wake_at == START + 30
    run.step(30)
    assert (run.record.pods, run.record.outcome) == ([], "Complete")
    run.step(10**6)
    assert run.record.next_serial == 1, "it does not run again"


def test_plan_job_suspend_and_resume_stops_and_starts_pods() -> None:
    run = Run(job_spec(suspend=True, activeDeadlineSeconds=10))
    assert (run.active, run.plan.wake_at) == ([], None)
    run.spec = job_spec(activeDeadlineSeconds=10)
    run.step(100)
    assert (run.active, run.plan.wake_at) == ([0], run.now + 10)
    run.spec = job_spec(suspend=True)
    run.step()
    assert run.active == []


def test_plan_job_work_queue_completes_when_all_pods_have_ended() -> None:
    run = Run(job_spec(parallelism=3))
    assert run.active == [0, 1, 2]
    run.end(1, "Succeeded")
    assert (run.active, run.record.outcome) == ([0, 2], "")
    run.end(0, "Succeeded")
    run.end(2, "Succeeded")
    assert run.record.outcome == "Complete"
    assert run.record.next_serial == 3


def test_plan_job_parallelism_reduced_stops_the_newest_pods() -> None:
    run = Run(job_spec(parallelism=3, completions=5))
    run.spec = job_spec(parallelism=1, completions=5)
    run.step()
    assert run.active == [0]


@given(
    st.integers(0, 6),
    st.integers(1, 16),
    st.integers(0, 4),
    st.sampled_from([None, "Indexed"]),
    st.lists(st.tuples(st.integers(0, 15), st.sampled_from(["Succeeded", "Failed", "Running"])), max_size=60),
)
def test_plan_job_any_results_keep_the_invariants(
    completions: int, parallelism: int, limit: int, mode: str | None, ends: list[tuple[int, str]]
) -> None:
    more = {"completionMode": mode} if mode else {}
    run = Run(job_spec(completions=completions, parallelism=parallelism, backoffLimit=limit, **more))
    finished_at = None
    for position, phase in ends:
        active = run.record.active
        assert len(active) <= min(parallelism, completions)
        assert len(run.record.pods) <= parallelism + 2 * KEPT_PODS
        assert len({pod.serial for pod in run.record.pods}) == len(run.record.pods)
        if mode:
            indexes = [pod.index for pod in active]
            assert len(set(indexes)) == len(indexes)
            assert not set(indexes) & set(run.record.done)
            assert all(index is not None and 0 <= index < completions for index in indexes)
        if active:
            run.end(active[position % len(active)].serial, phase)
        run.step(400)
        assert run.record.succeeded <= completions
        assert run.record.failed <= limit + parallelism
        if finished_at is not None:
            assert run.record == finished_at
        elif run.record.outcome:
            assert not run.record.active
            assert (run.record.outcome == "Complete") == (run.record.succeeded >= completions)
            finished_at = run.record


class Clock:
    """A CronJob whose time and pods are told."""

    def __init__(self, spec: CronJobSpec, now: float = START) -> None:
        self.spec, self.now = spec, now
        self.statuses: dict[str, PodStatus] = {}
        self.record: CronJobRecord | None = None
        self.wake_at: float | None = None
        self.started: list[str] = []

    def step(self, seconds: float = 0.0) -> "Clock":
        self.now += seconds
        known = {job.name for job in self.record.jobs} if self.record is not None else set()
        plan = plan_cron_job("cj", self.spec, self.record, self.statuses.get, self.now, "uid")
        self.record = from_json(CronJobRecord, to_json(plan.record))
        assert self.record == plan.record
        self.wake_at = plan.wake_at
        self.started += [job.name for job in self.record.jobs if job.name not in known]
        return self

    def jobs(self, fits: Callable[[ChildJob], bool] = lambda job: True) -> list[str]:
        assert self.record is not None
        return [job.name for job in self.record.jobs if fits(job)]

    def end_all(self, phase: str = "Succeeded") -> None:
        assert self.record is not None
        for job in self.record.jobs:
            for pod in job.record.active:
                self.statuses[pod_uid(job.record.uid, pod.serial)] = PodStatus(phase=phase)
        self.step()


def test_plan_cron_job_starts_at_its_minutes_with_names_of_a_cluster() -> None:
    clock = Clock(cron_spec("*/2 * * * *")).step()
    assert clock.started == []
    assert clock.wake_at == START + 60 or clock.wake_at == START + 120
    assert clock.wake_at is not None
    clock.step(clock.wake_at - clock.now)
    assert clock.started == [f"cj-{int(clock.now) // 60}"]
    clock.step(1).step(1)
    assert len(clock.started) == 1, "once per run"


def test_plan_cron_job_after_sleep_runs_once_and_not_every_missed_minute() -> None:
    clock = Clock(cron_spec("* * * * *")).step()
    clock.step(10 * 24 * 3600)
    assert len(clock.started) == 1
    clock.step(1)
    assert len(clock.started) == 1


def test_plan_cron_job_starting_deadline_skips_late_runs() -> None:
    clock = Clock(cron_spec("0 0 * * *", startingDeadlineSeconds=30)).step()
    clock.step(24 * 3600 + 7 * 3600)
    assert clock.started == []
    assert clock.record is not None
    assert (clock.record.skipped, "startingDeadlineSeconds" in clock.record.message) == (1, True)


def test_plan_cron_job_allow_with_long_jobs_is_bounded_and_reported() -> None:
    clock = Clock(cron_spec("* * * * *")).step()
    for _ in range(100):
        clock.step(60)
    assert len(clock.started) == MAX_ACTIVE_JOBS
    assert clock.record is not None
    assert clock.record.skipped == 100 - MAX_ACTIVE_JOBS
    assert "10 Jobs are active" in clock.record.message
    clock.end_all()
    clock.step(60)
    assert len(clock.started) == MAX_ACTIVE_JOBS + 1


def test_plan_cron_job_forbid_waits_for_the_active_job_and_then_runs_once() -> None:
    clock = Clock(cron_spec("* * * * *", concurrencyPolicy="Forbid")).step()
    for _ in range(5):
        clock.step(60)
    assert len(clock.started) == 1
    clock.end_all()
    assert len(clock.started) == 2


def test_plan_cron_job_replace_stops_the_active_job() -> None:
    clock = Clock(cron_spec("* * * * *", concurrencyPolicy="Replace")).step().step(60)
    first = clock.jobs()
    clock.step(60)
    assert len(clock.started) == 2
    assert clock.jobs() != first
    assert len(clock.jobs()) == 1


def test_plan_cron_job_history_limits_keep_the_last_jobs() -> None:
    spec = cron_spec("* * * * *", successfulJobsHistoryLimit=2, failedJobsHistoryLimit=0)
    clock = Clock(spec).step()
    for _ in range(5):
        clock.step(60)
        clock.end_all()
    assert clock.jobs() == clock.started[-2:]
    clock.spec.job_template.spec.backoff_limit = 0
    clock.step(60)
    clock.end_all("Failed")
    assert clock.jobs() == clock.started[3:5]


def test_plan_cron_job_suspended_or_changed_schedule_has_no_missed_runs() -> None:
    clock = Clock(cron_spec("* * * * *", suspend=True)).step().step(3600)
    assert clock.started == []
    clock.spec = cron_spec("0 4 * * *")
    clock.step(1)
    assert clock.started == [], "a new schedule begins now"


def test_plan_cron_job_clock_set_back_continues() -> None:
    clock = Clock(cron_spec("* * * * *")).step().step(60)
    clock.end_all()
    clock.step(-365 * 24 * 3600).step(61)
    assert len(clock.started) == 2


def test_plan_cron_job_changed_template_does_not_change_a_running_job() -> None:
    clock = Clock(cron_spec("* * * * *")).step().step(60)
    assert clock.record is not None
    before = clock.record.jobs[0]
    clock.spec = msg_with_hostname(clock.spec)
    clock.step(1)
    assert clock.record.jobs[0] == before


def msg_with_hostname(spec: CronJobSpec) -> CronJobSpec:
    copy = from_json(CronJobSpec, to_json(spec))
    copy.job_template.spec.template.spec.hostname = "changed"
    return copy


@given(
    st.sampled_from(["* * * * *", "*/7 * * * *", "0 * * * *", "30 4 * * *"]),
    st.sampled_from(["Allow", "Forbid", "Replace"]),
    st.lists(
        st.tuples(
            st.sampled_from([1, 60, 61, 3600, 86_400, -7200]), st.sampled_from(["", "Succeeded", "Failed"])
        ),
        max_size=40,
    ),
)
def test_plan_cron_job_any_times_and_results_stay_bounded(
    schedule: str, policy: str, steps: list[tuple[int, str]]
) -> None:
    clock = Clock(cron_spec(schedule, concurrencyPolicy=policy)).step()
    for seconds, phase in steps:
        before = len(clock.started)
        clock.step(seconds)
        assert len(clock.started) <= before + 1
        if phase:
            clock.end_all(phase)
        active = clock.jobs(lambda job: not job.record.outcome)
        assert len(active) <= (MAX_ACTIVE_JOBS if policy == "Allow" else 1)
        assert len(clock.jobs()) <= MAX_ACTIVE_JOBS + 4
        assert len(set(clock.jobs())) == len(clock.jobs())


def test_plan_job_recorded_status_is_bounded_whatever_a_pod_reports() -> None:
    text = "x" * 100_000
    ended = ContainerState(terminated=ContainerStateTerminated(exit_code=3, reason="Error", message=text))
    huge = PodStatus(
        phase="Failed",
        message=text,
        reason="Error",
        container_statuses=[ContainerStatus(name=f"c{index}", state=ended) for index in range(500)],
    )
    run = Run(job_spec(backoffLimit=100, parallelism=16, completions=1000))
    for _ in range(4):
        for serial in run.active:
            run.statuses[pod_uid(run.record.uid, serial)] = huge
        run.step()
        run.step(400)
    assert len(to_json(run.record)) < 200_000
    kept = next(pod.status for pod in run.record.pods if pod.status is not None)
    assert kept.container_statuses[0].state.terminated is not None
    assert kept.container_statuses[0].state.terminated.exit_code == 3
