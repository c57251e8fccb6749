"""A running kubelet applies a changed configuration, and keeps the last valid one."""

import json
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.manifests import Document, pod
from tests.support.metrics_page import Page
from tests.support.node import BIN, Node, kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

OPEN = {"anonymous": {"enabled": True}, "webhook": {"enabled": False}}


class Configured:
    """A node and its configuration file."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.path = next(
            Path(flag.partition("=")[2]) for flag in node.command if flag.startswith("--config=")
        )
        self.start = yaml.safe_load(self.path.read_text())

    def write(self, **changes: Any) -> None:
        self.write_text(yaml.safe_dump({**self.start, **changes}))

    def write_text(self, text: str) -> None:
        hidden = self.path.with_name(".config.new")
        hidden.write_text(text)
        hidden.rename(self.path)

    def reload(self) -> subprocess.CompletedProcess[str]:
        """Run `pykubelet config reload`."""
        command = [str(BIN / "pykubelet"), "config", "reload", f"--data-dir={self.node.instance.data_dir}"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)

    def hang_up(self) -> None:
        assert self.node.process is not None
        self.node.process.send_signal(signal.SIGHUP)

    def configz(self) -> Document:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        url = f"https://127.0.0.1:{self.start['port']}/configz"
        with urllib.request.urlopen(url, timeout=30, context=context) as response:
            document: Document = json.load(response)["kubeletconfig"]
            return document

    def count(self, result: str) -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.start['readOnlyPort']}/metrics", timeout=30
        ) as response:
            return Page(response.read().decode()).value("kubelet_config_reload_total", result=result) or 0.0

    def eviction_thresholds(self) -> dict[str, int | None]:
        command = [
            str(BIN / "pykubelet"),
            "pressure",
            "-o",
            "json",
            f"--data-dir={self.node.instance.data_dir}",
        ]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return {
            signal["signal"]: threshold["value"]
            for signal in json.loads(found.stdout)["signals"]
            for threshold in signal["thresholds"]
        }


@contextmanager
def configured(runtime: RunningRuntime, *flags: str) -> Iterator[Configured]:
    node = kubelet_node(runtime, authentication=OPEN, evictionHard={"memory.available": "10Mi"})
    node.command = [*(flag for flag in node.command if flag != "-v=4"), *flags]
    with running(node):
        yield Configured(node)


def with_sysctl(name: str) -> Document:
    document = pod(name)
    document["spec"]["securityContext"] = {"sysctls": [{"name": "net.core.somaxconn", "value": "64"}]}
    return document


def test_reload_command_several_fields_take_effect_in_running_kubelet(runtime: RunningRuntime) -> None:
    with configured(runtime) as it:
        node = it.node
        node.write(with_sysctl("early"))
        node.wait("the pod to be rejected", lambda: _phase(node, "early-n1") == "Failed")
        assert node.process is not None
        process = node.process.pid
        it.write(
            allowedUnsafeSysctls=["net.core.*"],
            clusterDNS=["192.0.2.53"],
            clusterDomain="live.test",
            evictionHard={"memory.available": "20Mi", "nodefs.available": "1Mi"},
            logging={"verbosity": 5},
            port=it.start["port"] + 1,
        )
        done = it.reload()
        assert done.returncode == 0, done.stderr
        applied, restart = done.stdout.split("Requires a restart:")
        assert [line.split(":")[0].strip() for line in applied.splitlines()[1:]] == [
            "allowedUnsafeSysctls",
            "clusterDNS",
            "clusterDomain",
            "evictionHard",
            "logging.verbosity",
        ]
        assert restart.split()[0] == "port:"
        late = node.start_pod(with_sysctl("late"))
        directory = node.truth.ready("late-n1")
        assert len(directory) == 1
        resolved = _exec(node, "late-n1", "cat", "/etc/resolv.conf")
        assert "nameserver 192.0.2.53" in resolved
        assert "svc.live.test" in resolved
        assert it.eviction_thresholds()["memory.available"] == 20 << 20
        shown = it.configz()
        assert (shown["clusterDomain"], shown["port"]) == ("live.test", it.start["port"])
        assert "FLAG" not in node.log_text()
        node.wait("verbose lines", lambda: "Reading manifest" in node.log_text())
        assert node.process.pid == process
        assert (it.count("success"), it.count("failed")) == (1, 0)
        assert late["status"]["phase"] == "Running"
        node.remove("early", "late")


def test_reload_signal_invalid_file_changes_nothing(runtime: RunningRuntime) -> None:
    with configured(runtime) as it:
        before = it.configz()
        it.write(maxPods=-1, clusterDomain="bad.test")
        it.hang_up()
        it.node.wait("the failed reload", lambda: it.count("failed") == 1)
        done = it.reload()
        assert (done.returncode, done.stdout) == (1, "")
        assert "maxPods" in done.stderr
        it.write(systemReserved={"memory": "100Ti"})
        it.hang_up()
        it.node.wait("the impossible reload", lambda: it.count("failed") == 3)
        assert "of memory is reserved but the machine has only" in it.node.log_text()
        assert it.configz() == before
        it.write(clusterDomain="good.test")
        it.hang_up()
        it.node.wait("the new domain", lambda: it.configz()["clusterDomain"] == "good.test")


def test_watch_config_replaced_file_applied_and_last_good_used_at_start(runtime: RunningRuntime) -> None:
    with configured(runtime, "--watch-config") as it:
        it.write(clusterDomain="first.test")
        it.node.wait("the watched change", lambda: it.configz()["clusterDomain"] == "first.test")
        it.write_text("kind: KubeletConfiguration\napiVersion: [")
        it.node.wait("the failed reload", lambda: it.count("failed") >= 1)
        assert it.configz()["clusterDomain"] == "first.test"
        it.node.restart()
        assert it.configz()["clusterDomain"] == "first.test"
        assert "using the last valid configuration" in it.node.log_text()
        it.write(clusterDomain="second.test")
        it.node.wait("the corrected file", lambda: it.configz()["clusterDomain"] == "second.test")
        assert it.node.stop() == 0
        it.write_text("{")
        it.node.command = [flag for flag in it.node.command if flag != "--watch-config"]
        it.node.start(wait=False)
        assert it.node.process is not None
        assert it.node.process.wait(timeout=60) == 1, "as upstream without the flag"
        it.node.process = None


def _phase(node: Node, name: str) -> str:
    found = node.pod(name)
    return str(found["status"].get("phase")) if found is not None else ""


def _exec(node: Node, name: str, *command: str) -> str:
    program = [str(BIN / "pykubelet"), "exec", f"--data-dir={node.instance.data_dir}", name, "--", *command]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
