"""`pykubelet self-test`: runs a scratch pod on the node and verifies what pods rely on.

The checks are those of a user: the pod starts, its address accepts connections, a command runs in it, its
volume is on the node, its log arrives, its readiness probe decides, and it is removed without a trace. The
first failure ends the test, because the later checks depend on the earlier ones.

The pod is a static pod in a manifest of its own. The manifest is removed however the command ends; one of a
command that was killed is removed by the next self-test, and its container ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from pykubelet.api.pod import Pod
from pykubelet.cli.client import NodeError, NotFoundError, run_command, signals_deferred
from pykubelet.cli.manifests.run import explain, manifest_directory, run_outcome
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, serialized
from pykubelet.cli.pods.exec import NotRunning, exec_output, running_id
from pykubelet.cli.pods.logs import log_file
from pykubelet.cli.printers import escape_unprintable, has_condition, status_text
from pykubelet.server.logs.log_files import LogFile
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from pykubelet.transport.errors import CriError
from pykubelet.transport.remote_command import StreamError

PROGRAM = "pykubelet self-test"
PREFIX = "pykubelet-self-test-"
LEFTOVER_SECONDS = 1800
"""Age at which the manifest of a killed self-test is removed; its container ends after the same time."""
STEP_SECONDS = 20.0
"""Timeout of a check of the running pod."""
_PORT = 8080
_POLL_SECONDS = 0.1
_EXIT_CODE = 7
_LOG_LINES = 10
T = TypeVar("T")
Status = Literal["ok", "failed", "skipped"]
CHECKS = ("start", "network", "exec", "volume", "logs", "readiness", "removal")
REMEDIES = {
    "start": "`pykubelet doctor` checks the host; --image names another image with busybox's programs",
    "network": "check the pod network of the runtime (CNI), and firewall rules of the host",
    "exec": "check the log of the container runtime, which serves the streams on loopback",
    "volume": "check the file system of the kubelet's root directory",
    "logs": "check the pod log directory (podLogsDir) and the log of the container runtime",
    "readiness": "see the log of the kubelet on the probe of this pod",
    "removal": "see `pykubelet ps` and the log of the kubelet; the manifest is removed",
}


class CheckFailed(Exception):
    """Raised by a check; the text is the cause in one line."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    status: Status
    seconds: float = 0.0
    message: str = ""
    """What was verified, or the cause of the failure."""

    @property
    def remedy(self) -> str:
        """What to do about a failure."""
        return REMEDIES[self.name] if self.status == "failed" else ""

    def line(self) -> str:
        """Return the result as one line, for a failure with a second one."""
        seconds = f"{self.seconds:6.2f}s" if self.status != "skipped" else " " * 7
        text = f"{self.status:<8}{self.name:<10}{seconds}  {escape_unprintable(self.message, lines=False)}"
        return f"{text}\n{'':<27}{self.remedy}" if self.remedy else text.rstrip()

    def document(self) -> dict[str, Any]:
        """Return the result as plain values."""
        found = {"name": self.name, "status": self.status, "seconds": round(self.seconds, 3)}
        return found | {"message": self.message, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class SelfTestOptions:
    """Options of `pykubelet self-test`."""

    image: str = BUSYBOX_IMAGE
    timeout: float = 120.0
    """Seconds for the start and for the removal of the pod."""
    output: Output = Output.TABLE


def run_self_test(selection: NodeSelection, options: SelfTestOptions) -> int:
    """Test the node; return 0 if every check succeeded."""

    def work() -> int:
        node = select_node(selection)
        manifest_directory(node)
        node.client.pods()  # a stopped kubelet is an error before anything is written
        test = SelfTest(node, options)
        is_table = options.output in (Output.TABLE, Output.WIDE)
        checks = test.run(lambda check: print(check.line(), flush=True) if is_table else None)
        passed = all(check.status == "ok" for check in checks)
        if options.output in (Output.JSON, Output.YAML):
            document = {"node": node.info.node_name, "pod": test.name, "passed": passed}
            document["checks"] = [check.document() for check in checks]
            print(serialized(document, options.output), end="")
        elif options.output is Output.NAME:
            print("\n".join(check.name for check in checks))
        elif passed:
            print(f"The node works: {len(checks)} checks in {sum(check.seconds for check in checks):.1f}s")
        return 0 if passed else 1

    return run_command(PROGRAM, work, OSError)


class SelfTest:
    """One test with a pod of its own."""

    def __init__(self, node: Node, options: SelfTestOptions) -> None:
        self._node = node
        self._options = options
        token = secrets.token_hex(4)
        self.name = f"{PREFIX}{token}"
        """Name of the pod in its manifest."""
        self._file = f"{self.name}.json"
        self._mark = f"mark-{token}"
        self._uid = ""

    def run(self, show: Callable[[Check], None]) -> list[Check]:
        """Run the checks, each shown when it ends; the pod is removed in any case."""
        remove_leftovers(manifest_directory(self._node), time.time())
        checks: list[Check] = []
        steps = (self._start, self._network, self._exec, self._volume, self._logs, self._readiness)

        def add(check: Check) -> None:
            checks.append(check)
            show(check)

        with self._manifest():
            for name, step in zip(CHECKS, steps, strict=False):
                if any(check.status == "failed" for check in checks):
                    add(Check(name, "skipped"))
                else:
                    add(_measured(name, step))
            add(_measured("removal", self._removal))
        return checks

    @contextmanager
    def _manifest(self) -> Iterator[None]:
        """Install the manifest, and remove it however the context ends."""
        try:
            with signals_deferred():  # a manifest that is still being written could not be removed
                content = json.dumps(manifest(self.name, self._options.image, self._mark)).encode()
                written = self._node.client.put_manifest(self._file, content, replace=False)
                self._uid = written.pods[0].uid
            yield
        finally:
            with signals_deferred():
                self._remove_manifest()

    def _remove_manifest(self) -> None:
        """Remove the manifest if it exists, also while the kubelet does not respond."""
        try:
            self._node.client.delete_manifest(self._file)
        except NotFoundError:
            pass
        except NodeError:
            (manifest_directory(self._node) / self._file).unlink(missing_ok=True)

    def _start(self) -> str:
        """Wait until the container runs."""
        deadline = time.monotonic() + self._options.timeout
        pod: Pod | None = None
        while time.monotonic() < deadline:
            pod, state = self._pod()
            if pod is not None:
                if any(status.state.running is not None for status in pod.status.container_statuses):
                    return f"pod {pod.metadata.name} runs"
                if (outcome := run_outcome(pod, state, 0)) is not None:
                    raise CheckFailed(self._cause(pod, outcome.status))
            time.sleep(_POLL_SECONDS)
        status = status_text(pod, "syncing") if pod is not None else "the node has not read the manifest"
        reason = f"not running after {self._options.timeout:g}s: {status}"
        raise CheckFailed(self._cause(pod, reason) if pod is not None else reason)

    def _cause(self, pod: Pod, status: str) -> str:
        with suppress(NotFoundError):
            lines = explain(pod, self._node.client.journal(pod.uid).events, datetime.now(UTC))
            return "; ".join([status, *lines])
        return status

    def _network(self) -> str:
        """Connect from the node to the pod's address."""
        address = self._wait("the pod has no address", lambda: self._running().status.pod_ip)
        deadline = time.monotonic() + STEP_SECONDS
        while True:
            try:
                socket.create_connection((address, _PORT), timeout=2).close()
            except OSError as err:
                if time.monotonic() > deadline:
                    reason = err.strerror or str(err)
                    raise CheckFailed(f"no connection to {address}:{_PORT}: {reason}") from err
            else:
                break
            time.sleep(_POLL_SECONDS)
        return f"{address}:{_PORT} accepts connections"

    def _exec(self) -> str:
        """Run a command, whose output and exit code must arrive."""
        code, output = self._call(f"echo {self._mark}; exit {_EXIT_CODE}")
        if (code, output) != (_EXIT_CODE, self._mark):
            raise CheckFailed(f"the command returned {code} and {output[:200]!r}")
        return "a command's output and exit code arrive"

    def _volume(self) -> str:
        """Write a file in the emptyDir, which must be in the pod's directory on the node."""
        if _is_ready(self._running()):
            raise CheckFailed("the pod is ready before the file that its readiness probe looks for exists")
        code, output = self._call(f"echo {self._mark} > /data/ready && cat /data/ready")
        path = Path(self._node.info.root_dir, "pods", self._uid, "volumes/kubernetes.io~empty-dir/data/ready")
        if (code, output) != (0, self._mark):
            raise CheckFailed(f"writing to the volume returned {code} and {output[:200]!r}")
        found = path.read_text(errors="replace").strip() if path.is_file() else None
        if found != self._mark:
            raise CheckFailed(f"{path} does not have what the container wrote")
        return "an emptyDir volume is mounted and writable"

    def _logs(self) -> str:
        """Find the container's first line in its log."""
        file = log_file(self._node, self._running(), "main", 0)

        def has_line() -> bool:
            try:
                with closing(LogFile(file)) as log:
                    return any(entry.text.decode() == self._mark for entry in log.skip_to_last(_LOG_LINES))
            except (OSError, UnicodeDecodeError):
                return False

        self._wait(f"{file} does not have the container's output", has_line)
        return "the container's output is in its log"

    def _readiness(self) -> str:
        self._wait(
            "the readiness probe's file exists, but the pod is not ready", lambda: _is_ready(self._running())
        )
        return "the readiness probe decides"

    def _removal(self) -> str:
        """Remove the manifest, and wait until nothing of the pod is left on the node."""
        self._remove_manifest()
        directory = Path(self._node.info.root_dir, "pods", self._uid)

        def is_gone() -> bool:
            return self._pod()[0] is None and not directory.exists()

        self._wait(f"the pod or {directory} is still there", is_gone, self._options.timeout)
        return "the pod and its directory are gone"

    def _pod(self) -> tuple[Pod | None, str]:
        try:
            found = self._node.client.pod(self._uid)
        except NotFoundError:
            return None, ""
        return found.pods[0], found.states.get(self._uid, "syncing")

    def _running(self) -> Pod:
        pod, _ = self._pod()
        if pod is None:
            raise CheckFailed("the pod was removed by someone else")
        return pod

    def _call(self, script: str) -> tuple[int, str]:
        """Run a shell script in the container; return its exit code and output."""

        async def call() -> tuple[int, str]:
            async with asyncio.timeout(STEP_SECONDS):
                command = ["sh", "-c", script]
                result, output = await exec_output(self._node, running_id(self._running(), "main"), command)
            if result.message:
                raise CheckFailed(" ".join(result.message.split()))
            return result.exit_code, output.decode(errors="replace").strip()

        return asyncio.run(call())

    def _wait(self, problem: str, condition: Callable[[], T], seconds: float = STEP_SECONDS) -> T:
        """Return the first true result. Raises CheckFailed."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise CheckFailed(f"{problem} (after {seconds:g}s)".strip())
            time.sleep(_POLL_SECONDS)
        return found


def manifest(name: str, image: str, mark: str) -> dict[str, Any]:
    """Return the manifest of the pod; `mark` is the first line of its log."""
    # A killed self-test leaves a container that ends by itself.
    script = f"echo {mark}; cd /data && httpd -p {_PORT} && exec sleep {LEFTOVER_SECONDS}"
    container = {
        "name": "main",
        "image": image,
        # The seed image comes from no registry.
        "imagePullPolicy": "Never" if image == BUSYBOX_IMAGE else "IfNotPresent",
        "command": ["sh", "-c", script],
        "readinessProbe": {
            "exec": {"command": ["test", "-e", "/data/ready"]},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
        },
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def remove_leftovers(directory: Path, now: float) -> None:
    """Remove the manifests of self-tests that were killed."""
    for path in directory.glob(f"{PREFIX}*.json"):
        with suppress(FileNotFoundError):
            if now - path.lstat().st_mtime > LEFTOVER_SECONDS:
                path.unlink()


def _is_ready(pod: Pod) -> bool:
    return has_condition(pod, "Ready")


def _measured(name: str, step: Callable[[], str]) -> Check:
    """Run a check and measure it; what it raises is its result."""
    started_at = time.monotonic()
    status: Status = "ok"
    try:
        message = step()
    except TimeoutError:
        status, message = "failed", f"no result within {STEP_SECONDS:g}s"
    except (CheckFailed, NodeError, NotRunning, StreamError, CriError, OSError) as err:
        status, message = "failed", str(err)
    return Check(name, status, time.monotonic() - started_at, message)
