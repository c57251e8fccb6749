"""Pods of workloads: names, labels and owner references, as the controllers of a cluster set them.

A pod is returned as if it were written in the manifest; the static pod source completes it. Names do not
change between restarts of the kubelet:

| kind | pods |
|---|---|
| Deployment | the name of the Deployment; a second one has `-1` appended |
| DaemonSet | the name of the DaemonSet |
| StatefulSet | `-0` appended, or `spec.ordinals.start` |
| Job | a number appended that is never used twice by a run of the Job |
| CronJob | Jobs with the minute of their schedule appended |
"""

from __future__ import annotations

import copy
import hashlib
import json

import msgspec

from pykubelet.api.meta import ObjectMeta, OwnerReference, to_document
from pykubelet.api.pod import EnvVar, Pod
from pykubelet.api.storage import PersistentVolumeClaim
from pykubelet.api.volume import ClaimVolume, Volume
from pykubelet.podconfig.manifests import WORKLOAD_VERSIONS
from pykubelet.podconfig.workloads.kinds import (
    CronJobSpec,
    JobSpec,
    PodTemplateSpec,
    Workload,
    WorkloadSpec,
)

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"


def template_hash(template: msgspec.Struct) -> str:
    """Return a short hash of a template, which changes with every change of the template."""
    text = json.dumps(to_document(template), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def written_pods(workload: Workload) -> tuple[tuple[Pod, ...], tuple[PersistentVolumeClaim, ...]]:
    """Return the pods and the claims of a Deployment, a DaemonSet or a StatefulSet."""
    spec = workload.spec
    assert isinstance(spec, WorkloadSpec)
    label = template_hash(spec.template)
    if workload.kind == "DaemonSet":
        return (_pod(workload, spec.template, workload.name, {"controller-revision-hash": label}),), ()
    replicas = 1 if spec.replicas is None else spec.replicas
    if workload.kind == "Deployment":
        names = [workload.name if index == 0 else f"{workload.name}-{index}" for index in range(replicas)]
        return tuple(_pod(workload, spec.template, name, {"pod-template-hash": label}) for name in names), ()
    start = spec.ordinals.start if spec.ordinals is not None else 0
    claims = tuple(_claim(workload, template, start) for template in spec.volume_claim_templates)
    if not replicas:
        return (), claims
    name = f"{workload.name}-{start}"
    labels = {
        "controller-revision-hash": label,
        "statefulset.kubernetes.io/pod-name": name,
        "apps.kubernetes.io/pod-index": str(start),
    }
    pod = _pod(workload, spec.template, name, labels)
    pod.spec.hostname = pod.spec.hostname or (name if "." not in name and len(name) <= 63 else "")
    templates = {
        template.metadata.name: claim.metadata.name
        for template, claim in zip(spec.volume_claim_templates, claims, strict=True)
    }
    # A claim template replaces a volume of the same name, as in a cluster.
    pod.spec.volumes = [
        *(volume for volume in pod.spec.volumes if volume.name not in templates),
        *(
            Volume(name=volume, persistent_volume_claim=ClaimVolume(claim_name=claim))
            for volume, claim in templates.items()
        ),
    ]
    return (pod,), claims


def job_pod(
    namespace: str,
    job: str,
    spec: JobSpec,
    *,
    uid: str,
    serial: int,
    index: int | None,
    owner: OwnerReference,
) -> Pod:
    """Return one pod of a Job; `uid` is the pod's, `index` the completion index."""
    name = f"{job}-{serial}"
    labels = {
        JOB_NAME: job,
        "job-name": job,
        "batch.kubernetes.io/controller-uid": owner.uid,
        "controller-uid": owner.uid,
    }
    pod = _from_template(spec.template, name, namespace, labels, owner)
    pod.metadata.uid = uid
    if index is not None:
        pod.metadata.labels[COMPLETION_INDEX] = str(index)
        pod.metadata.annotations[COMPLETION_INDEX] = str(index)
        pod.spec.hostname = pod.spec.hostname or f"{job}-{index}"[-63:].lstrip("-.")
        for container in (*pod.spec.containers, *pod.spec.init_containers):
            container.env = [*container.env, EnvVar(name="JOB_COMPLETION_INDEX", value=str(index))]
    return pod


def sample_of(workload: Workload) -> Pod:
    """Return a pod like those of a Job or CronJob, with a name of the greatest length."""
    spec = workload.spec
    job = workload.name
    if isinstance(spec, CronJobSpec):
        spec, job = spec.job_template.spec, job_name(job, 2**31 * 60)
    assert isinstance(spec, JobSpec)
    index = 0 if spec.completion_mode == "Indexed" else None
    owner = owner_of("Job", workload.namespace, job)
    return job_pod(workload.namespace, job, spec, uid="sample", serial=99_999, index=index, owner=owner)


def job_name(cron_job: str, scheduled: int) -> str:
    """Return the name of a CronJob's Job for a Unix time, as in a cluster."""
    return f"{cron_job}-{scheduled // 60}"


def owner_of(kind: str, namespace: str, name: str, uid: str = "") -> OwnerReference:
    """Return the reference to a workload; its uid is derived from its name unless it has one."""
    return OwnerReference(
        api_version=WORKLOAD_VERSIONS[kind],
        kind=kind,
        name=name,
        uid=uid or stable_uid(kind, namespace, name),
        controller=True,
        block_owner_deletion=True,
    )


def stable_uid(*parts: str) -> str:
    """Return a uid that depends only on these parts."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _pod(workload: Workload, template: PodTemplateSpec, name: str, labels: dict[str, str]) -> Pod:
    owner = owner_of(workload.kind, workload.namespace, workload.name)
    return _from_template(template, name, workload.namespace, labels, owner)


def _from_template(
    template: PodTemplateSpec, name: str, namespace: str, labels: dict[str, str], owner: OwnerReference
) -> Pod:
    meta = ObjectMeta(
        name=name,
        namespace=namespace,
        labels={**template.metadata.labels, **labels},
        annotations=dict(template.metadata.annotations),
        owner_references=[owner],
    )
    return Pod(metadata=meta, spec=copy.deepcopy(template.spec))


def _claim(workload: Workload, template: PersistentVolumeClaim, ordinal: int) -> PersistentVolumeClaim:
    name = f"{template.metadata.name}-{workload.name}-{ordinal}"
    meta = ObjectMeta(
        name=name,
        namespace=workload.namespace,
        labels=dict(template.metadata.labels),
        owner_references=[owner_of(workload.kind, workload.namespace, workload.name)],
    )
    return PersistentVolumeClaim(metadata=meta, spec=copy.deepcopy(template.spec))
