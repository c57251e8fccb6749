"""`pykubelet support-bundle`: an archive with what explains the state of a node.

It contains what the kubelet reports on its control socket, doctor's findings, the list of certificates, the
newest part of logs, and the state files of the root directory. Values of environment variables, secrets and
whatever looks like one (`logs/mask`) are replaced. Files of volumes, certificates, keys, kubeconfigs and
manifests are not read. A part that cannot be collected is replaced by the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pykubelet.cli.client import NodeError, run_command
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.usage import format_size
from pykubelet.linux.cgroupfs import parse_own_cgroups
from pykubelet.linux.processes import search_path
from pykubelet.logs.mask import MASK, is_secret_key, mask_text

PROGRAM = "pykubelet support-bundle"
MAX_LOG_BYTES = 1 << 20
"""Size of the newest part of one log."""
MAX_LOGS_BYTES = 32 << 20
"""Size of all logs of containers."""
MAX_JOURNAL_LINES = 20_000
MAX_STATE_BYTES = 4 << 20
"""Size of a state file."""
STATE_FILES = (
    "cpu_manager_state",
    "memory_manager_state",
    "dra_manager_state",
    "allocated_pods_state",
    "actuated_pods_state",
    "graceful_node_shutdown_state",
    "pykubelet-node.json",
)
"""Checkpoints in the root directory; none of them contains a secret."""
_CONTROL = {
    "node.json": "/node",
    "pods.json": "/pods",
    "events.json": "/events",
    "pressure.json": "/pressure",
    "stats-summary.json": "/stats/summary",
    "configz.json": "/configz",
    "image-pulls.json": "/images/pulls",
    "metrics.txt": "/metrics",
}
_TIMEOUT_SECONDS = 20.0
_BLOCK = 64 * 1024
_VALUES = frozenset({"value", "data", "stringData", "binaryData"})
"""Fields whose contents are never shown: environment variables, and objects that pods use."""
_PLAIN_ANNOTATIONS = ("kubernetes.io/config.",)


class BundleError(Exception):
    """Raised when the archive cannot be written."""


def run_support_bundle(selection: NodeSelection, file: Path | None) -> int:
    """Write the archive; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        stem = f"pykubelet-support-{time.strftime('%Y%m%d-%H%M%S')}"
        path = file or Path(f"{stem}.tar.gz")
        try:
            count = _write(path, stem, node)
        except FileExistsError:
            raise BundleError(f"{path} exists: name a new file with -o") from None
        except OSError as err:
            raise BundleError(f"{path} cannot be written: {err.strerror or err}") from err
        print(
            f"{path}: {count} files, {format_size(path.stat().st_size)}; look through it before you share it"
        )
        return 0

    return run_command(PROGRAM, work, BundleError)


def _write(path: Path, stem: str, node: Node) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            count = 0
            for name, content in parts(node):
                member = tarfile.TarInfo(f"{stem}/{name}")
                member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
                archive.addfile(member, io.BytesIO(content))
                count += 1
        return count
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def parts(node: Node) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the archive."""
    for name, route in _CONTROL.items():
        yield name, _collected(lambda route=route: _from_node(node, route))  # type: ignore[misc]  # bound now
    root = str(node.root_dir)
    selection = ["--data-dir", node.title] if node.instance is not None else ["--root-dir", root]
    yield "version.txt", _collected(lambda: _command("version"))
    yield "certs.json", _collected(lambda: _command("certs", "-o", "json", *selection))
    yield "doctor.json", _collected(lambda: _command("doctor", "--json", *selection))
    yield "logs/kubelet-journal.log", _collected(lambda: _journal(node))
    if path := _log_file(node):
        yield "logs/kubelet.log", _collected(lambda path=path: masked_log(path))  # type: ignore[misc]
    for name in STATE_FILES:
        path = node.root_dir / name
        if path.exists():
            yield f"state/{name}", _collected(lambda path=path: _state(path))  # type: ignore[misc]
    if node.instance is not None:
        log = node.instance.containerd_log
        yield "logs/containerd.log", _collected(lambda: masked_log(log))
    yield from _container_logs(node)


def masked(value: Any, key: str = "") -> Any:
    """Return a JSON value without secrets: those of secret keys, values of variables, and masked texts."""
    if isinstance(value, dict):
        return {name: masked(inner, key if key in _VALUES else name) for name, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, key) for inner in value]
    if isinstance(value, str):
        if value and (key in _VALUES or is_secret_key(key)):
            return MASK
        # A termination message may be the end of a log.
        return _masked_lines(value) if key == "message" else mask_text(value)
    return value


def mask_pods(document: Any) -> Any:
    """Return the response of `/pods` without values of variables and with few annotations."""
    for pod in document.get("pods", []):
        annotations = pod.get("metadata", {}).get("annotations", {})
        for name in annotations:
            # An applied manifest is in an annotation as a whole.
            if not name.startswith(_PLAIN_ANNOTATIONS):
                annotations[name] = MASK
        for kind in ("containers", "initContainers", "ephemeralContainers"):
            for container in pod.get("spec", {}).get(kind, []):
                for field in ("command", "args"):
                    if container.get(field):
                        container[field] = [MASK]
                for probe in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle"):
                    if probe in container:
                        container[probe] = MASK
    return masked(document)


def masked_log(path: Path) -> bytes:
    """Return the newest part of a log without what looks like a secret. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a file")
        start = file.seek(max(0, found.st_size - MAX_LOG_BYTES))
        return _masked_end(file.read(MAX_LOG_BYTES), is_cut=start > 0)


def _masked_end(data: bytes, *, is_cut: bool) -> bytes:
    """Return the end of a log without secrets; one of a line that is cut could not be recognized."""
    whole = data.partition(b"\n")[2] if is_cut else data
    return _masked_lines(whole.decode(errors="replace")).encode() + b"\n"


def _log_file(node: Node) -> Path | None:
    with contextlib.suppress(NodeError):
        return Path(node.info.log_file) if node.info.log_file else None
    return None


def _journal(node: Node) -> bytes:
    """Return the newest part of the kubelet's log in the journal. Raises NodeError and OSError."""
    program = shutil.which("journalctl", path=search_path())
    if program is None:
        raise NodeError("journalctl is not in PATH")
    command = [program, "--no-pager", "-o", "short-iso", "-n", str(MAX_JOURNAL_LINES), "-u", _unit(node)]
    data, is_cut = b"", False
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        assert process.stdout is not None
        try:
            while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                block = process.stdout.read(_BLOCK)
                if not block:
                    return _masked_end(data, is_cut=is_cut)
                is_cut |= len(data) + len(block) > MAX_LOG_BYTES
                data = (data + block)[-MAX_LOG_BYTES:]
            raise NodeError(f"journalctl took longer than {_TIMEOUT_SECONDS:g}s")
        finally:
            process.kill()


def _unit(node: Node) -> str:
    """Return the unit of the running kubelet, else the usual one."""
    if node.is_running():
        with contextlib.suppress(NodeError, OSError):
            if unit := unit_of(Path(f"/proc/{node.info.pid}/cgroup").read_text()):
                return unit
    return f"{node.instance.name if node.instance is not None else 'kubelet'}.service"


def _masked_lines(text: str) -> str:
    return "\n".join(map(_masked_line, text.splitlines()))


def _masked_line(line: str) -> str:
    """Mask a log line: `password=x` and `"token": "x"` as well, which are no values of ours."""
    words = []
    hide = False
    for word in mask_text(line).split(" "):
        name, separator, value = word.partition("=")
        if hide and word:
            words.append(MASK)
            hide = False
        elif separator and value and is_secret_key(name):
            words.append(f"{name}={MASK}")
        else:
            hide = word.endswith(":") and is_secret_key(word.strip("{\"':,"))
            name, separator, value = word.partition(":")
            if separator and value and is_secret_key(name.strip("{\"',")):
                word = f"{name}:{MASK}"
            words.append(word)
    return " ".join(words)


def unit_of(text: str) -> str:
    """Return the service that a process with this /proc/PID/cgroup belongs to, or ""."""
    cgroups = parse_own_cgroups(text)
    for cgroup in (cgroups.get("name=systemd", ""), cgroups.get("", "")):
        for name in reversed(cgroup.split("/")):
            if name.endswith(".service"):
                return name
    return ""


def _from_node(node: Node, path: str) -> bytes:
    status, body = node.client.document(path, timeout=_TIMEOUT_SECONDS)
    if status != 200:
        raise NodeError(f"status {status}")
    if path == "/metrics":
        return body
    document = json.loads(body)
    shown = mask_pods(document) if path == "/pods" else masked(document)
    return json.dumps(shown, indent=2).encode() + b"\n"


def _state(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_STATE_BYTES)
    try:
        return json.dumps(masked(json.loads(data)), indent=2).encode() + b"\n"
    except ValueError:
        return b"not JSON, or too large\n"


def _container_logs(node: Node) -> Iterator[tuple[str, bytes]]:
    left = MAX_LOGS_BYTES
    try:
        files = sorted(node.pod_logs.glob("*/*/*.log"), key=_modified, reverse=True)
    except (NodeError, OSError) as err:
        yield "logs/pods.txt", f"{err}\n".encode()
        return
    for path in files:
        if left <= 0:
            yield "logs/pods.txt", b"older logs are left out\n"
            return
        content = _collected(lambda path=path: masked_log(path))  # type: ignore[misc]
        left -= len(content)
        yield f"logs/pods/{path.relative_to(node.pod_logs)}", content


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _command(*arguments: str) -> bytes:
    """Return the output of a command of this program; doctor and certs exit with their findings."""
    program = [sys.executable, "-c", "from pykubelet.cli.pykubelet import main; main()", *arguments]
    done = subprocess.run(program, capture_output=True, timeout=60, check=False)
    return mask_text((done.stdout + done.stderr).decode(errors="replace")).encode()


def _collected(collect: Callable[[], bytes]) -> bytes:
    try:
        return collect()
    except (NodeError, OSError, ValueError, RecursionError, subprocess.SubprocessError) as err:
        return f"not collected: {mask_text(str(err))}\n".encode()
