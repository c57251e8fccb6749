"""The private runtime on the real machine: pods run, and survive what happens to containerd and agent."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.standalone import requirements
from pykubelet.standalone.daemon import Daemon, find_daemons, last_log_problems, rotate_log
from pykubelet.standalone.data_dir import claim, load_state, save_state
from pykubelet.standalone.instance import AlreadyRunning, EmbeddedError, Instance, RuntimeFailed
from pykubelet.standalone.requirements import PROGRAMS, inspect_host
from pykubelet.standalone.runtime import PrivateRuntime, exits_in_a_row
from pykubelet.standalone.teardown import down, leftovers
from pykubelet.transport.errors import CriError
from tests.support.cri_pods import connected, container_pid, is_running, shell, start_pod
from tests.support.runtime import RunningRuntime, runtime_process, why_no_machine

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(bool(why_no_machine()), reason=why_no_machine()),
]


async def test_private_runtime_pod_runs_with_network(private_runtime: RunningRuntime) -> None:
    async with connected(private_runtime.endpoint) as cri:
        pod = await start_pod(cri, private_runtime.instance, private_runtime.busybox_image, "sleep", "1000")
        address = (await cri.runtime.pod_sandbox_status(pod.sandbox)).status.network.ip
        subnet = load_state(private_runtime.instance)
        assert subnet is not None
        assert address.startswith(subnet.subnet.rpartition(".")[0])
        assert f"inet addr:{address}" in await shell(cri, pod, "ifconfig eth0")
        assert (await shell(cri, pod, "id -un; pwd; echo $PATH; ls -d /tmp")).split() == [
            "root",
            "/",
            "/bin",
            "/tmp",
        ]
        assert (
            await asyncio.to_thread(
                subprocess.call, ["busybox", "ping", "-c1", "-W20", address], stdout=subprocess.DEVNULL
            )
            == 0
        )
        await cri.runtime.remove_pod_sandbox(pod.sandbox)


async def test_pause_process_shared_pid_namespace_reaps_orphans(private_runtime: RunningRuntime) -> None:
    async with connected(private_runtime.endpoint) as cri:
        pod = await start_pod(
            cri, private_runtime.instance, private_runtime.busybox_image, "sleep", "1000", shared_pids=True
        )
        # The subshell ends at once, so that its child becomes an orphan, and then a zombie if nobody cares.
        await shell(cri, pod, "(sleep 0.1 & echo started)")
        end = time.monotonic() + 30
        while True:
            processes = await shell(cri, pod, "ps -o pid,stat,args")
            if (" Z" not in processes and "sleep 0.1" not in processes) or time.monotonic() > end:
                break
            await asyncio.sleep(0.1)
        assert "/pause -P" in processes
        assert " Z" not in processes
        assert "sleep 0.1" not in processes
        await cri.runtime.remove_pod_sandbox(pod.sandbox)


async def test_private_runtime_containerd_killed_is_restarted_containers_survive(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
        pod = await start_pod(cri, instance, runtime.busybox_image, "sleep", "1000")
        process = await container_pid(cri, pod)
        first = runtime.pid
        assert first is not None
        started = time.monotonic()
        os.kill(first, signal.SIGKILL)
        while not await _answers(runtime, first):
            assert time.monotonic() - started < 45, "containerd did not come back"
            await asyncio.sleep(0.05)
        assert runtime.restarts == 1
        async with connected(runtime.endpoint) as again:
            assert await is_running(again, pod)
            assert await container_pid(again, pod) == process
        # The connection that was open all the time works again, too.
        assert await is_running(cri, pod)


async def _answers(runtime: PrivateRuntime, former: int) -> bool:
    if runtime.pid in (None, former) or runtime.restarts == 0:
        return False
    try:
        async with connected(runtime.endpoint):
            return True
    except CriError:
        return False


async def test_private_runtime_restart_finds_running_containers(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
        pod = await start_pod(cri, instance, runtime.busybox_image, "sleep", "1000")
        process = await container_pid(cri, pod)
        kept = load_state(instance)
    assert find_daemons(instance) == []
    os.kill(process, 0)
    async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
        assert await is_running(cri, pod)
        assert await container_pid(cri, pod) == process
        assert load_state(instance) == kept


async def test_private_runtime_second_instance_raises_already_running(
    private_runtime: RunningRuntime,
) -> None:
    with pytest.raises(AlreadyRunning, match=f"already running with pid {private_runtime.pid} on ") as caught:
        async with PrivateRuntime(private_runtime.instance):
            pass
    assert caught.value.pid == private_runtime.pid


async def test_private_runtime_parent_killed_stops_containerd(data_dir: Path) -> None:
    with runtime_process(data_dir) as runtime:
        (daemon,) = find_daemons(runtime.instance)
        os.kill(runtime.pid, signal.SIGKILL)
        for _ in range(900):
            if not find_daemons(runtime.instance):
                break
            await asyncio.sleep(0.05)
        assert find_daemons(runtime.instance) == []
        assert daemon.pid


async def test_private_runtime_stray_containerd_is_replaced(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with PrivateRuntime(instance):
        pass
    stray = subprocess.Popen(
        ["containerd", "--config", str(instance.containerd_config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not instance.socket.is_socket():
            await asyncio.sleep(0.02)
        async with PrivateRuntime(instance) as runtime:
            assert stray.poll() is not None
            assert [process.pid for process in find_daemons(instance)] == [runtime.pid]
    finally:
        stray.kill()
        stray.wait()


async def test_private_runtime_error_in_block_propagates_unchanged(data_dir: Path) -> None:
    class Mishap(Exception):
        pass

    instance = Instance.at(data_dir)
    with pytest.raises(Mishap):
        async with PrivateRuntime(instance):
            raise Mishap
    assert find_daemons(instance) == []


async def test_private_runtime_supervisor_error_raises_exception_group(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buggy(path: Path) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("pykubelet.standalone.runtime._LOG_CHECK", 0.05)
    monkeypatch.setattr("pykubelet.standalone.runtime.log_is_long", buggy)
    with pytest.raises(ExceptionGroup) as caught:
        async with PrivateRuntime(Instance.at(data_dir)):
            await asyncio.sleep(60)
    assert [str(err) for err in caught.value.exceptions] == ["a bug"]
    assert find_daemons(Instance.at(data_dir)) == []


async def test_private_runtime_cancelled_stops_containerd(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    entered = asyncio.Event()

    async def owner() -> None:
        async with PrivateRuntime(instance):
            entered.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(owner())
        await entered.wait()
        task.cancel()
    assert task.cancelled()
    assert find_daemons(instance) == []


async def test_private_runtime_removed_image_is_imported_on_restart(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
        first = {image.id: list(image.repo_tags) for image in await cri.images.list_images()}
        assert sorted(tag for tags in first.values() for tag in tags) == [
            runtime.busybox_image,
            runtime.pause_image,
        ]
        await cri.images.remove_image(pb.ImageSpec(image=runtime.busybox_image))
    async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
        second = {image.id: list(image.repo_tags) for image in await cri.images.list_images()}
    assert second == first


async def test_private_runtime_containerd_exits_raises_one_line_and_cleans_up(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_containerd(monkeypatch, data_dir, "echo 'containerd: disk is made of cheese' >&2; exit 3")
    with pytest.raises(RuntimeFailed, match=r"ended with status 3 while starting.*made of cheese") as caught:
        async with PrivateRuntime(Instance.at(data_dir)):
            pass
    assert "\n" not in str(caught.value)
    assert await leftovers(Instance.at(data_dir)) == []
    assert not data_dir.exists()


async def test_private_runtime_failed_start_keeps_manifests(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance.at(data_dir)
    claim(instance)
    instance.manifests.mkdir()
    (instance.manifests / "web.yaml").write_text("kind: Pod")
    _replace_containerd(monkeypatch, data_dir, "exit 1")
    with pytest.raises(RuntimeFailed):
        async with PrivateRuntime(instance):
            pass
    assert (instance.manifests / "web.yaml").exists()
    assert find_daemons(instance) == []


async def test_private_runtime_containerd_hangs_start_times_out(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_containerd(monkeypatch, data_dir, "exec sleep 1000")
    with pytest.raises(RuntimeFailed, match=r"was not ready after 0.5 s: it does not listen"):
        async with PrivateRuntime(Instance.at(data_dir), start_timeout=0.5):
            pass
    assert await leftovers(Instance.at(data_dir)) == []
    assert not data_dir.exists()


async def test_daemon_containerd_without_cri_raises_with_cause(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with PrivateRuntime(instance):
        pass
    config = instance.containerd_config
    config.write_text(
        config.read_text().replace(
            "disabled_plugins = [", 'disabled_plugins = ["io.containerd.grpc.v1.cri", '
        )
    )
    with pytest.raises(RuntimeFailed, match="its CRI part does not"):
        await Daemon(instance, inspect_host()).start()
    assert find_daemons(instance) == []


def _replace_containerd(monkeypatch: pytest.MonkeyPatch, data_dir: Path, script: str) -> None:
    folder = data_dir.parent / "bin"
    folder.mkdir()
    program = folder / "containerd"
    # Of several versions the newest is used.
    version = "containerd test 99.0.0"
    program.write_text(f'#!/bin/sh\n[ "$1" != --version ] || {{ echo {version}; exit; }}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


async def test_private_runtime_missing_binaries_error_names_all(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_dir.parent / "bin"
    folder.mkdir()
    for name in PROGRAMS.keys() - {"runc", "ctr"}:
        (folder / name).symlink_to(inspect_host().programs[name])
    monkeypatch.setattr(requirements, "search_path", lambda: str(folder))
    monkeypatch.setattr(requirements, "_FURTHER_DIRS", ())
    with pytest.raises(
        EmbeddedError, match=r"not installed: ctr \(containerd\); runc \(runc\): run scripts/setup"
    ):
        async with PrivateRuntime(Instance.at(data_dir)):
            pass
    assert not data_dir.exists()


async def test_private_runtime_disk_full_raises_one_line_error(data_dir: Path) -> None:
    data_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(data_dir)], check=True)
    try:
        with pytest.raises(EmbeddedError, match=r"(?i)no space left") as caught:
            async with PrivateRuntime(Instance.at(data_dir), start_timeout=30):
                pass
        assert "\n" not in str(caught.value)
        assert find_daemons(Instance.at(data_dir)) == []
    finally:
        subprocess.run(["umount", "-l", str(data_dir)], check=True)


async def test_private_runtime_after_host_reboot_removes_stale_state(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with PrivateRuntime(instance):
        pass
    kept = load_state(instance)
    assert kept is not None
    kept.boot_id = "another boot"
    save_state(instance, kept)
    stale = instance.containerd_state / "io.containerd.runtime.v2.task" / "k8s.io" / ("0" * 64)
    stale.mkdir(parents=True)
    (instance.cni_leases / instance.name).mkdir(parents=True)
    async with PrivateRuntime(instance):
        assert not stale.exists()
        assert not instance.cni_leases.exists()
        again = load_state(instance)
    assert again is not None
    assert again.boot_id != "another boot"
    assert again.subnet == kept.subnet


async def test_private_runtime_path_with_spaces_and_quotes_runs_pod(data_dir: Path) -> None:
    odd = data_dir.parent / 'it\'s "odd" ü'
    instance = Instance.at(odd)
    try:
        async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
            pod = await start_pod(cri, instance, runtime.busybox_image, "sleep", "1000")
            assert await is_running(cri, pod)
    finally:
        assert await down(instance, lambda line: None) == []
    assert not odd.exists()


async def test_private_runtime_two_instances_use_distinct_networks(
    private_runtime: RunningRuntime, data_dir: Path
) -> None:
    other = Instance.at(data_dir)
    async with PrivateRuntime(other):
        mine, theirs = load_state(private_runtime.instance), load_state(other)
    assert mine is not None
    assert theirs is not None
    assert mine.subnet != theirs.subnet
    assert private_runtime.instance.bridge != other.bridge


def test_rotate_log_long_log_stays_within_limit(tmp_path: Path) -> None:
    log = tmp_path / "containerd.log"
    rotate_log(log, 100)
    with log.open("ab") as writer:
        for number in range(52):
            writer.write(f"line {number:05}\n".encode())
            writer.flush()
            rotate_log(log, 100)
        assert log.stat().st_size <= 100
    assert (tmp_path / "containerd.log.1").stat().st_size <= 110
    assert log.read_text().endswith("line 00051\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("level=info msg=hello\n", "level=info msg=hello"),
        (
            "level=info msg=a\nlevel=warning msg=b\nlevel=info msg=c\ncontainerd: d\n",
            "level=warning msg=b | containerd: d",
        ),
        ("x" * 1000, "x" * 600),
    ],
)
def test_last_log_problems_returns_warnings_since_position(tmp_path: Path, text: str, expected: str) -> None:
    log = tmp_path / "log"
    assert last_log_problems(log) == ""
    log.write_text(f"level=error from before\n{text}")
    assert last_log_problems(log, position=len("level=error from before\n")) == expected


@pytest.mark.parametrize(
    ("before", "lived", "expected"),
    [(0, 0, 1), (1, 1, 2), (2, 59.9, 3), (10, 60, 1)],
)
def test_exits_in_a_row_counted_until_long_run(before: int, lived: float, expected: int) -> None:
    assert exits_in_a_row(before, lived) == expected
