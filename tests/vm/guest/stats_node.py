"""A node of static pods whose kubelet is exchanged: the upstream kubelet, ours, the upstream kubelet again.

The manifests have the pods' UIDs, so all kubelets have the same pods, and the containers keep running when
one kubelet takes over from another. There is no API server in the guest.
"""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pykubelet.cm.cgroups.driver import CgroupDriver
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.manifests import Document, container, forever, pod
from tests.support.node import BIN, NAME, kubelet_node
from tests.support.runtime import runtime_process
from tests.support.stats_comparison import parse_exposition, parse_summary
from tests.support.stats_pages import EXPOSITIONS, SUMMARIES, StatsPages
from tests.vm.guest.node import SLOW, GuestNode

BURNER, READER, WRITER, PROBED, HOST_NETWORK = "burner", "reader", "writer", "sidecar", "hostnet"
PROBED_PORT = 8080
HELD_BYTES = 20_000_000
"""What the memory holder writes into its emptyDir in memory."""
READER_LIMIT = 32 << 20
"""Memory limit of the reader in bytes, less than the three disks in memory that it reads."""
_DEVICE_PLUGIN_DIR = "--device-plugin-dir"
_PAGE_SECONDS = 120.0
_SETTINGS: dict[str, Any] = {
    "cgroupDriver": "systemd",
    "cgroupRoot": "/",
    "volumeStatsAggPeriod": "5s",
    # The upstream kubelet must not evict pods of a guest with little memory.
    "evictionHard": {"memory.available": "1Mi"},
}


def stats_pods() -> list[Document]:
    """Return pods that use what the guest has: processors, memory, a block device, files and a network."""
    limits = {"cpu": "500m", "memory": "64Mi"}
    # Not a command: starting one in the container takes megabytes and seconds of a processor here.
    probe = {"tcpSocket": {"port": PROBED_PORT}, "periodSeconds": 5, "timeoutSeconds": 60}
    write = (
        "head -c 200000 /dev/urandom > /layer; while :; do head -c 100000 /dev/urandom > /disk/file; "
        "dd if=/dev/zero of=/dev/ram1 bs=4k count=16 oflag=direct; echo line; sleep 5; done"
    )
    # The page cache of a block device that no process has open is dropped.
    read = (
        "exec 3< /dev/ram2 4< /dev/ram3 5< /dev/ram4; "
        "while :; do cat /dev/ram2 /dev/ram3 /dev/ram4 > /dev/null; sleep 5; done"
    )
    specs: dict[str, Document] = {
        BURNER: {
            "containers": [
                container(command=["sh", "-c", "while :; do :; done"], resources={"limits": limits})
            ]
        },
        "holder": {
            "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}],
            "containers": [
                container(
                    command=forever(f"head -c {HELD_BYTES} /dev/zero > /memory/file"),
                    volumeMounts=[{"name": "memory", "mountPath": "/memory"}],
                    resources={"requests": {"memory": "32Mi"}, "limits": {"memory": "128Mi"}},
                )
            ],
        },
        READER: {
            "containers": [
                container(
                    command=["sh", "-c", read],
                    securityContext={"privileged": True},
                    resources={"limits": {"memory": str(READER_LIMIT)}},
                )
            ],
        },
        WRITER: {
            "volumes": [{"name": "disk", "emptyDir": {}}],
            "containers": [
                container(
                    command=["sh", "-c", write],
                    volumeMounts=[{"name": "disk", "mountPath": "/disk"}],
                    securityContext={"privileged": True},
                )
            ],
        },
        PROBED: {
            "initContainers": [container("init", ["true"]), container("side", restartPolicy="Always")],
            "containers": [container(command=["httpd", "-f", "-p", str(PROBED_PORT)], readinessProbe=probe)],
        },
        HOST_NETWORK: {"hostNetwork": True, "containers": [container()]},
    }
    return [
        pod(
            name,
            meta={"uid": f"00000000-0000-4000-8000-{number:012}"},
            **{"terminationGracePeriodSeconds": 1, **spec},
        )
        for number, (name, spec) in enumerate(specs.items(), start=1)
    ]


class StatsNode(GuestNode):
    """The node; its kubelet is the upstream kubelet or ours."""

    driver = "systemd"
    reference = False

    def hand_to(self, program: Path | None) -> None:
        """Start the upstream kubelet, or ours (None), instead of the kubelet that runs."""
        self.kill()
        flags = [flag for flag in self.command[1:] if not flag.startswith(_DEVICE_PLUGIN_DIR)]
        # The upstream kubelet has no such flag.
        own = [f"{_DEVICE_PLUGIN_DIR}={self.root}/device-plugins"] if program is None else []
        self.command = [str(program or BIN / "kubelet"), *flags, *own]
        self.reference = program is not None
        self.log = self.log.with_name(f"agent-{time.monotonic_ns()}.log")
        self.start()

    def pods(self) -> list[Document]:
        """All pods as the kubelet serves them."""
        return self.get("/pods")["items"] or []  # upstream's null

    def page(self, path: str) -> str:
        """A page of the read-only port."""
        url = f"http://127.0.0.1:{self._read_only}{path}"
        with urllib.request.urlopen(url, timeout=_PAGE_SECONDS) as response:
            text: str = response.read().decode()
            return text

    def wait_measured(self) -> None:
        """Wait until the kubelet has measured everything since now."""
        since = int(time.time()) + 1  # times in the Summary API are whole seconds
        self.wait_none("statistics of all pods", lambda: self._unmeasured(since), SLOW)

    def fetch(self) -> StatsPages:
        """Fetch all responses."""
        # On this port both kubelets run all health checks, and count them.
        self.page("/healthz")
        texts = {name: self.page(path) for name, path in {**EXPOSITIONS, **SUMMARIES}.items()}
        return StatsPages(
            {name: parse_summary(json.loads(texts[name])) for name in SUMMARIES},
            {name: parse_exposition(texts[name]) for name in EXPOSITIONS},
            time.time(),
        )

    def _unmeasured(self, since: float) -> list[str]:
        """Return what the statistics lack, or have only from before `since`."""
        try:
            summary = self.get(SUMMARIES["summary"])
            shown = parse_exposition(self.page(EXPOSITIONS["cadvisor"])).samples
            probes = parse_exposition(self.page(EXPOSITIONS["probes"])).samples
        except urllib.error.HTTPError as err:
            return [f"{err.url}: {err}"]
        labels = [set(series.labels) for series in shown]
        found = {part["podRef"]["name"]: part for part in summary["pods"]}
        lacking = _lacking(summary["node"], "node", since, ("cpu", "memory", "fs"))
        lacking += [] if any(series.name == "prober_probe_total" for series in probes) else ["probes"]
        for document in stats_pods():
            name, spec = f"{document['metadata']['name']}-{NAME}", document["spec"]
            part = found.get(name, {})
            lacking += _lacking(part, name, since, ("cpu", "memory", "network", "ephemeral-storage"))
            measured = {one["name"]: one for one in part.get("containers", ())}
            sidecars = [one for one in spec.get("initContainers", ()) if "restartPolicy" in one]
            for one in (*sidecars, *spec["containers"]):
                entry, path = measured.get(one["name"], {}), f"{name}/{one['name']}"
                lacking += _lacking(entry, path, since, ("cpu", "memory", "rootfs", "logs"))
                # Before its cAdvisor has measured a container, the upstream kubelet has the runtime's values.
                lacking += [] if "psi" in entry.get("cpu", {}) else [f"{path}: psi"]
                if not any({("pod", name), ("container", one["name"])} <= own for own in labels):
                    lacking.append(f"{path}: cadvisor")
            volumes = {volume["name"]: volume for volume in part.get("volume", ())}
            for volume in spec.get("volumes", ()):
                lacking += _lacking(volumes, name, since, (volume["name"],))
        return lacking


def _lacking(entry: dict[str, Any], path: str, since: float, names: tuple[str, ...]) -> list[str]:
    """Return the parts of an entry that are missing or older than `since`, and a missing rate."""
    found = [
        f"{path}: {name}"
        for name in names
        if name not in entry
        # Null is what was not measured yet.
        or (time := entry[name].get("time")) is None
        or datetime.fromisoformat(time).timestamp() < since
    ]
    if "cpu" in names and "usageNanoCores" not in entry.get("cpu", {}):
        found.append(f"{path}: rate")
    return found


@contextlib.contextmanager
def stats_node(path: Path) -> Iterator[StatsNode]:
    """Make a node with the manifests; no kubelet runs yet. Its end leaves nothing."""
    with runtime_process(path, "systemd") as runtime:
        plain = kubelet_node(runtime, **_SETTINGS)
        # The upstream kubelet's cAdvisor reads the names of containers from containerd itself.
        command = [*plain.command, f"--containerd={runtime.instance.socket}"]
        node = StatsNode(plain.instance, command, (plain._healthz, plain._read_only), root=plain.root)
        plain.truth.close()
        for document in stats_pods():
            node.write(document)
        try:
            yield node
        finally:
            node.kill()
            node.truth.close()
            asyncio.run(CgroupDriver(detect_cgroups(), "systemd").remove(("kubepods",)))
