"""Records of Jobs and CronJobs: one file each in `workloads` below the kubelet's root directory.

A file is replaced atomically before a pod of the new record is offered, so a kubelet that is killed at any
point reads the old record or the new one. The workload of a file that cannot be read is held until an
operator removes the file: running a Job a second time can do damage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pykubelet.api.meta import ObjectStruct, from_json, to_json
from pykubelet.podconfig.workloads.cron_job import CronJobRecord
from pykubelet.podconfig.workloads.job import JobRecord
from pykubelet.util.files import fsync_directory, write_atomically

DIRECTORY = "workloads"
MAX_FILE_BYTES = 64 * 1024 * 1024
"""More than any record has: templates, pods and their statuses are bounded."""
Key = tuple[str, str, str]
"""Kind, namespace and name."""


class WorkloadRecord(ObjectStruct):
    """State of a Job or a CronJob, with its identity."""

    kind: str
    namespace: str
    name: str
    origin: str = ""
    """Path of the manifest."""
    job: JobRecord | None = None
    cron_job: CronJobRecord | None = None

    @property
    def key(self) -> Key:
        """Identity of the workload."""
        return self.kind, self.namespace, self.name


def record_path(directory: Path, key: Key) -> Path:
    """Return the file of a record; the names contain no `_`, and are bounded by validation."""
    return directory / ("_".join((key[0].lower(), *key[1:])) + ".json")


def read_records(directory: Path) -> tuple[dict[Key, WorkloadRecord], dict[str, str]]:
    """Return all records, and the problem of each file that cannot be read. Raises OSError."""
    found: dict[Key, WorkloadRecord] = {}
    unreadable: dict[str, str] = {}
    try:
        files = sorted(directory.glob("*.json"))
    except FileNotFoundError:
        return found, unreadable
    for file in files:
        try:
            record = _read(file)
            if record_path(directory, record.key) != file:
                raise ValueError("it describes another workload")
            found[record.key] = record
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as err:
            unreadable[file.name] = str(err)
    return found, unreadable


def read_record(directory: Path, key: Key) -> WorkloadRecord | None:
    """Return the record of a workload, or None. Raises OSError, and ValueError if it cannot be read."""
    try:
        return _read(record_path(directory, key))
    except FileNotFoundError:
        return None


def _read(file: Path) -> WorkloadRecord:
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return from_json(WorkloadRecord, data)


def write_records(directory: Path, changed: Mapping[Key, WorkloadRecord | None]) -> None:
    """Replace the files of changed records, and remove those that are None. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for key, record in changed.items():
        file = record_path(directory, key)
        if record is None:
            file.unlink(missing_ok=True)
        else:
            write_atomically(file, to_json(record), 0o600)
    fsync_directory(directory)
