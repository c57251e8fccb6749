"""The `kubelet` program as its operator meets it: a process, its words, its exit code."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cli.kubelet import main
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import connect
from pykubelet.linux.mounts import unshare_mounts
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime

BIN = Path(sys.executable).parent
KUBELET = str(BIN / "kubelet")


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KUBELET, *argv], capture_output=True, text=True, timeout=60, check=False)


def test_kubelet_version_flag_prints_kubernetes_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("Kubernetes v1.36.0+pykubelet")


def test_kubelet_help_flag_lists_flags_within_width() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--container-runtime-endpoint" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


CONFIG = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\x00\x01\x02\xff", "binary|text"),
        (b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: Pod\n", "kind"),
        (b"apiVersion: kubelet.config.k8s.io/v9\nkind: KubeletConfiguration\n", "v9"),
        (CONFIG.encode() + b"maxPods: many\n", "maxPods"),
        (CONFIG.encode() + b"syncFrequency: 5 parsecs\n", "syncFrequency"),
        (CONFIG.encode() + b"maxPodz: 3\n", "maxPodz"),
        (CONFIG.encode() + b"maxPods: 3\nmaxPods: 4\n", "maxPods"),
        (CONFIG.encode() + b"---\n" + CONFIG.encode(), "document"),
        (CONFIG.encode() + b"featureGates: {NoSuchGate: true}\n", "NoSuchGate"),
        (b"a: [1,\n", "YAML"),
        (b"- 1\n", "mapping|object"),
    ],
)
def test_kubelet_invalid_config_file_prints_one_line_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    path = tmp_path / "kubelet.yaml"
    path.write_bytes(content)
    # In this process, which takes milliseconds instead of a second; the next tests have processes.
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(path)])
    assert stopped.value.code == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("kubelet: ")
    assert any(word in lines[0] for word in says.split("|")), lines[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--sync-frequency=fast"], "sync-frequency"),
        (["--config=/does/not/exist"], "/does/not/exist"),
        (["--config=/etc"], "/etc"),
        (["start"], "start"),
        (["--kube-reserved=memory=lots"], "lots"),
        (["--container-runtime-endpoint=unix:///no/such.sock"], "/no/such.sock"),
        (["--container-runtime-endpoint=tcp://127.0.0.1:1234"], "tcp"),
        (["--node-ip=10.0.0.1,10.0.0.2"], "node-ip"),
        (["--lock-file=/no/such/folder/lock"], "/no/such/folder"),
        (["--exit-on-lock-contention"], "lock"),
    ],
)
def test_kubelet_invalid_flag_prints_one_line_and_creates_nothing(
    tmp_path: Path, argv: list[str], says: str
) -> None:
    done = run(f"--root-dir={tmp_path}", *argv)
    assert done.returncode == 1
    complaints = [line for line in done.stderr.splitlines() if line.startswith("kubelet: ")]
    assert len(complaints) == 1, done.stderr
    assert says in complaints[0]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_kubelet_several_invalid_settings_all_reported(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.yaml"
    path.write_text(CONFIG + "maxPods: -1\nport: 99999\nimageGCHighThresholdPercent: 200\n")
    done = run("--config", str(path), "--event-burst=x")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for field in ("maxPods", "port", "imageGCHighThresholdPercent", "--event-burst"):
        assert field in done.stderr


def test_kubelet_runtime_endpoint_no_socket_or_silent_exits_1(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    done = run(f"--root-dir={tmp_path}", f"--container-runtime-endpoint=unix://{plain}")
    assert done.returncode == 1
    assert "not a socket" in done.stderr
    silent = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(silent))
        server.listen()
        done = run(f"--root-dir={tmp_path}", f"--container-runtime-endpoint=unix://{silent}")
    assert done.returncode == 1
    assert str(silent) in done.stderr
    assert "Traceback" not in done.stderr


def test_kubelet_without_root_exits_1_with_message() -> None:
    argv = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", KUBELET]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if "Permission denied" in done.stderr and "kubelet:" not in done.stderr:
        pytest.skip("the virtual environment is not readable by others here")
    assert done.returncode == 1
    assert "root is needed" in done.stderr


class Process:
    """A kubelet that runs until the test is over."""

    def __init__(
        self,
        endpoint: str,
        root: Path,
        *argv: str,
        env: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.root = root / "root"
        # Several kubelets of this host must not share the default, unless `wrapper` isolates this one.
        plugins = [] if wrapper else [f"--device-plugin-dir={self.root / 'device-plugins'}"]
        self.log = root / "kubelet.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *wrapper,
                    KUBELET,
                    f"--container-runtime-endpoint={endpoint}",
                    f"--root-dir={self.root}",
                    f"--cert-dir={root / 'pki'}",
                    *plugins,
                    "--address=127.0.0.1",
                    f"--port={free_port()}",
                    f"--healthz-port={self.port}",
                    "--read-only-port=0",
                    "--fail-swap-on=false",
                    "--cgroups-per-qos=false",
                    "--enforce-node-allocatable=",
                    "--make-iptables-util-chains=false",
                    "-v=2",
                    *argv,
                ],
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
            )

    def healthz(self, path: str = "/healthz") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def wait_healthy(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()
            # Refused, not well yet, or too busy to answer in time.
            with contextlib.suppress(OSError):
                if self.healthz() == "ok":
                    return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        # What was killed, or left pods behind, does not take it back.
        unshare_mounts(self.root)


@pytest.fixture
def started(private_runtime, tmp_path: Path) -> Iterator[list[Process]]:  # type: ignore[no-untyped-def]
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.end()


@pytest.mark.machine
def test_kubelet_other_root_dir_serves_device_plugins_at_upstream_path(  # type: ignore[no-untyped-def]
    private_runtime,
    tmp_path: Path,
    started: list[Process],
) -> None:
    # In a mount namespace of its own: other kubelets of this host may serve the real path.
    private = 'mount -t tmpfs none /var/lib && exec "$@"'
    wrapper = ("unshare", "--mount", "--propagation=private", "sh", "-c", private, "sh")
    kubelet = Process(private_runtime.endpoint, tmp_path, wrapper=wrapper)
    started.append(kubelet)
    kubelet.wait_healthy()
    seen = Path(f"/proc/{kubelet.process.pid}/root")
    assert (seen / "var/lib/kubelet/device-plugins/kubelet.sock").is_socket()
    assert not (kubelet.root / "device-plugins").exists()
    assert (kubelet.root / "pod-resources/kubelet.sock").is_socket()


@pytest.mark.machine
def test_kubelet_start_to_sigterm_notifies_systemd_and_exits_0(
    private_runtime: RunningRuntime, tmp_path: Path, started: list[Process]
) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listener.settimeout(60)
        kubelet = Process(private_runtime.endpoint, tmp_path, env={"NOTIFY_SOCKET": str(address)})
        started.append(kubelet)
        assert b"READY=1" in listener.recv(4096)
        kubelet.wait_healthy()
        assert kubelet.healthz("/healthz?verbose").endswith("healthz check passed\n")
        began = time.monotonic()
        kubelet.process.send_signal(signal.SIGTERM)
        assert b"STOPPING=1" in listener.recv(4096)
        assert kubelet.process.wait(60) == 0
        # It does not wait for anything to time out.
        assert time.monotonic() - began < 25
    steps = [
        "Kubelet version",
        "Standalone mode",
        "Node identity",
        "Connecting to the",
        "Container runtime",
        "Listening",
    ]
    text = kubelet.log.read_text()
    assert [text.index(step) for step in steps] == sorted(text.index(step) for step in steps)


@pytest.mark.machine
def test_kubelet_healthz_port_in_use_error_names_holder_pid(
    private_runtime: RunningRuntime, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = run(
            f"--container-runtime-endpoint={private_runtime.endpoint}",
            f"--root-dir={tmp_path}",
            f"--cert-dir={tmp_path / 'pki'}",
            f"--device-plugin-dir={tmp_path / 'device-plugins'}",
            "--address=127.0.0.1",
            f"--port={free_port()}",
            f"--healthz-port={port}",
            "--fail-swap-on=false",
            "--cgroups-per-qos=false",
            "--enforce-node-allocatable=",
            "--make-iptables-util-chains=false",
            "--read-only-port=0",
        )
    assert done.returncode == 1
    complaint = done.stderr.strip().splitlines()[-1]
    assert f"127.0.0.1:{port}" in complaint
    assert f"pid {os.getpid()}" in complaint


@pytest.mark.machine
def test_kubelet_exit_on_lock_contention_first_process_exits_0(
    private_runtime: RunningRuntime, tmp_path: Path, started: list[Process]
) -> None:
    lock = tmp_path / "lock"
    first = Process(private_runtime.endpoint, tmp_path, f"--lock-file={lock}", "--exit-on-lock-contention")
    started.append(first)
    first.wait_healthy()
    (tmp_path / "2").mkdir()
    second = Process(private_runtime.endpoint, tmp_path / "2", f"--lock-file={lock}")
    started.append(second)
    assert first.process.wait(60) == 0
    second.wait_healthy()


@pytest.mark.machine
def test_kubelet_root_dir_too_long_for_sockets_exits_1(
    private_runtime: RunningRuntime, tmp_path: Path, started: list[Process]
) -> None:
    folder = tmp_path / ("deep" * 25)
    folder.mkdir()
    kubelet = Process(private_runtime.endpoint, folder)
    started.append(kubelet)
    assert kubelet.process.wait(60) == 1
    last = kubelet.log.read_text().splitlines()[-1]
    assert last.startswith("kubelet: device plugins cannot be served")
    assert last.endswith("choose a shorter directory")


MANIFEST = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: main, image: "{image}", imagePullPolicy: Never, command: [sleep, "600"]}}
"""


async def remove_pods(endpoint: str, name: str) -> list[str]:
    """Remove the pods of this name; gives the states of their containers."""
    metrics = CriMetrics(CollectorRegistry())
    async with await connect(endpoint, timeout=Duration.from_seconds(60), metrics=metrics) as cri:
        mine = {"io.kubernetes.pod.name": name}
        containers = await cri.runtime.list_containers(pb.ContainerFilter(label_selector=mine))
        for sandbox in await cri.runtime.list_pod_sandbox(pb.PodSandboxFilter(label_selector=mine)):
            await cri.runtime.stop_pod_sandbox(sandbox.id)
            await cri.runtime.remove_pod_sandbox(sandbox.id)
        return [pb.ContainerState.Name(container.state) for container in containers]


@pytest.mark.machine
@pytest.mark.parametrize("good", [True, False])
def test_kubelet_runonce_runs_pod_or_exits_1(
    private_runtime: RunningRuntime, tmp_path: Path, started: list[Process], good: bool
) -> None:
    name, image = (
        f"once-{good}".lower(),
        private_runtime.busybox_image if good else "pykubelet.local/absent:1",
    )
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "once.yaml").write_text(MANIFEST.format(name=name, image=image))
    kubelet = Process(
        private_runtime.endpoint,
        tmp_path,
        "--runonce",
        f"--pod-manifest-path={manifests}",
        "--hostname-override=one",
    )
    started.append(kubelet)
    try:
        code = kubelet.process.wait(120)
        states = asyncio.run(remove_pods(private_runtime.endpoint, f"{name}-one"))
    finally:
        kubelet.end()
    text = kubelet.log.read_text()
    if good:
        assert code == 0, text
        assert states == ["CONTAINER_RUNNING"]
    else:
        assert code == 1
        assert f"default/{name}-one is Pending (main: ErrImageNeverPull" in text.splitlines()[-1]
