from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pykubelet.api.duration import Duration
from pykubelet.cli.node import doctor as around
from pykubelet.cli.node import doctor as machine
from pykubelet.cli.node.doctor import (
    CHECKS,
    GI,
    DoctorContext,
    Finding,
    ShutdownFacts,
    Status,
    as_lines,
    doctor_context,
    document,
    evaluate_shutdown,
    examine,
    read_shutdown_facts,
    run_doctor,
    summary,
)
from pykubelet.cli.node.doctor_config import PORTS, DoctorConfig, config_of_file
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, serialized
from pykubelet.cli.pykubelet import app
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.linux.host_info import ClockState
from pykubelet.linux.kernel import NAMESPACES, KernelFacts, SwapArea
from pykubelet.linux.logind import DelayDropIn
from pykubelet.linux.network import HostnameError
from pykubelet.linux.port_owner import PortOwner
from pykubelet.linux.process_limits import NAMES
from pykubelet.server.debug import configz_document
from pykubelet.server.node_info import NodeInfo, write_node_info
from pykubelet.server.node_routes import configz_routes
from pykubelet.standalone.data_dir import claim, hold_lock
from pykubelet.standalone.instance import Instance
from pykubelet.standalone.requirements import CNI_PLUGINS
from tests.support.cli_node import answering
from tests.support.logind import logind_on_bus
from tests.support.pod_view import ScriptedView

ALL = frozenset(NAMES)
ROOT = Path("/sys/fs/cgroup")
V1 = {name: ROOT / name for name in ("cpu", "cpuacct", "cpuset", "memory")}
V2 = dict.fromkeys(("cpu", "cpuset", "memory", "pids", "io"), ROOT)
MODULES = frozenset({"overlay", "bridge", "veth", "br_netfilter"})
SWAP = SwapArea("/dev/sda2", "partition", 1024, 0, -2)
GOOD_KERNEL = KernelFacts(
    "6.1.0",
    present=MODULES,
    namespaces=NAMESPACES,
    max_user_namespaces=1000,
    seccomp=True,
    bridge_netfilter_active=True,
)


def listing(code: int, complaint: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(["iptables"], code, "", complaint)


def meminfo(total_mib: int, free_mib: int) -> str:
    kib = {"MemTotal": total_mib * 1024, "MemFree": 1, "MemAvailable": free_mib * 1024}
    return "".join(f"{name}:   {value} kB\n" for name, value in kib.items()) + "HugePages_Free:   0\n"


def disk(free: int, inodes_free: int, inodes: int = 1000) -> list[Finding]:
    return machine.evaluate_disk(
        Path("/d"), free=free * GI, size=100 * GI, inodes_free=inodes_free, inodes=inodes
    )


def mounted_at_root(optional: str) -> str:
    return f"21 20 0:5 / /proc rw shared:5 - proc proc rw\n27 1 254:0 / / rw {optional}- ext4 /dev/vda rw\n"


@pytest.mark.parametrize(
    ("findings", "statuses", "words"),
    [
        (machine.evaluate_capabilities(True, ALL), "ok", "root"),
        (machine.evaluate_capabilities(True, ALL - {"CAP_SYS_RESOURCE"}), "warn", "CAP_SYS_RESOURCE"),
        (machine.evaluate_capabilities(True, ALL - {"CAP_SYS_ADMIN"}), "fail", "without CAP_SYS_ADMIN"),
        (machine.evaluate_capabilities(False, frozenset()), "fail", "not running as root"),
        (machine.evaluate_cgroups(Cgroups(CgroupMode.V2, ROOT, V2, {})), "ok", "v2 at /sys/fs/cgroup: cpu,"),
        (machine.evaluate_cgroups(Cgroups(CgroupMode.HYBRID, ROOT, V1, {})), "ok warn", "maintenance mode"),
        (
            machine.evaluate_cgroups(Cgroups(CgroupMode.V1, ROOT, {}, {})),
            "fail warn",
            "missing: cpu, cpuacct",
        ),
        (machine.evaluate_swap([]), "ok", "off"),
        (machine.evaluate_swap([SWAP]), "fail", "/dev/sda2"),
        (machine.evaluate_swap([SWAP], fails=False), "ok", "/dev/sda2 (partition"),
        (machine.evaluate_configuration(DoctorConfig("a.yaml")), "ok", "a.yaml"),
        (
            machine.evaluate_configuration(DoctorConfig("a.yaml", problem="not valid: x")),
            "fail",
            "a.yaml: not valid: x",
        ),
        (
            machine.evaluate_cgroups(Cgroups(CgroupMode.HYBRID, ROOT, V1, {}), fails_on_v1=True),
            "ok fail",
            "failCgroupV1",
        ),
        (
            machine.evaluate_kernel_defaults({"kernel/panic": (10, 0)}, fails=True),
            "fail",
            "kernel.panic is 0, not 10; protectKernelDefaults is on",
        ),
        (machine.evaluate_kernel(GOOD_KERNEL), "ok", "6.1.0: overlayfs, bridge, veth"),
        (
            machine.evaluate_kernel(KernelFacts("6.1.0", namespaces=NAMESPACES, max_user_namespaces=1)),
            "ok",
            "6.1.0",
        ),
        (
            machine.evaluate_kernel(KernelFacts("3.10.0-957", config={})),
            "ok warn fail warn fail fail warn warn warn",
            "older than 4.19",
        ),
        (
            machine.evaluate_kernel(
                KernelFacts("6.1", MODULES, None, NAMESPACES, max_user_namespaces=1, seccomp=True)
            ),
            "ok warn",
            "modprobe br_netfilter",
        ),
        (machine.evaluate_kernel_defaults({}), "ok", "as the kubelet expects"),
        (
            machine.evaluate_kernel_defaults({"vm/overcommit_memory": (1, 0), "kernel/panic": (10, None)}),
            "warn",
            "sysctl -w vm.overcommit_memory=1 kernel.panic=10",
        ),
        (machine.evaluate_clock(ClockState(True, 0.0123)), "ok", "0.0123 s"),
        (machine.evaluate_clock(ClockState(False, 16)), "warn", "chrony"),
        (disk(50, 900), "ok", "50.0 GiB (50 %) free at /d"),
        (disk(12, 900), "warn", "images are removed"),
        (disk(9, 900), "fail", "pods are evicted"),
        (disk(50, 40), "ok fail", "40 of 1000 inodes"),
        (disk(50, 0, 0), "ok", "free"),
        (machine.evaluate_memory(meminfo(4096, 2048)), "ok", "2.0 of 4.0 GiB"),
        (machine.evaluate_memory(meminfo(4096, 300)), "warn", "little room"),
        (machine.evaluate_memory(meminfo(4096, 99)), "fail", "100 MiB"),
        (machine.evaluate_open_files(1024, True), "ok", "can be raised"),
        (machine.evaluate_open_files(1024, False), "warn", "LimitNOFILE"),
        (machine.evaluate_open_files(1_000_000, False), "ok", "enough"),
        (machine.evaluate_open_files(resource.RLIM_INFINITY, False), "ok", "enough"),
        (machine.evaluate_propagation(mounted_at_root("shared:1 ")), "ok", "/ is shared"),
        (machine.evaluate_propagation(mounted_at_root("")), "warn", "make-rshared"),
        (machine.evaluate_propagation(mounted_at_root("master:1 ")), "warn", "make-rshared"),
        (around.evaluate_programs({"runc": "/usr/sbin/runc"}, {"runc": "runc"}), "ok", "runc"),
        (
            around.evaluate_programs({"runc": None, "ctr": None}, {"runc": "runc", "ctr": "containerd"}),
            "fail",
            "apt-get install containerd runc",
        ),
        (around.evaluate_runtime("x 1", {"RuntimeReady": "", "NetworkReady": ""}), "ok", "speaks CRI v1"),
        (around.evaluate_runtime("x 1", {}, ["image volumes"]), "ok", "CRI v1, without image volumes"),
        (around.evaluate_runtime("x 1", {"RuntimeReady": "broken"}), "fail", "not ready: broken"),
        (around.evaluate_runtime("x 1", {"NetworkReady": "no cni"}), "ok warn", "no cni"),
        (
            around.evaluate_cni_plugins(
                {Path("/a"): frozenset(), Path("/b"): frozenset({*CNI_PLUGINS, "x"})}
            ),
            "ok",
            "in /b",
        ),
        (
            around.evaluate_cni_plugins({Path("/a"): frozenset({"bridge", "loopback"})}),
            "fail",
            "missing: host-local, portmap (looked in /a)",
        ),
        (around.evaluate_cni_config(Path("/c"), {}), "warn", "none in /c"),
        (
            around.evaluate_cni_config(Path("/c"), {"9.conf": "x", "1.conflist": '{"name": "n"}'}),
            "ok",
            "'n' from /c/1",
        ),
        (
            around.evaluate_cni_config(Path("/c"), {"1.conf": "x"}),
            "fail",
            "/c/1.conf is no CNI configuration",
        ),
        (around.evaluate_cni_config(Path("/c"), {"1.conf": "[]"}), "fail", "no CNI configuration"),
        (around.evaluate_ports({}, None), "ok", "free: 10248, 10250, 10255, 4194"),
        (
            around.evaluate_ports({10248: PortOwner(10248, "127.0.0.1", 123, "foo")}, None),
            "ok fail",
            "10248 (health) is taken by pid 123 (foo) on 127.0.0.1",
        ),
        (around.evaluate_ports({4194: PortOwner(4194, "::")}, None), "ok warn", "taken by another process"),
        (
            around.evaluate_ports({port: PortOwner(port, "::", 7, "k") for port, *_ in PORTS}, 7),
            "ok ok ok ok",
            "10250 (the API) is this node's",
        ),
        (around.evaluate_packet_filter("iptables v1", listing(0)), "ok", "lists the nat table"),
        (
            around.evaluate_packet_filter("iptables v1", listing(3, "no\n table")),
            "fail",
            "iptables v1: no table",
        ),
    ],
)
def test_doctor_evaluations_status_and_remedy(findings: list[Finding], statuses: str, words: str) -> None:
    assert " ".join(finding.status.value for finding in findings) == statuses
    assert any(words in f"{finding.what} {finding.remedy}" for finding in findings)
    for finding in findings:
        assert bool(finding.remedy) == (finding.status is not Status.OK)
        assert "\n" not in finding.what + finding.remedy


def test_split_remedy_returns_cause_and_remedy() -> None:
    assert machine.split_remedy(HostnameError("a: b is bad: do c"), ": ") == ("a: b is bad", "do c")
    cause, remedy = machine.split_remedy(HostnameError("bad"), ": ")
    assert cause == "bad"
    assert remedy


def check_that_crashes(_: DoctorContext) -> list[Finding]:
    raise RuntimeError("several\nlines")


def test_examine_crashing_check_is_warning_and_others_run() -> None:
    findings = examine(DoctorContext(Path("/tmp")), [check_that_crashes, machine.check_swap])
    assert len(findings) == 2
    assert findings[0].area == "that crashes"
    assert findings[0].status is Status.WARN
    assert findings[0].what == "could not be checked: RuntimeError: several lines"


def test_doctor_output_as_lines_and_json() -> None:
    findings = [Finding("a", Status.OK, "fine"), Finding("area", Status.FAIL, "bad", "do that")]
    assert as_lines(findings) == [
        "ok    a     fine",
        "fail  area  bad",
        "            -> do that",
        "1 ok, 0 to look at, 1 failed: a node cannot work here yet",
    ]
    assert document(findings) == {
        "findings": [
            {"area": "a", "status": "ok", "what": "fine", "remedy": ""},
            {"area": "area", "status": "fail", "what": "bad", "remedy": "do that"},
        ],
        "ok": 1,
        "warn": 0,
        "fail": 1,
    }
    assert summary(findings[:1]).endswith("this machine can be a node")


def test_doctor_output_control_characters_of_process_names_escaped() -> None:
    owners = {10250: PortOwner(10250, "127.0.0.1", 7, "\x1b]0;x\x07é")}
    findings = machine.evaluate_ports(owners, None)
    text = "\n".join(as_lines(findings))
    assert "\\x1b]0;x\\x07é" in text
    assert "\x1b" not in text
    assert serialized(document(findings), Output.JSON).isascii()


def test_print_table_control_characters_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    machine.print_table([Finding("a\x1b", Status.FAIL, "\x1b]0;x\x07", "do \x1b]0;y\x07")])
    out = capsys.readouterr().out
    assert "\\x1b]0;x\\x07" in out
    assert "\\x1b]0;y\\x07" in out
    assert "\x1b" not in out


def test_doctor_context_of_root_dir_is_its_runtime_and_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    assert run_doctor(NodeSelection(root_dir=root), None, Output.JSON) == 1
    assert "there is no directory" in capsys.readouterr().err
    root.mkdir()
    info = NodeInfo(
        node_name="n",
        root_dir=str(root),
        cert_dir=str(root),
        pod_logs_dir="/l",
        container_runtime_endpoint="unix:///run/c.sock",
        config_file="/etc/k.yaml",
        pid=7,
    )
    write_node_info(root, info)
    selection = NodeSelection(root_dir=root)
    assert doctor_context(selection, None) == DoctorContext(root, "unix:///run/c.sock", Path("/etc/k.yaml"))
    assert doctor_context(selection, "unix:///other").endpoint == "unix:///other"
    assert doctor_context(NodeSelection(data_dir=tmp_path), None) == DoctorContext(tmp_path)


def examined(
    capsys: pytest.CaptureFixture[str], data_dir: Path, endpoint: str | None
) -> tuple[int, list[dict[str, Any]]]:
    code = run_doctor(NodeSelection(data_dir), endpoint, Output.JSON)
    return code, json.loads(capsys.readouterr().out)["findings"]


def about(findings: list[dict[str, Any]], area: str) -> list[dict[str, Any]]:
    return [finding for finding in findings if finding["area"] == area]


def test_run_doctor_json_covers_all_areas_and_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = examined(capsys, tmp_path / "not/there", None)
    assert code == any(finding["status"] == "fail" for finding in findings)
    assert not [finding for finding in findings if "could not be checked" in finding["what"]]
    areas = {finding["area"] for finding in findings}
    assert len(areas) >= len(CHECKS)
    assert {"cgroups", "swap", "capabilities", "runtime", "CNI plugins", "kernel", "ports", "clock"} <= areas
    assert str(tmp_path) in about(findings, "disk")[0]["what"]
    assert not (tmp_path / "not").exists()


def test_run_doctor_plain_lines_summary_matches_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_doctor(NodeSelection(tmp_path), None, Output.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert (" 0 failed: this machine can be a node" in lines[-1]) == (code == 0)
    assert all(line.startswith(("ok ", "warn ", "fail ", "      ")) for line in lines[:-1])


def test_run_doctor_terminal_prints_table(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom pykubelet.cli.node.doctor import run_doctor\n"
        "from pykubelet.cli.options import NodeSelection\nfrom pykubelet.cli.output import Output\n"
        "assert 'rich' not in sys.modules\n"
        "sys.exit(run_doctor(NodeSelection(Path(sys.argv[1])), None, Output.TABLE))\n"
    )
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
        )
        os.close(theirs)
        shown = b""
        while chunk := read_terminal(ours):
            shown += chunk
        complaint = process.communicate()[1]
    finally:
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert process.returncode in (0, 1), complaint
    assert complaint == b""
    assert "┃ Area" in text
    assert b"\x1b[32mok" in shown
    assert re.search(r"│ (ok|fail) +│ cgroups ", text)
    assert re.search(r"(failed: this machine can be a node|cannot work here yet)\s*$", text)


def read_terminal(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # how a terminal says that the other side is gone
        return b""


def test_run_doctor_port_in_use_names_holder_pid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", 4194))
        except OSError:
            pytest.skip("port 4194 is in use on this machine")
        sock.listen()
        _, findings = examined(capsys, tmp_path, None)
    assert f"4194 (old cAdvisor) is taken by pid {os.getpid()} (" in about(findings, "ports")[-1]["what"]


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("unix:///no/such.sock", "the file does not exist"),
        ("unix:///etc/passwd", "not a socket"),
        ("tcp://127.0.0.1:5", "protocol 'tcp' is not supported"),
        ("nonsense", "neither a URL nor an absolute path"),
    ],
)
def test_run_doctor_unreachable_runtime_fails_with_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, endpoint: str, words: str
) -> None:
    code, findings = examined(capsys, tmp_path, endpoint)
    assert code == 1
    [runtime] = about(findings, "runtime")
    assert runtime["status"] == "fail"
    assert words in runtime["what"]
    assert runtime["remedy"]
    assert not about(findings, "data directory")


def test_run_doctor_non_utf8_data_dir_printed_escaped(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"\xff")
    place.mkdir()
    script = (
        "import sys\nfrom pathlib import Path\nfrom pykubelet.cli.node.doctor import run_doctor\n"
        "from pykubelet.cli.options import NodeSelection\nfrom pykubelet.cli.output import Output\n"
        "sys.exit(run_doctor(NodeSelection(Path(sys.argv[1])), None, Output.TABLE))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, place], capture_output=True)
    assert done.stderr == b""
    assert b"\\udcff" in done.stdout


def test_run_doctor_system_directory_as_data_dir_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examined(capsys, Path("/etc"), None)
    assert code == 1
    [place] = about(findings, "data directory")
    assert place["status"] == "fail"
    assert "choose" in place["remedy"]


CONTAINERD = """
version = 2
root = "{0}/root"
state = "{0}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.internal.v1.restart"]
[grpc]
address = "{0}/c.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{0}/opt"
[plugins."io.containerd.grpc.v1.cri"]
stream_server_address = "127.0.0.1"
stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{0}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
"""


@pytest.fixture
def containerd() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pyk-doctor-") as folder:
        config = Path(folder, "config.toml")
        config.write_text(CONTAINERD.format(folder))
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(["containerd", "--config", str(config)], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not Path(folder, "c.sock").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"unix://{folder}/c.sock"
        finally:
            process.terminate()
            process.wait(45)


@pytest.mark.machine
def test_run_doctor_real_containerd_ok_without_cni_warns(
    containerd: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It listens before it is ready, which takes longer on a busy machine than a person would wait.
    monkeypatch.setattr(around, "_TIMEOUT_SECONDS", 45.0)
    _, findings = examined(capsys, tmp_path, containerd)
    answer, network = about(findings, "runtime")
    assert answer["status"] == "ok"
    assert answer["what"].startswith("containerd ")
    assert f"at {containerd} speaks CRI v1" in answer["what"]
    assert network["status"] == "warn"
    assert "cni" in network["what"].lower()


LATE = DelayDropIn(Path("/usr/lib/systemd/logind.conf.d/unattended-upgrades-logind-maxdelay.conf"), 30)


@pytest.mark.parametrize(
    ("facts", "status", "what"),
    [
        (ShutdownFacts(0, 5.0), Status.WARN, "off, shutdownGracePeriod is not set"),
        (ShutdownFacts(0, None, "no bus"), Status.WARN, "off, shutdownGracePeriod is not set"),
        (ShutdownFacts(40, None, "no bus"), Status.WARN, "40 s are configured, but logind does not respond"),
        (
            ShutdownFacts(40, 30.0, "", LATE),
            Status.WARN,
            "maxdelay.conf limits the delay of a shutdown to 30 s",
        ),
        (ShutdownFacts(20, 30.0, "", LATE), Status.OK, "20 s; logind delays a shutdown by up to 30 s"),
        (ShutdownFacts(40, 5.0), Status.OK, "by up to 5 s, which the kubelet raises"),
        (ShutdownFacts(40, 60.0), Status.OK, "by up to 60 s"),
    ],
)
def test_evaluate_shutdown_reports_whether_it_will_work(
    facts: ShutdownFacts, status: Status, what: str
) -> None:
    (finding,) = evaluate_shutdown(facts)
    assert finding.status is status
    assert what in finding.what
    assert bool(finding.remedy) == (status is not Status.OK)


async def test_read_shutdown_facts_of_configuration_and_logind(tmp_path: Path) -> None:
    config = tmp_path / "kubelet.yaml"
    kind = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
    config.write_text(f"{kind}shutdownGracePeriod: 40s\nshutdownGracePeriodCriticalPods: 10s\n")
    period = config_of_file(config).shutdown_seconds
    absent = await read_shutdown_facts(period, tmp_path / "nothing")
    assert (absent.period, absent.delay) == (40, None)
    assert "cannot be reached" in absent.problem
    config.write_text(f"{kind}shutdownGracePeriod: soon\n")
    assert "not valid" in config_of_file(config).problem
    if shutil.which("dbus-daemon") is not None:
        async with logind_on_bus(tmp_path, delay=7) as (bus, _):
            facts = await read_shutdown_facts(period, bus)
            assert (facts.period, facts.delay) == (40, 7.0)


KIND = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


def swap_of(context: DoctorContext) -> Finding:
    [finding] = machine.check_swap(context)
    return finding


def test_doctor_context_swap_evaluated_for_up_unless_config_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "swap_areas", lambda: [SWAP])
    monkeypatch.setattr(machine, "SYSTEM_CONFIG", tmp_path / "system.yaml")
    selection = NodeSelection(tmp_path / "data")
    by_default = doctor_context(selection, None)
    assert swap_of(by_default).status is Status.OK
    assert "failSwapOn: false" in swap_of(by_default).what
    assert machine.check_configuration(by_default)[0].what == "defaults of `pykubelet up`"
    strict, lenient = tmp_path / "strict.yaml", tmp_path / "lenient.yaml"
    strict.write_text(KIND)
    lenient.write_text(f"{KIND}failSwapOn: false\n")
    assert swap_of(doctor_context(selection, None, strict)).status is Status.FAIL
    assert swap_of(doctor_context(selection, None, lenient)).status is Status.OK
    assert machine.check_configuration(doctor_context(selection, None, strict))[0].what == str(strict)
    assert swap_of(doctor_context(selection, "unix:///run/c.sock")).status is Status.OK
    (tmp_path / "system.yaml").write_text(KIND)
    of_system = doctor_context(selection, "unix:///run/c.sock")
    assert (swap_of(of_system).status, of_system.config) == (Status.FAIL, tmp_path / "system.yaml")
    lenient.write_text(f"{KIND}failSwapOn: perhaps\n")
    [wrong] = machine.check_configuration(doctor_context(selection, None, lenient))
    assert (wrong.status, "failSwapOn" in wrong.what) == (Status.FAIL, True)


def test_doctor_context_of_stopped_kubelet_uses_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "swap_areas", lambda: [SWAP])
    root, file = tmp_path / "root", tmp_path / "k.yaml"
    root.mkdir()
    info = NodeInfo(
        node_name="n",
        root_dir=str(root),
        cert_dir=str(root),
        pod_logs_dir="/l",
        container_runtime_endpoint="unix:///run/c.sock",
    )
    write_node_info(root, info)
    selection = NodeSelection(root_dir=root)
    assert swap_of(doctor_context(selection, None)).status is Status.FAIL  # upstream's default
    info.config_file = str(file)
    write_node_info(root, info)
    file.write_text(f"{KIND}failSwapOn: false\n")
    assert swap_of(doctor_context(selection, None)).status is Status.OK
    assert str(file) in machine.check_configuration(doctor_context(selection, None))[0].what


async def test_doctor_context_of_running_node_uses_its_effective_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "swap_areas", lambda: [SWAP])
    config = KubeletConfiguration(fail_swap_on=True, protect_kernel_defaults=True)
    config.shutdown_grace_period = Duration.parse("30s")
    config.port = 21250
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as directory:  # sockets have short paths
        instance = Instance.at(Path(directory))
        claim(instance)
        routes = configz_routes(lambda: configz_document(config))
        async with answering(instance, ScriptedView(), routes):
            with hold_lock(instance, "up"):
                context = await asyncio.to_thread(doctor_context, NodeSelection(instance.data_dir), None)
        assert swap_of(context).status is Status.FAIL
        assert (context.settings.protect_kernel_defaults, context.settings.shutdown_seconds) == (True, 30)
        # Ports of other kubelets do not matter to a node with its own.
        ports = [(10248, "health", True), (21250, "the API", True), (10255, "the read-only API", False)]
        assert list(context.settings.ports[:3]) == ports
        owners = {10250: PortOwner(10250, "::", 7, "kubelet"), 21250: PortOwner(21250, "::", 8, "kubelet")}
        found = machine.evaluate_ports(owners, 8, context.settings.ports)
        assert [finding.status for finding in found] == [Status.OK, Status.OK]
        assert context.settings.source == f"of the running kubelet of {directory}"


def test_doctor_json_option_is_the_same_as_output_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "examine", lambda _: [Finding("a b", Status.WARN, "x", "y")])
    for arguments, starts in (
        (["--json"], '{\n  "findings"'),
        (["-o", "json"], '{\n  "findings"'),
        (["-o", "yaml"], "findings:\n- area: a b"),
        (["-o", "name"], "a b\n"),
        (["-o", "wide"], "warn  a b"),
    ):
        result = CliRunner().invoke(app, ["doctor", "--data-dir", "/none", *arguments])
        assert result.output.startswith(starts), result.output
        assert result.exit_code == 0
    assert CliRunner().invoke(app, ["doctor", "--json", "-o", "yaml"]).exit_code == 2
