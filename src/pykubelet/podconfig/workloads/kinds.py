"""Decoding of workloads: one standalone node runs what it can, and rejects the rest with a remedy.

A field that has no meaning on one node is a warning with its path; a field that asks for what the node cannot
do is a problem. All problems of a document are reported together. Documents are untrusted: replicas,
parallelism, completions and the size of a template are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pykubelet.api.meta import ObjectMeta, ObjectStruct, from_document, to_json
from pykubelet.api.names import dns_label_problem, dns_subdomain_problem
from pykubelet.api.pod import Pod, PodSpec
from pykubelet.api.storage import PersistentVolumeClaim
from pykubelet.config.errors import Problem
from pykubelet.podconfig.local_objects import BadObject
from pykubelet.podconfig.validate_container import choice, in_range, named, optional_choice, problem_if
from pykubelet.podconfig.workloads.schedule import Schedule, ScheduleError, time_zone

MAX_REPLICAS = 16
"""Maximum pods of a Deployment."""
MAX_PARALLELISM = 16
"""Maximum pods of a Job that run at the same time."""
MAX_COMPLETIONS = 10_000
MAX_INDEXED_COMPLETIONS = 1000
MAX_TEMPLATE_BYTES = 64 * 1024
"""Maximum size of a Job's template, which is stored with the state of the Job."""
MAX_JOB_NAME = 63
MAX_CRON_JOB_NAME = 52
"""Maximum length of names, as in the API: names of Jobs and pods are derived from them."""


class PodTemplateSpec(ObjectStruct):
    """Template of a pod."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class LabelSelectorRequirement(ObjectStruct):
    """One expression of a label selector."""

    key: str = ""
    operator: str = ""
    values: list[str] = []


class LabelSelector(ObjectStruct):
    """A selector of pods."""

    match_labels: dict[str, str] = {}
    match_expressions: list[LabelSelectorRequirement] = []


class StatefulSetOrdinals(ObjectStruct):
    """Numbers of a StatefulSet's pods."""

    start: int = 0


class WorkloadSpec(ObjectStruct):
    """Spec of a Deployment, a DaemonSet or a StatefulSet."""

    replicas: int | None = None
    selector: LabelSelector | None = None
    template: PodTemplateSpec = msgspec.field(default_factory=PodTemplateSpec)
    service_name: str = ""
    ordinals: StatefulSetOrdinals | None = None
    volume_claim_templates: list[PersistentVolumeClaim] = []


class JobSpec(ObjectStruct):
    """Spec of a Job."""

    parallelism: int | None = None
    completions: int | None = None
    completion_mode: str | None = None
    active_deadline_seconds: int | None = None
    backoff_limit: int | None = None
    ttl_seconds_after_finished: int | None = None
    suspend: bool | None = None
    template: PodTemplateSpec = msgspec.field(default_factory=PodTemplateSpec)


class JobTemplateSpec(ObjectStruct):
    """Template of a CronJob's Jobs."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: JobSpec = msgspec.field(default_factory=JobSpec)


class CronJobSpec(ObjectStruct):
    """Spec of a CronJob."""

    schedule: str = ""
    time_zone: str | None = None
    starting_deadline_seconds: int | None = None
    concurrency_policy: str | None = None
    suspend: bool | None = None
    job_template: JobTemplateSpec = msgspec.field(default_factory=JobTemplateSpec)
    successful_jobs_history_limit: int | None = None
    failed_jobs_history_limit: int | None = None


Spec = WorkloadSpec | JobSpec | CronJobSpec | PersistentVolumeClaim
_SPECS: dict[str, type[WorkloadSpec] | type[JobSpec] | type[CronJobSpec]] = {
    "Deployment": WorkloadSpec,
    "DaemonSet": WorkloadSpec,
    "StatefulSet": WorkloadSpec,
    "Job": JobSpec,
    "CronJob": CronJobSpec,
}
_REPLACED = "a changed pod is stopped before its successor starts"
_NO_ROLLOUT = "a standalone node has no rollouts"
_NO_HISTORY = "a standalone node keeps no revisions"
_IGNORED: dict[str, dict[str, str]] = {
    "Deployment": {
        "strategy": _REPLACED,
        "minReadySeconds": _NO_ROLLOUT,
        "progressDeadlineSeconds": _NO_ROLLOUT,
        "paused": _NO_ROLLOUT,
        "revisionHistoryLimit": _NO_HISTORY,
    },
    "DaemonSet": {
        "updateStrategy": _REPLACED,
        "minReadySeconds": _NO_ROLLOUT,
        "revisionHistoryLimit": _NO_HISTORY,
    },
    "StatefulSet": {
        "updateStrategy": _REPLACED,
        "podManagementPolicy": "there is only one pod",
        "persistentVolumeClaimRetentionPolicy": "volumes stay until `pykubelet rm --volumes`",
        "serviceName": "a standalone node serves no DNS names of pods",
        "minReadySeconds": _NO_ROLLOUT,
        "revisionHistoryLimit": _NO_HISTORY,
    },
    "Job": {
        "podReplacementPolicy": "a pod is replaced when it has failed",
        "selector": "the node finds the pods of a Job by itself",
        "manualSelector": "the node finds the pods of a Job by itself",
    },
    "CronJob": {},
    "PersistentVolumeClaim": {
        "storageClassName": "the volume is a directory of this node",
        "volumeAttributesClassName": "the volume is a directory of this node",
    },
}
_CANNOT = "a standalone node cannot do that: remove it"
_REJECTED: dict[str, dict[str, str]] = {
    "Job": {
        "podFailurePolicy": _CANNOT,
        "successPolicy": _CANNOT,
        "backoffLimitPerIndex": f"{_CANNOT}, and set backoffLimit",
        "maxFailedIndexes": f"{_CANNOT}, and set backoffLimit",
        "managedBy": "a standalone node runs no other controller: remove it",
    },
    "PersistentVolumeClaim": {
        "volumeName": "a standalone node has no PersistentVolumes: remove it, or use a hostPath volume",
        "selector": "a standalone node has no PersistentVolumes: remove it, or use a hostPath volume",
        "dataSource": "a standalone node cannot copy volumes: remove it",
        "dataSourceRef": "a standalone node cannot copy volumes: remove it",
    },
}
_USED: dict[str, frozenset[str]] = {
    "Deployment": frozenset({"replicas", "selector", "template"}),
    "DaemonSet": frozenset({"selector", "template"}),
    "StatefulSet": frozenset({"replicas", "selector", "template", "ordinals", "volumeClaimTemplates"}),
    "PersistentVolumeClaim": frozenset({"accessModes", "resources", "volumeMode"}),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of a manifest."""

    kind: str
    meta: ObjectMeta
    spec: Spec
    pods: tuple[Pod, ...] = ()
    """Pods as if they were written in the manifest; empty for Jobs and CronJobs."""
    sample: Pod | None = None
    """A pod like those of a Job or CronJob, to be validated."""
    claims: tuple[PersistentVolumeClaim, ...] = ()
    """Claims that it creates."""
    warnings: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """Name in the manifest."""
        return self.meta.name

    @property
    def namespace(self) -> str:
        """Namespace; never empty."""
        return self.meta.namespace

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace and name."""
        return self.kind, self.meta.namespace, self.meta.name

    @property
    def title(self) -> str:
        """Description for messages: `deployment default/web`."""
        return f"{self.kind[0].lower()}{self.kind[1:]} {self.meta.namespace}/{self.meta.name}"

    @property
    def template_path(self) -> str:
        """Field path of the pods' spec in the document."""
        return "spec.jobTemplate.spec.template" if self.kind == "CronJob" else "spec.template"

    @property
    def is_job(self) -> bool:
        """Whether its pods depend on recorded state."""
        return self.kind in ("Job", "CronJob")


def read_workload(kind: str, document: Mapping[str, Any]) -> Workload:
    """Decode a workload without `null` values.

    Raises BadObject for what this node cannot run, and ValueError with the field path for a wrong type.
    """
    from pykubelet.podconfig.workloads.templates import sample_of, written_pods

    metadata = document.get("metadata")
    meta = from_document(ObjectMeta, {} if metadata is None else metadata)
    meta = msgspec.structs.replace(meta, namespace=meta.namespace or "default")
    raw = document.get("spec")
    spec_fields: Mapping[str, Any] = raw if isinstance(raw, dict) else {}
    if kind == "PersistentVolumeClaim":
        claim = from_document(PersistentVolumeClaim, document)
        claim.metadata = meta
        problems = [*_meta_problems(kind, meta), *_rejected(kind, spec_fields), *_claim_problems("", claim)]
        if problems:
            raise BadObject(*problems)
        return Workload(kind, meta, claim, claims=(claim,), warnings=tuple(_warnings(kind, spec_fields)))
    try:
        spec = from_document(_SPECS[kind], spec_fields if raw is None else raw)
    except ValueError as err:
        raise ValueError(str(err).replace("at `", "at `spec.").replace("spec.the document", "spec")) from None
    problems = [*_meta_problems(kind, meta), *_rejected(kind, spec_fields)]
    if isinstance(spec, CronJobSpec):
        problems += _cron_job_problems(spec)
        template = spec_fields.get("jobTemplate")
        below = template.get("spec") if isinstance(template, dict) else None
        job_fields = below if isinstance(below, dict) else {}
        problems += _rejected("Job", job_fields, "spec.jobTemplate.spec.")
        warnings = list(_warnings("Job", job_fields, "spec.jobTemplate.spec."))
    elif isinstance(spec, JobSpec):
        problems += _job_problems("spec", spec)
        warnings = list(_warnings(kind, spec_fields))
    else:
        problems += _replica_problems(kind, spec)
        warnings = [*_warnings(kind, spec_fields), *_template_warnings(spec_fields)]
    if problems:
        raise BadObject(*problems)
    workload = Workload(kind, meta, spec, warnings=tuple(warnings))
    if workload.is_job:
        return replace(workload, sample=sample_of(workload))
    pods, claims = written_pods(workload)
    return replace(workload, pods=pods, claims=claims)


def _meta_problems(kind: str, meta: ObjectMeta) -> Iterator[Problem]:
    yield from named("metadata.name", meta.name, dns_subdomain_problem)
    yield from named("metadata.namespace", meta.namespace, dns_label_problem)
    limit = {"Job": MAX_JOB_NAME, "CronJob": MAX_CRON_JOB_NAME}.get(kind)
    if limit is not None:
        message = f"is {len(meta.name)} characters long, but at most {limit} are allowed for a {kind}"
        yield from problem_if("metadata.name", message, len(meta.name) > limit)


def _rejected(kind: str, fields: Mapping[str, Any], path: str = "spec.") -> Iterator[Problem]:
    for field, message in _REJECTED.get(kind, {}).items():
        if fields.get(field) is not None:
            yield Problem(f"{path}{field}", message)


def _warnings(kind: str, fields: Mapping[str, Any], path: str = "spec.") -> Iterator[Problem]:
    ignored = _IGNORED[kind]
    known = _USED.get(kind)
    for field, value in fields.items():
        if field in ignored and not _is_default(kind, field, value):
            yield Problem(f"{path}{field}", f"is ignored: {ignored[field]}")
        elif known is not None and field not in known and field not in ignored and field != "template":
            yield Problem(f"{path}{field}"[:200], "is ignored: this kind has no such field")
    if kind == "PersistentVolumeClaim" and fields.get("resources"):
        yield Problem(f"{path}resources", "is not enforced: the volume is a directory of this node")


def _template_warnings(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the warnings about the claim templates of a StatefulSet."""
    templates = fields.get("volumeClaimTemplates")
    for index, template in enumerate(templates if isinstance(templates, list) else ()):
        below = template.get("spec") if isinstance(template, dict) else None
        if isinstance(below, dict):
            yield from _warnings("PersistentVolumeClaim", below, f"spec.volumeClaimTemplates[{index}].spec.")


def _is_default(kind: str, field: str, value: Any) -> bool:
    """Return whether an ignored field has the only value that a standalone node implements anyway."""
    if field == "strategy":
        return isinstance(value, dict) and value.get("type") == "Recreate"
    return value in (None, "", 0, False) or (field == "podManagementPolicy" and value == "OrderedReady")


def _replica_problems(kind: str, spec: WorkloadSpec) -> Iterator[Problem]:
    replicas = 1 if spec.replicas is None else spec.replicas
    policy = spec.template.spec.restart_policy
    yield from problem_if(
        "spec.template.spec.restartPolicy",
        f"is {policy}, but the pods of a {kind} run always: remove it, or write a Job",
        policy not in ("", "Always"),
    )
    yield from _selector_problems(spec)
    if kind == "StatefulSet":
        yield from problem_if(
            "spec.replicas",
            f"is {replicas}, but a standalone node runs one pod of a StatefulSet, because several need DNS "
            "names to find each other: write 1",
            not 0 <= replicas <= 1,
        )
        start = spec.ordinals.start if spec.ordinals is not None else 0
        yield from in_range("spec.ordinals.start", start, 0)
        for index, claim in enumerate(spec.volume_claim_templates):
            path = f"spec.volumeClaimTemplates[{index}]."
            yield from named(f"{path}metadata.name", claim.metadata.name, dns_label_problem)
            yield from _claim_problems(path, claim)
    elif kind == "Deployment":
        yield from problem_if(
            "spec.replicas",
            f"is {replicas}, but a standalone node runs at most {MAX_REPLICAS} pods of a Deployment: "
            "write fewer",
            not 0 <= replicas <= MAX_REPLICAS,
        )
        if replicas > 1 and (where := _host_port(spec.template.spec)):
            yield Problem(
                "spec.replicas",
                f"is {replicas}, but only one pod of a node can have {where}: write 1, or remove the port",
            )


def _host_port(spec: PodSpec) -> str:
    """Return the description of a port of the host that a pod uses; empty if it uses none."""
    for container in (*spec.containers, *spec.init_containers):
        for port in container.ports:
            if port.host_port or spec.host_network:
                return f"port {port.host_port or port.container_port} of the host"
    return ""


def _selector_problems(spec: WorkloadSpec) -> Iterator[Problem]:
    labels = spec.template.metadata.labels
    for key, value in (spec.selector.match_labels if spec.selector is not None else {}).items():
        if labels.get(key) != value:
            yield Problem(
                f"spec.selector.matchLabels.{key}"[:200],
                "does not match spec.template.metadata.labels: write the same label there",
            )


def _job_problems(path: str, spec: JobSpec) -> Iterator[Problem]:
    policy = spec.template.spec.restart_policy
    yield from problem_if(
        f"{path}.template.spec.restartPolicy",
        "must be OnFailure or Never for a Job",
        policy not in ("OnFailure", "Never"),
    )
    yield from in_range(f"{path}.parallelism", spec.parallelism, 0, MAX_PARALLELISM)
    yield from in_range(f"{path}.completions", spec.completions, 0, MAX_COMPLETIONS)
    yield from in_range(f"{path}.backoffLimit", spec.backoff_limit, 0)
    yield from in_range(f"{path}.activeDeadlineSeconds", spec.active_deadline_seconds, 1)
    yield from in_range(f"{path}.ttlSecondsAfterFinished", spec.ttl_seconds_after_finished, 0)
    yield from optional_choice(f"{path}.completionMode", spec.completion_mode, ("NonIndexed", "Indexed"))
    if spec.completion_mode == "Indexed":
        yield from problem_if(
            f"{path}.completions", "must be set with completionMode Indexed", spec.completions is None
        )
        yield from in_range(f"{path}.completions", spec.completions, 0, MAX_INDEXED_COMPLETIONS)
    size = len(to_json(spec.template))
    yield from problem_if(
        f"{path}.template",
        f"is {size} bytes long, but at most {MAX_TEMPLATE_BYTES} are allowed: move data to a ConfigMap",
        size > MAX_TEMPLATE_BYTES,
    )


def _cron_job_problems(spec: CronJobSpec) -> Iterator[Problem]:
    try:
        Schedule.parse(spec.schedule)
    except ScheduleError as err:
        yield Problem("spec.schedule", str(err))
    if spec.time_zone is not None:
        try:
            time_zone(spec.time_zone)
        except ScheduleError as err:
            yield Problem("spec.timeZone", str(err))
    yield from optional_choice(
        "spec.concurrencyPolicy", spec.concurrency_policy, ("Allow", "Forbid", "Replace")
    )
    yield from in_range("spec.startingDeadlineSeconds", spec.starting_deadline_seconds, 0)
    yield from in_range("spec.successfulJobsHistoryLimit", spec.successful_jobs_history_limit, 0)
    yield from in_range("spec.failedJobsHistoryLimit", spec.failed_jobs_history_limit, 0)
    yield from _job_problems("spec.jobTemplate.spec", spec.job_template.spec)


def _claim_problems(path: str, claim: PersistentVolumeClaim) -> Iterator[Problem]:
    yield from problem_if(
        f"{path}spec.volumeMode",
        "is Block, but a standalone node has directories only: remove it",
        claim.spec.volume_mode not in (None, "", "Filesystem"),
    )
    modes = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
    for index, mode in enumerate(claim.spec.access_modes[:10]):
        yield from choice(f"{path}spec.accessModes[{index}]", mode, modes)
