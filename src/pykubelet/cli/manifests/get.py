"""`pykubelet get`: the objects of the manifests with their state, also of stopped and broken manifests.

States of pods come from the running kubelet, those of Jobs and CronJobs from their records, those of claims
from the disk; without a running kubelet the rest is printed. Values of Secrets are not printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pykubelet.api.meta import OwnerReference
from pykubelet.api.pod import Pod
from pykubelet.cli.client import NodeError, SelectionError, run_command
from pykubelet.cli.manifests.inventory import (
    ManifestFile,
    ManifestObject,
    parse_kind,
    read_directory,
    split_reference,
)
from pykubelet.cli.manifests.run import is_ready, manifest_directory
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.printers import NONE, escape_unprintable, format_age, format_columns, status_text
from pykubelet.cli.watch import Watch, WatchedRow, watch_table
from pykubelet.podconfig.workloads.records import DIRECTORY as RECORDS
from pykubelet.podconfig.workloads.records import WorkloadRecord, read_records
from pykubelet.volumes.local_claims import claims_with_data, local_volume_path

PROGRAM = "pykubelet get"
Format = Literal["table", "wide", "json", "yaml", "name"]
HEADING = ("KIND", "NAME", "NAMESPACE", "READY", "STATUS", "FILE")
_MASKED = "***"
_RETAINED = "(no manifest)"
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is known of the state of the objects."""

    pods: Sequence[Pod] | None = None
    """Pods of the running kubelet; None if it does not run."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Pod worker states by uid."""
    records: Mapping[tuple[str, str, str], WorkloadRecord] = field(default_factory=dict)
    volumes: frozenset[str] = frozenset()
    """Claims with a volume on disk, as `namespace/name`."""
    root: Path = Path()
    """The kubelet's root directory."""


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One row of the table."""

    kind: str
    name: str
    namespace: str
    ready: str
    status: str
    file: str
    message: str = ""
    pods: tuple[str, ...] = ()

    def cells(self, *, wide: bool) -> tuple[str, ...]:
        """Return the cells of the row."""
        cells = (self.kind, self.name, self.namespace, self.ready, self.status, self.file)
        return (*cells, ",".join(self.pods) or NONE, self.message or NONE) if wide else cells


def run_get(
    selection: NodeSelection, kind: str | None, name: str | None, output: Format, *, watch: bool = False
) -> int:
    """Print the objects, with `watch` until interrupted; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        directory = manifest_directory(node)
        files = read_directory(directory, node)
        chosen = select_objects(files, kind, name)
        state = _read_state(node)
        for file in files:
            for problem in file.problems:
                print(f"{PROGRAM}: {escape_unprintable(str(problem), lines=False)}", file=sys.stderr)
        if not chosen:
            _require_found(kind, name, state)
        if watch:
            _watch(node, directory, kind, name, wide=output == "wide")
        if output in ("json", "yaml"):
            items = [_document(file, found, state) for file, found in chosen]
            is_named = parse_reference(kind, name)[2] is not None
            _print_documents(items, output, single=is_named and len(items) == 1)
        elif output == "name":
            for _, found in chosen:
                print(escape_unprintable(found.reference, lines=False))
        else:
            rows = _rows(files, chosen, state, kind, name)
            _print_table(rows, directory, wide=output == "wide")
        return 0

    return run_command(PROGRAM, work, OSError)


def _rows(
    files: Sequence[ManifestFile],
    chosen: Iterable[tuple[ManifestFile, ManifestObject]],
    state: NodeState,
    kind: str | None,
    name: str | None,
) -> list[ObjectRow]:
    rows = [object_row(file, found, state, datetime.now(UTC)) for file, found in chosen]
    if kind is None or parse_reference(kind, name)[0] == "PersistentVolumeClaim":
        rows += retained_rows(files, state, parse_reference(kind, name)[2])
    return rows


def _watch(node: Node, directory: Path, kind: str | None, name: str | None, *, wide: bool) -> None:
    def read() -> list[WatchedRow]:
        files = read_directory(directory, node)
        rows = _rows(files, select_objects(files, kind, name), _read_state(node), kind, name)
        return [_watched(row, wide=wide) for row in rows]

    watch_table(Watch(PROGRAM, _heading(wide=wide), read, (OSError, NodeError), HEADING.index("STATUS")))


def _watched(row: ObjectRow, *, wide: bool) -> WatchedRow:
    cells = row.cells(wide=wide)
    # The time of the last run of a CronJob grows.
    return WatchedRow(
        (row.kind, row.namespace, row.name), cells, tuple(c.partition(" (last ")[0] for c in cells)
    )


def parse_reference(kind: str | None, name: str | None) -> tuple[str | None, str | None, str | None]:
    """Return kind, namespace and name of the arguments `KIND NAME`, `KIND`, or `KIND/NAME`."""
    if kind is None:
        return None, None, None
    if name is None and "/" in kind:
        return split_reference(kind)
    if name is None:
        return parse_kind(kind), None, None
    _, namespace, base = split_reference(name)
    return parse_kind(kind), namespace, base


def select_objects(
    files: Sequence[ManifestFile], kind: str | None, name: str | None
) -> list[tuple[ManifestFile, ManifestObject]]:
    """Return the objects of a kind and a name, sorted. Raises SelectionError for an unknown kind."""
    chosen_kind, namespace, base = parse_reference(kind, name)
    found = [
        (file, item)
        for file in files
        for item in file.objects
        if chosen_kind in (None, item.kind)
        and base in (None, item.name)
        and namespace in (None, item.namespace)
    ]
    return sorted(found, key=lambda pair: pair[1].key)


def _require_found(kind: str | None, name: str | None, state: NodeState) -> None:
    """Raise SelectionError if a name was given, of which not even the volume of a claim is left."""
    found, namespace, base = parse_reference(kind, name)
    may_be_claim = found in (None, "PersistentVolumeClaim")
    if base is None or kind is None:
        return
    if may_be_claim and f"{namespace or 'default'}/{base}" in state.volumes:
        return
    chosen, _, reference = (kind, "", name) if name is not None else kind.partition("/")
    raise SelectionError(f"there is no {chosen} {reference!r}: `pykubelet get` lists what there is")


def _read_state(node: Node) -> NodeState:
    try:
        found = node.client.pods()
        pods: Sequence[Pod] | None = found.pods
        states: Mapping[str, str] = found.states
    except NodeError:
        pods, states = None, {}
    records, _ = read_records(node.root_dir / RECORDS)
    volumes = frozenset(claims_with_data(node.root_dir))
    return NodeState(pods, states, records, volumes, node.root_dir)


def object_row(file: ManifestFile, found: ManifestObject, state: NodeState, now: datetime) -> ObjectRow:
    """Return the row of an object."""
    pods = list(pods_of(found, state.pods or ()))
    ready, status, message = _state(found, pods, state, now)
    if file.stopped_at is not None:
        ready, status = UNKNOWN, "Stopped"
    elif state.pods is None and found.kind not in ("ConfigMap", "Secret", "PersistentVolumeClaim"):
        status = status if found.kind in ("Job", "CronJob") else "NodeNotRunning"
        ready = ready if found.kind == "Job" else UNKNOWN
    names = tuple(pod.metadata.name for pod in pods)
    return ObjectRow(found.kind, found.name, found.namespace, ready, status, file.path.name, message, names)


def _state(
    found: ManifestObject, pods: Sequence[Pod], state: NodeState, now: datetime
) -> tuple[str, str, str]:
    """Return the columns READY and STATUS, and the message."""
    record = state.records.get(found.key)
    if found.kind == "Job":
        return _job_state(found, record)
    if found.kind == "CronJob":
        return _cron_job_state(found, record, now)
    if found.kind == "PersistentVolumeClaim":
        claim = f"{found.namespace}/{found.name}"
        return UNKNOWN, "Bound" if claim in state.volumes else "Unused", ""
    if found.kind in ("ConfigMap", "Secret"):
        return UNKNOWN, UNKNOWN, ""
    if not found.pods:
        return "0/0", "ScaledToZero", ""
    ready = sum(map(is_ready, pods))
    if not pods:
        return f"0/{len(found.pods)}", "Pending", ""
    texts = [status_text(pod, state.states.get(pod.uid, "syncing")) for pod in pods]
    status = next((text for text in texts if text != "Running"), "Running")
    messages = [_message(pod) for pod in pods]
    return f"{ready}/{len(found.pods)}", status, next(filter(None, messages), "")


def _message(pod: Pod) -> str:
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        if container.state.waiting is not None and container.state.waiting.message:
            return container.state.waiting.message
    return pod.status.message


def _job_state(found: ManifestObject, record: WorkloadRecord | None) -> tuple[str, str, str]:
    spec = _mapping(found.document.get("spec"))
    completions = spec.get("completions") or (1 if spec.get("parallelism") is None else "?")
    job = record.job if record is not None else None
    if job is None:
        return f"0/{completions}", "Pending", ""
    if not job.outcome and spec.get("suspend"):
        return f"{job.succeeded}/{completions}", "Suspended", ""
    status = job.outcome or ("Running" if job.active else "BackOff" if job.failed else "Pending")
    message = f"{job.reason}: {job.message}".strip(": ") if job.reason else ""
    return f"{job.succeeded}/{completions}", status, message


def _cron_job_state(
    found: ManifestObject, record: WorkloadRecord | None, now: datetime
) -> tuple[str, str, str]:
    cron = record.cron_job if record is not None else None
    active = len([job for job in cron.jobs if not job.record.outcome]) if cron is not None else 0
    if _mapping(found.document.get("spec")).get("suspend"):
        return f"{active} active", "Suspended", cron.message if cron is not None else ""
    if cron is None or cron.last_schedule is None:
        return f"{active} active", "Scheduled", cron.message if cron is not None else ""
    last = datetime.fromtimestamp(cron.last_schedule, UTC)
    return f"{active} active", f"Scheduled (last {format_age(last, now)} ago)", cron.message


def pods_of(found: ManifestObject, pods: Iterable[Pod]) -> Iterator[Pod]:
    """Yield the pods of an object: by their owner, or by the name in the manifest."""
    for pod in pods:
        if pod.metadata.namespace != found.namespace:
            continue
        owner = next((ref for ref in pod.metadata.owner_references if ref.controller), None)
        if owner is None:
            name = pod.metadata.name.removesuffix(f"-{pod.spec.node_name.lower()}")
            if found.kind == "Pod" and name == found.name:
                yield pod
        elif _owns(found, owner):
            yield pod


def _owns(found: ManifestObject, owner: OwnerReference) -> bool:
    if owner.kind == found.kind:
        return owner.name == found.name
    return found.kind == "CronJob" and owner.kind == "Job" and _is_run(owner.name, found.name)


def _is_run(job: str, cron_job: str) -> bool:
    name, _, minute = job.rpartition("-")
    return name == cron_job and minute.isdigit()


def retained_rows(files: Sequence[ManifestFile], state: NodeState, name: str | None) -> list[ObjectRow]:
    """Return rows for claims whose volume is on disk: of claim templates, and without a manifest."""
    written = {(f"{item.namespace}/{item.name}") for file in files for item in file.objects
               if item.kind == "PersistentVolumeClaim"}  # fmt: skip
    owners = {claim: file.path.name for file in files for item in file.objects for claim in item.claims}
    rows = []
    for claim in sorted((state.volumes | owners.keys()) - written):
        namespace, _, claim_name = claim.partition("/")
        if name in (None, claim_name):
            status = "Bound" if claim in owners else "Retained"
            status = status if claim in state.volumes else "Unused"
            file = owners.get(claim, _RETAINED)
            rows.append(ObjectRow("PersistentVolumeClaim", claim_name, namespace, UNKNOWN, status, file))
    return rows


def _print_table(rows: Sequence[ObjectRow], directory: Path, *, wide: bool) -> None:
    if not rows:
        print(f"No objects. `pykubelet apply FILE` adds some to {directory}", file=sys.stderr)
        return
    print("\n".join(format_columns([_heading(wide=wide), *(row.cells(wide=wide) for row in rows)])))


def _heading(*, wide: bool) -> tuple[str, ...]:
    return (*HEADING, "PODS", "MESSAGE") if wide else HEADING


def _document(file: ManifestFile, found: ManifestObject, state: NodeState) -> dict[str, Any]:
    """Return an object as written, without the values of a Secret, with its state on this node."""
    row = object_row(file, found, state, datetime.now(UTC))
    document = dict(found.document)
    if found.kind == "Secret":
        for part in ("data", "stringData"):
            if part in document:
                document[part] = dict.fromkeys(_mapping(document[part]), _MASKED)
        document["metadata"] = _without_copies(_mapping(document.get("metadata")))
    status = {"file": str(file.current), "stopped": file.stopped_at is not None, "pods": list(row.pods)}
    if found.kind == "PersistentVolumeClaim":
        status["phase"] = row.status
        status["path"] = str(local_volume_path(state.root, found.namespace, found.name))
    else:
        status |= {"ready": row.ready, "phase": row.status, "message": row.message}
    document["status"] = status
    return document


def _without_copies(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with masked annotations that may hold the whole object, as `kubectl apply` adds."""
    annotations = {
        name: _MASKED if str(value).lstrip().startswith("{") else value
        for name, value in _mapping(metadata.get("annotations")).items()
    }
    return {**metadata, "annotations": annotations} if annotations else dict(metadata)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _print_documents(items: Sequence[dict[str, Any]], output: Format, *, single: bool) -> None:
    document: Any = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": list(items)}
    if output == "json":
        import json

        print(json.dumps(document, indent=2, default=str))
    else:
        # Imported here: tables need none of it.
        import yaml

        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=False), end="")
