"""Workloads for tests."""

from typing import Any

import yaml

from pykubelet.config.errors import ConfigError
from pykubelet.podconfig.local_objects import LOCAL_KINDS
from pykubelet.podconfig.manifests import WORKLOAD_VERSIONS, Contents
from pykubelet.podconfig.static_pods import static_contents
from pykubelet.podconfig.workloads.kinds import CronJobSpec, JobSpec, Workload, read_workload

Document = dict[str, Any]


def template(restart: str = "", **spec: Any) -> Document:
    policy = {"restartPolicy": restart} if restart else {}
    containers = [{"name": "main", "image": "busybox:1.35"}]
    return {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": containers, **policy, **spec}}


def document(kind: str, name: str = "web", **spec: Any) -> Document:
    return {"apiVersion": WORKLOAD_VERSIONS[kind], "kind": kind, "metadata": {"name": name}, "spec": spec}


def deployment(name: str = "web", **spec: Any) -> Document:
    return document("Deployment", name, **{"template": template(), **spec})


def stateful_set(name: str = "db", **spec: Any) -> Document:
    return document("StatefulSet", name, **{"template": template(), **spec})


def job(name: str = "once", restart: str = "Never", **spec: Any) -> Document:
    return document("Job", name, **{"template": template(restart), **spec})


def cron_job(name: str = "nightly", schedule: str = "0 3 * * *", **spec: Any) -> Document:
    return document("CronJob", name, schedule=schedule, jobTemplate={"spec": job()["spec"]}, **spec)


def claim(name: str = "data", **spec: Any) -> Document:
    return document("PersistentVolumeClaim", name, **{"accessModes": ["ReadWriteOnce"], **spec})


def workload(written: Document) -> Workload:
    return read_workload(written["kind"], written)


def job_spec(restart: str = "Never", **spec: Any) -> JobSpec:
    found = workload(job(restart=restart, **spec)).spec
    assert isinstance(found, JobSpec)
    return found


def cron_spec(schedule: str = "* * * * *", **spec: Any) -> CronJobSpec:
    found = workload(cron_job(schedule=schedule, **{"timeZone": "UTC", **spec})).spec
    assert isinstance(found, CronJobSpec)
    return found


def contents(*documents: Document, standalone: bool = True) -> Contents:
    """Read documents as the file source of a node does."""
    return static_contents(
        yaml.safe_dump_all(documents).encode(),
        source="file",
        origin="/m/a.yaml",
        node_name="n1",
        now=0,
        served=LOCAL_KINDS if standalone else frozenset(),
    )


def problems_of(*documents: Document, standalone: bool = True) -> list[str]:
    try:
        contents(*documents, standalone=standalone)
    except ConfigError as err:
        return [problem.message for problem in err.problems]
    return []
