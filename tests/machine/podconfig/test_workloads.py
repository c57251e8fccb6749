"""Workloads on a real standalone node: Jobs once, data that stays, order of starts, and what is stopped."""

import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import Document, container, forever, pod
from tests.support.node import BIN, Node, is_ready, status_of

pytestmark = pytest.mark.machine


@pytest.fixture(autouse=True)
def tidy(node: Node) -> Iterator[None]:
    """Remove the test's manifests; the module's end proves that their pods are gone."""
    if node.process is None:
        node.start()
    yield
    for path in node.manifests.iterdir():
        path.unlink()


def template(*containers: Document, meta: Document | None = None, **spec: Any) -> Document:
    found = pod("x", *containers, **spec)
    return {"metadata": {"labels": {"app": "x"}, **(meta or {})}, "spec": found["spec"]}


def workload(kind: str, name: str, **spec: Any) -> Document:
    group = "batch/v1" if "Job" in kind else "apps/v1"
    return {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec}


def job(name: str, script: str, restart: str = "Never", **spec: Any) -> Document:
    """A Job; its containers share the directory of the test through a hostPath volume."""
    return workload(
        "Job", name, template=template(container(command=["sh", "-c", script]), restartPolicy=restart), **spec
    )


def recording(directory: Path, name: str, script: str, **spec: Any) -> Document:
    """A Job whose runs each append a line to a file on the host before they do anything else."""
    written = job(name, f'echo "$HOSTNAME" >> /host/runs; {script}', **spec)
    pod_spec = written["spec"]["template"]["spec"]
    pod_spec["volumes"] = [{"name": "host", "hostPath": {"path": str(directory)}}]
    pod_spec["containers"][0]["volumeMounts"] = [{"name": "host", "mountPath": "/host"}]
    return written


def record_of(node: Node, name: str) -> Document:
    try:
        found: Document = json.loads((node.root / "workloads" / f"job_default_{name}.json").read_text())[
            "job"
        ]
    except FileNotFoundError:
        return {}
    return found


def wait_outcome(node: Node, name: str, outcome: str, seconds: float = 60) -> Document:
    return node.wait(
        f"job {name} to be {outcome}",
        lambda: found if (found := record_of(node, name)).get("outcome") == outcome else None,
        seconds,
    )


def test_job_completed_is_not_run_again_after_restarts_kills_and_lost_containers(
    node: Node, tmp_path: Path
) -> None:
    node.write(recording(tmp_path, "once", "true"))
    wait_outcome(node, "once", "Complete")
    uid = node.wait_phase("once-0-n1", "Succeeded")["metadata"]["uid"]
    node.restart()
    assert node.wait_phase("once-0-n1", "Succeeded")["metadata"]["uid"] == uid
    node.kill()
    # A reboot or a clean-up of the runtime loses what the runtime knows of the run.
    for one in node.truth.containers():
        node.truth.remove_container(one.id)
    node.start()
    node.wait_phase("once-0-n1", "Succeeded")
    # Another pod that starts and is ready proves that the node has had the time.
    node.start_pod(pod("witness"))
    assert (tmp_path / "runs").read_text().count("\n") == 1
    # A changed template is a new run.
    node.write(recording(tmp_path, "once", "echo changed"))
    node.wait("the new run", lambda: (tmp_path / "runs").read_text().count("\n") == 2)
    wait_outcome(node, "once", "Complete")


def test_job_completions_survive_random_kills_of_the_kubelet(node: Node, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    node.write(recording(tmp_path, "many", "sleep 0.3", completions=6, parallelism=2))
    for _ in range(5):
        time.sleep(rng.uniform(0.0, 1.5))
        node.kill()
        node.start(wait=rng.random() < 0.5)
    found = wait_outcome(node, "many", "Complete", 90)
    assert found["succeeded"] == 6, seed
    runs = (tmp_path / "runs").read_text().split()
    assert len(runs) == 6 + found.get("failed", 0), f"seed {seed}: each pod ran once, {runs}"
    assert len(set(runs)) == len(runs), seed


def test_job_failure_is_retried_and_deadline_ends_it(node: Node, tmp_path: Path) -> None:
    node.write(recording(tmp_path, "flaky", "test $(wc -l < /host/runs) -ge 2", backoffLimit=2))
    node.write(job("endless", "trap 'exit 1' TERM; sleep 1000 & wait", activeDeadlineSeconds=2))
    assert wait_outcome(node, "endless", "Failed")["reason"] == "DeadlineExceeded"
    found = wait_outcome(node, "flaky", "Complete")
    assert (found["succeeded"], found["failed"]) == (1, 1)


def test_cron_job_missed_runs_start_one_job_that_is_kept(node: Node, tmp_path: Path) -> None:
    """Verify the whole path without waiting for a minute: the record is that of a node that was off."""
    assert node.stop() == 0
    inner = recording(tmp_path, "unused", "true")["spec"]
    node.write(
        workload("CronJob", "hourly", schedule="0 * * * *", timeZone="UTC", jobTemplate={"spec": inner})
    )
    path = node.root / "workloads" / "cronjob_default_hourly.json"
    path.parent.mkdir(exist_ok=True)
    since = int(time.time()) - 5 * 3600
    known = {"uid": "u", "since": since, "schedule": "0 * * * * UTC"}
    path.write_text(
        json.dumps({"kind": "CronJob", "namespace": "default", "name": "hourly", "cronJob": known})
    )
    node.start()

    def job_of() -> Document | None:
        jobs: list[Document] = json.loads(path.read_text())["cronJob"].get("jobs", [])
        return jobs[0] if jobs and jobs[0]["record"].get("outcome") == "Complete" else None

    found = node.wait("the Job to complete", job_of)
    due = int(time.time()) // 3600 * 3600
    assert found["name"] in (f"hourly-{due // 60}", f"hourly-{due // 60 - 60}")
    node.wait_phase(f"{found['name']}-0-n1", "Succeeded")
    node.restart()
    node.start_pod(pod("witness3"))
    assert (tmp_path / "runs").read_text().count("\n") == 1


def test_stateful_set_data_survives_replacement_and_removal(node: Node) -> None:
    def database(version: str) -> Document:
        main = container(
            command=forever(f"echo {version} >> /data/log"),
            volumeMounts=[{"name": "data", "mountPath": "/data"}],
            securityContext={"runAsUser": 1000},
        )
        return workload(
            "StatefulSet",
            "db",
            template=template(main),
            volumeClaimTemplates=[{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}],
        )

    node.write(database("one"))
    node.wait_ready("db-0-n1")
    node.write(database("two"))
    directory = node.root / "local-volumes/default/data-db-0"
    node.wait("the successor", lambda: (directory / "log").read_text() == "one\ntwo\n")
    uid = node.wait_ready("db-0-n1")["metadata"]["uid"]
    node.remove("db")
    node.wait_gone("db-0-n1", uid)
    assert (directory / "log").read_text() == "one\ntwo\n"
    node.write(database("three"))
    node.wait_ready("db-0-n1")
    assert node.shell("db-0-n1", "cat /data/log; hostname") == "one\ntwo\nthree\ndb-0\n"


def test_claim_missing_waits_with_remedy_and_starts_once_written(node: Node) -> None:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "late"}}]
    name = node.write(
        pod("waiting", container(volumeMounts=[{"name": "v", "mountPath": "/v"}]), volumes=volumes)
    )
    message = node.wait_event(name, "FailedMount")
    assert 'persistentvolumeclaim "late" not found: write a PersistentVolumeClaim late' in message
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "late"}, "spec": {}}
    node.write(json.dumps(claim), "claim.json")
    node.wait_ready(name)


def test_deployment_replicas_run_and_scale(node: Node) -> None:
    def web(replicas: int) -> Document:
        return workload("Deployment", "web", replicas=replicas, template=template())

    node.write(web(2))
    first = node.wait_ready("web-n1")
    second = node.wait_ready("web-1-n1")
    assert first["metadata"]["ownerReferences"][0]["kind"] == "Deployment"
    node.write(web(1))
    node.wait_gone("web-1-n1", second["metadata"]["uid"])
    now = node.pod("web-n1")
    assert now is not None
    assert now["metadata"]["uid"] == first["metadata"]["uid"]


def waits_for(names: str) -> Document:
    return {"annotations": {"pykubelet.dev/wait-for": names}}


def reason_of(found: Document) -> str:
    waiting: Document = status_of(found, "main")["state"].get("waiting", {})
    return str(waiting.get("reason", ""))


def test_wait_for_starts_after_ready_pods_and_completed_jobs_and_not_again(
    node: Node, tmp_path: Path
) -> None:
    probe = {"exec": {"command": ["test", "-e", "/host/ready"]}, "periodSeconds": 1}
    mounts = [{"name": "host", "mountPath": "/host"}]
    volumes = [{"name": "host", "hostPath": {"path": str(tmp_path)}}]
    app = node.write(pod("app", meta=waits_for("db, migrate")))
    node.wait_pod(app, "to report missing pods", lambda found: reason_of(found) == "WaitForMissing")
    node.write(pod("db", container(readinessProbe=probe, volumeMounts=mounts), volumes=volumes))
    node.write(job("migrate", "true"))
    node.wait_pod(app, "to wait", lambda found: reason_of(found) == "WaitingForPods")
    wait_outcome(node, "migrate", "Complete")
    only_db = ("WaitingForPods", "waits for pod db to be ready", "")
    node.wait("the Job not to be waited for any more", lambda: only_db in node.events(app))
    assert not node.truth.running(app)
    (tmp_path / "ready").touch()
    started = node.wait_ready(app)
    # It does not stop when the other one becomes unready, also not for the next kubelet process.
    (tmp_path / "ready").unlink()
    node.wait_pod("db-n1", "to be unready", lambda found: not is_ready(found))
    node.restart()
    node.wait_ready(app)
    now = node.pod(app)
    assert now is not None
    assert now["metadata"]["uid"] == started["metadata"]["uid"]
    assert status_of(now, "main")["restartCount"] == 0


def test_wait_for_cycle_is_reported_and_resolved_by_an_edit(node: Node) -> None:
    left = node.write(pod("left", meta=waits_for("right")))
    node.write(pod("right", meta=waits_for("left")))
    node.wait_pod(left, "to report the cycle", lambda found: reason_of(found) == "WaitForCycle")
    assert "left-n1 → right-n1 → left-n1" in node.wait_event(left, "WaitForCycle")
    node.write(pod("right"))
    node.wait_ready(left)


def cli(node: Node, *arguments: str, code: int = 0) -> str:
    """Run a command on the node and return its output."""
    ran = subprocess.run(
        [str(BIN / "pykubelet"), *arguments, "--data-dir", str(node.instance.data_dir)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_commands_stop_across_restarts_start_and_remove_with_volumes(node: Node, tmp_path: Path) -> None:
    main = container(
        command=forever("date >> /data/starts"), volumeMounts=[{"name": "data", "mountPath": "/data"}]
    )
    written = workload(
        "StatefulSet", "shop", template=template(main), volumeClaimTemplates=[{"metadata": {"name": "data"}}]
    )
    file = tmp_path / "shop.yaml"
    file.write_text(json.dumps(written))
    assert cli(node, "apply", str(file)) == "statefulset/shop created\n"
    uid = node.wait_ready("shop-0-n1")["metadata"]["uid"]
    node.wait("get to show it", lambda: " 1/1     Running " in cli(node, "get", "sts", "shop"))
    assert cli(node, "apply", str(file)) == "statefulset/shop unchanged\n"
    assert cli(node, "stop", "shop") == "statefulset/shop stopped\n"
    node.wait_gone("shop-0-n1", uid)
    node.restart()
    node.start_pod(pod("witness"))
    assert node.pod("shop-0-n1") is None
    assert "Stopped" in cli(node, "get", "sts", "shop")
    assert cli(node, "start", "shop") == "statefulset/shop started\n"
    node.wait_ready("shop-0-n1")
    directory = node.root / "local-volumes/default/data-shop-0"
    assert (directory / "starts").read_text().count("\n") == 2
    assert f"volume {directory} deleted" in cli(node, "rm", "shop", "--volumes")
    assert not directory.exists()
    assert not node.truth.running("shop-0-n1")


def test_commands_job_that_was_stopped_continues_and_completed_one_stays(node: Node, tmp_path: Path) -> None:
    node.write(recording(tmp_path, "done", "true"))
    wait_outcome(node, "done", "Complete")
    cli(node, "stop", "done")
    node.wait("its pod to be gone", lambda: node.pod("done-0-n1") is None)
    node.restart()
    cli(node, "start", "done")
    node.wait_phase("done-0-n1", "Succeeded")
    node.start_pod(pod("witness2"))
    assert (tmp_path / "runs").read_text().count("\n") == 1
    assert "1/1     Complete" in cli(node, "get", "job", "done")


EXAMPLES = Path(__file__).parents[3] / "examples" / "workloads"


def test_examples_run_as_their_comments_promise(node: Node) -> None:
    cli(node, "apply", str(EXAMPLES))
    node.wait_ready("hello-n1")
    node.wait_ready("hello-1-n1")
    node.wait_ready("agent-n1")
    node.wait_ready("notes-0-n1", 60)
    node.wait_ready("reader-n1", 60)
    wait_outcome(node, "import", "Complete")
    assert node.shell("reader-n1", "cat /data/imported") == "imported\n"
    table = cli(node, "get")
    for kind in ("Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob", "PersistentVolumeClaim", "Pod"):
        assert f"\n{kind} " in table, table
    cli(node, "rm", "--volumes", *(path.name for path in sorted(EXAMPLES.iterdir())))
    left = {path.name for path in (node.root / "local-volumes").glob("*/*")}
    assert not left & {"data", "notes-notes-0"}
