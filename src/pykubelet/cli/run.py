"""`pykubelet run FILE`: gives the node a pod and stays with it until it is ready, or says why it is not.

ConfigMaps and Secrets go the same way, alone or with the pods that use them; there is nothing to wait for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.cli.client import NodeClient, NodeError, NotTaken, NotThere
from pykubelet.cli.guard import guarded
from pykubelet.cli.log_places import known_runs, log_file
from pykubelet.cli.progress import Verdict, explain, is_ready, judge, troubled
from pykubelet.cli.progress_view import LiveView, PlainView, Sight
from pykubelet.cli.tables import visible
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.lock import holder
from pykubelet.host import HostError
from pykubelet.host.hostname import node_name
from pykubelet.pods.handover import (
    ClashError,
    carry_out,
    find_mine,
    look_around,
    mode_for,
    names_of,
    plan_handover,
)
from pykubelet.pods.journal import Event
from pykubelet.pods.manifests import Contents, read_bytes, read_manifest
from pykubelet.pods.object_manifests import LOCAL_KINDS, title
from pykubelet.pods.static import static_contents
from pykubelet.server.log_files import LogFile
from pykubelet.server.pods import NodePods

PROGRAM = "pykubelet run"
_EVERY_SECONDS = 0.25
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class RunWish:
    """What a person wants to run, and how long to stay with it."""

    file: Path
    detach: bool = False
    replace: bool = False
    timeout: float = 300.0
    """In seconds."""


def run_manifest(data_dir: Path, wish: RunWish) -> int:
    """Check the manifest, hand it over and follow it; returns the exit code."""

    def work() -> int:
        instance = Instance.at(data_dir)
        content = _read(wish.file)
        written = _checked(content, str(wish.file))
        if not instance.manifests.is_dir():
            raise NodeError(f"there is no node in {data_dir}: start one with `pykubelet up`")
        target = _hand_over(instance, wish, content, written)
        if holder(instance) is None:
            what = "the pod starts" if written.pods else "it is used"
            print(f"The node is not running: {what} with the next `pykubelet up`.")
            return 0
        if wish.detach or not written.pods:
            return 0
        return _stay(instance, [_Charge(pod, target) for pod in written.pods], wish.timeout)

    return guarded(PROGRAM, work, ClashError, OSError)


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file)
    except OSError as err:
        raise OSError(f"{file} cannot be read: {err.strerror}") from err


def _checked(content: bytes, where: str) -> Contents:
    """Give what the manifest holds, as it is written, if the node will take it; raises ConfigError."""
    try:
        node = node_name()
    except HostError:
        node = "node"  # the agent was given another name; it matters little here
    static_contents(
        content, source="file", origin=where, node_name=node, now=time.time_ns(), served=LOCAL_KINDS
    )
    written = read_manifest(content, where)
    if not written.pods and not written.objects:
        raise ConfigError([Problem(where, "holds no pod")])
    return written


def _hand_over(instance: Instance, wish: RunWish, content: bytes, written: Contents) -> Path:
    target = instance.manifests / wish.file.name
    if wish.file.resolve().parent != instance.manifests.resolve():
        target = _give(instance, wish, content) or _put(target, wish, content, written)
    for name in (*map(title, written.objects), *(pod.metadata.name for pod in written.pods)):
        print(f"{name}: handed to the node as {target}")
    return target


def _give(instance: Instance, wish: RunWish, content: bytes) -> Path | None:
    """Give the manifest to a node that runs; None when there is none that can take it now."""
    if holder(instance) is None:
        return None
    try:
        return Path(NodeClient(instance).put_manifest(wish.file.name, content, replace=wish.replace).path)
    except NotTaken:
        raise
    except NodeError:
        # It is starting or stopping, or of an older version: it reads the folder when it is back.
        return None


def _put(target: Path, wish: RunWish, content: bytes, written: Contents) -> Path:
    plan = plan_handover(target, names_of(written), look_around(target.parent), replace=wish.replace)
    try:
        carry_out(plan, content, mode_for(written))
    except OSError as err:
        raise OSError(f"{target} cannot be written: {err.strerror}") from err
    return target


@dataclass(slots=True)
class _Charge:
    """A pod that is waited for."""

    written: Pod
    target: Path
    pod: Pod | None = None
    state: str = "syncing"
    events: list[Event] = field(default_factory=list)
    ready_since: float | None = None
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        return self.written.metadata.name

    @property
    def sight(self) -> Sight:
        return Sight(self.name, self.pod, self.state, tuple(self.events))

    def look(self, client: NodeClient, node: NodePods, now: float) -> None:
        """See how the pod is, and decide whether that is the end of the waiting."""
        found = find_mine(node.pods, self.written, self.target)
        if found is None:
            self.verdict = Verdict(False, "gone") if self.pod is not None else None
            return
        self.pod, self.state = found, node.states.get(found.uid, "syncing")
        try:
            self.events = client.journal(found.uid).events
        except NotThere:
            return
        self.ready_since = (self.ready_since or now) if is_ready(found) else None
        steady = now - self.ready_since if self.ready_since is not None else 0.0
        self.verdict = judge(found, self.state, steady)


def _stay(instance: Instance, charges: Sequence[_Charge], timeout: float) -> int:
    client, began = NodeClient(instance), time.monotonic()
    try:
        with LiveView() if sys.stdout.isatty() else PlainView() as view:
            while (now := time.monotonic()) - began < timeout:
                node = client.pods()
                for charge in charges:
                    if charge.verdict is None:
                        charge.look(client, node, now)
                view.show([charge.sight for charge in charges])
                if all(charge.verdict is not None for charge in charges):
                    break
                time.sleep(_EVERY_SECONDS)
    except KeyboardInterrupt:
        print("\nThe pod stays with the node: `pykubelet ps` shows it.", file=sys.stderr)
        raise
    results = [_tell(instance, charge, time.monotonic() - began) for charge in charges]
    return 0 if all(results) else 1


def _tell(instance: Instance, charge: _Charge, seconds: float) -> bool:
    verdict = charge.verdict or Verdict(False, f"not ready after {seconds:.0f}s")
    if verdict.good:
        address = charge.pod.status.pod_ip if charge.pod is not None else ""
        print(f"{charge.name}: {verdict.word}" + (f", at {address}" if address else ""))
        return True
    print(f"{charge.name}: {verdict.word}", file=sys.stderr)
    if charge.pod is None:
        print("  the node has not taken the manifest up: see its log", file=sys.stderr)
        return False
    for line in explain(charge.pod, charge.events, datetime.now(UTC)):
        print(f"  {visible(line, lines=False)}", file=sys.stderr)
    for status in troubled(charge.pod):
        lines = _last_words(instance, charge.pod, status.name)
        if lines:
            print(f"  the last lines of container {status.name}:", file=sys.stderr)
        for line in lines:
            print(f"    {visible(line, lines=False)}", file=sys.stderr)
    print(f"  more: pykubelet describe {charge.pod.metadata.name}", file=sys.stderr)
    return False


def _last_words(instance: Instance, pod: Pod, container: str) -> list[str]:
    newest = known_runs(log_file(instance, pod, container, 0)) - 1
    try:
        with closing(LogFile(log_file(instance, pod, container, max(newest, 0)))) as log:
            entries = log.skip_to_last(_LOG_LINES)
    except OSError:
        return []
    return [entry.text.decode(errors="replace") for entry in entries]
