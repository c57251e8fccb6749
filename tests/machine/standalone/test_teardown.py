"""`down` on the real machine: whatever the state, nothing of ours is left and nothing else is touched."""

import asyncio
import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.linux.host_info import boot_id
from pykubelet.linux.iptables import chains_of, network_traces
from pykubelet.standalone.data_dir import State, claim, hold_lock, load_state, save_state
from pykubelet.standalone.instance import DirectoryError, EmbeddedError, Instance
from pykubelet.standalone.runtime import PrivateRuntime
from pykubelet.standalone.teardown import (
    down,
    find_cni_plugins,
    find_ids,
    find_shims,
    leftovers,
    shim_sockets,
)
from tests.support.cri_pods import connected, container_pid, start_pod
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime, runtime_process, why_no_machine

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(bool(why_no_machine()), reason=why_no_machine()),
]

SERVER = ("sh", "-c", "mkdir -p /www; echo hello >/www/index.html; exec httpd -f -p 80 -h /www")


def ignore(line: str) -> None:
    pass


@asynccontextmanager
async def running_pod(instance: Instance) -> AsyncIterator[int]:
    """A pod that serves on a host port; gives its process. It runs on after the block."""
    host_port = free_port()
    async with PrivateRuntime(instance) as runtime, connected(runtime.endpoint) as cri:
        pod = await start_pod(cri, instance, runtime.busybox_image, *SERVER, host_port=host_port)
        process = await container_pid(cri, pod)
        assert await asyncio.to_thread(fetch, host_port) == "hello"
        yield process


def fetch(port: int) -> str:
    """Ask the pod through the machine's host port."""
    end = time.monotonic() + 45
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/index.html")
            return connection.getresponse().read().decode().strip()
        except OSError:
            # The server in the pod needs a moment to listen.
            time.sleep(0.1)
        finally:
            connection.close()
    return "no answer"


async def until_gone(process: int) -> None:
    """Wait until a process that was killed is not even a zombie: its heir may need a moment to notice."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(450):
            os.kill(process, 0)
            await asyncio.sleep(0.1)


async def test_down_running_pod_with_host_port_removes_all(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with running_pod(instance) as process:
        present = "\n".join(await leftovers(instance))
    for kind in (
        "shim",
        "cgroup",
        "process",
        "mount",
        "network link",
        "packet filter rule",
        "file",
        "directory",
    ):
        assert kind in present
    said: list[str] = []
    assert await down(instance, said.append) == []
    assert said == ["Removing 1 pod", f"Removing {data_dir}"]
    assert not data_dir.exists()
    await until_gone(process)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert await down(instance, said.append) == [], "a second time there is nothing to do"


async def test_down_keep_data_removes_pods_and_keeps_files_for_next_start(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with running_pod(instance) as process:
        manifest = instance.manifests / "pod.yaml"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text("kept")
    assert await down(instance, ignore, keep_data=True) == []
    await until_gone(process)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert await leftovers(instance) == [f"directory {data_dir}"]
    assert manifest.read_text() == "kept"
    async with running_pod(instance):
        pass


@pytest.mark.parametrize(
    "damage", ["broken containerd", "lost metadata", "no state file", "restarted machine"]
)
async def test_down_damaged_state_removes_pod_and_data_dir(
    private_runtime: RunningRuntime, data_dir: Path, damage: str
) -> None:
    # The other runtime takes away at last what this one, without its state, cannot know to be ours.
    instance = Instance.at(data_dir)
    async with running_pod(instance) as process:
        sockets = [path for path in shim_sockets(instance, find_ids(instance)) if path.exists()]
        assert sockets
    match damage:
        case "broken containerd":
            instance.containerd_config.write_text("this = is not [ TOML")
        case "lost metadata":
            subprocess.run(["rm", "-rf", str(instance.containerd_root)], check=True)
        case "no state file":
            instance.state.write_text("{")
        case "restarted machine":
            kept = load_state(instance)
            assert kept is not None
            kept.boot_id = "another boot"
            save_state(instance, kept)
    assert await down(instance, ignore) == []
    assert not data_dir.exists()
    assert [path for path in sockets if path.exists()] == []
    await until_gone(process)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


async def test_down_interrupted_repeatedly_completes(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with running_pod(instance):
        ids = find_ids(instance)
        sockets = [path for path in shim_sockets(instance, ids) if path.exists()]
        assert sockets
        assert await network_traces(instance.name, ids)
    left: list[str] | None = None
    for attempt in range(100):
        try:
            async with asyncio.timeout(0.01 * 1.3**attempt):
                left = await down(instance, ignore)
            break
        except TimeoutError:
            continue
    assert left == []
    assert not data_dir.exists()
    assert [path for path in sockets if path.exists()] == []
    assert await network_traces(instance.name, ids) == []


async def test_down_shims_killed_removes_shim_sockets(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with running_pod(instance):
        sockets = [path for path in shim_sockets(instance, find_ids(instance)) if path.exists()]
    for shim in find_shims(instance):
        os.kill(shim.pid, signal.SIGKILL)
    assert await down(instance, ignore) == []
    assert [path for path in sockets if path.exists()] == []


async def test_down_killed_is_completed_by_next_down(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    async with running_pod(instance):
        pass
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from pykubelet.standalone.instance import Instance\n"
        "from pykubelet.standalone.teardown import down\n"
        "asyncio.run(down(Instance.at(Path(sys.argv[1])), lambda line: print(line, flush=True)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(data_dir)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"Removing 1 pod\n"
        process.kill()
    assert await down(instance, ignore) == []
    assert not data_dir.exists()


async def test_down_running_kubelet_is_stopped(data_dir: Path) -> None:
    with runtime_process(data_dir) as runtime:
        said: list[str] = []
        assert await down(runtime.instance, said.append) == []
        assert said[0] == f"Stopping the agent with pid {runtime.pid}"
    assert not data_dir.exists()


async def test_down_hanging_kubelet_is_killed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubelet.standalone.teardown.KUBELET_GRACE", 0.2)
    with runtime_process(data_dir) as runtime:
        os.kill(runtime.pid, signal.SIGSTOP)
        assert await down(runtime.instance, ignore) == []
    assert not data_dir.exists()


async def test_down_lock_held_raises(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    claim(instance)
    with (
        hold_lock(instance, "down"),
        pytest.raises(EmbeddedError, match=f"already being removed with pid {os.getpid()}"),
    ):
        await down(instance, ignore)
    with hold_lock(instance, "up"), pytest.raises(EmbeddedError, match="this process itself runs on"):
        await down(instance, ignore)


async def test_down_foreign_directory_is_untouched(data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "thesis.tex").write_text("years of work")
    with pytest.raises(DirectoryError, match="was not made by pykubelet"):
        await down(Instance.at(data_dir), ignore)
    assert (data_dir / "thesis.tex").read_text() == "years of work"


async def test_down_missing_or_empty_directory_is_noop(data_dir: Path) -> None:
    assert await down(Instance.at(data_dir), ignore) == []
    data_dir.mkdir()
    assert await down(Instance.at(data_dir), ignore) == []
    assert data_dir.is_dir(), "an empty directory is not ours to remove"
    data_dir.rmdir()


async def test_down_bind_mount_inside_keeps_mounted_files(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    claim(instance)
    precious = data_dir.parent / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    inside = instance.kubelet_root / "pods" / "uid" / "volumes" / "it's mine"
    inside.mkdir(parents=True)
    for _ in range(2):
        subprocess.run(["mount", "--bind", str(precious), str(inside)], check=True)
    with (inside / "file").open():
        # Even while it is busy.
        assert await down(instance, ignore) == []
    assert (precious / "file").read_text() == "kept"
    assert not data_dir.exists()


async def test_down_data_dir_mount_point_is_emptied_not_removed(data_dir: Path) -> None:
    data_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(data_dir)], check=True)
    try:
        (data_dir / "lost+found").mkdir()
        instance = Instance.at(data_dir)
        assert claim(instance)
        assert await down(instance, ignore) == []
        assert [path.name for path in data_dir.iterdir()] == ["lost+found"]
    finally:
        subprocess.run(["umount", str(data_dir)], check=True)


async def test_down_other_instance_running_is_untouched(
    private_runtime: RunningRuntime, data_dir: Path
) -> None:
    port = free_port()
    async with connected(private_runtime.endpoint) as cri:
        pod = await start_pod(
            cri, private_runtime.instance, private_runtime.busybox_image, *SERVER, host_port=port
        )
        # What begins its command is not there for long.
        assert await asyncio.to_thread(fetch, port) == "hello"
        instance = Instance.at(data_dir)
        async with running_pod(instance):
            pass
        before = await leftovers(private_runtime.instance)
        assert await down(instance, ignore) == []
        assert await leftovers(private_runtime.instance) == before
        assert await asyncio.to_thread(fetch, port) == "hello"
        assert len(find_shims(private_runtime.instance)) >= 1
        await cri.runtime.remove_pod_sandbox(pod.sandbox)


async def test_down_after_interrupted_down_removes_chains_of_recorded_sandboxes(
    private_runtime: RunningRuntime, data_dir: Path
) -> None:
    """Verify that an empty chain goes although the interrupted `down` removed all files of its sandbox."""
    # The other runtime on this host keeps `down` from removing empty chains of unknown sandboxes.
    instance, sandbox = Instance.at(data_dir), "f" * 64
    claim(instance)
    kept = State(
        boot_id=boot_id(),
        subnet="10.85.77.0/24",
        snapshotter="native",
        found_paths=[],
        found_chains=[],
        removing=[sandbox],
    )
    save_state(instance, kept)
    chain = min(chains_of(instance.name, [sandbox]))
    subprocess.run(["iptables", "--wait", "5", "-t", "nat", "-N", chain], check=True)
    assert await down(instance, ignore) == []
    assert await network_traces(instance.name, [sandbox]) == []


async def test_down_kills_cni_plugin_that_outlived_containerd() -> None:
    """Verify that a plugin of the instance is found by its environment, with what it has started."""
    sandbox = "e" * 64
    environ = {**os.environ, "CNI_CONTAINERID": sandbox}
    with subprocess.Popen(["sleep", "60"], env=environ) as plugin:
        try:
            assert [process.pid for process in find_cni_plugins({sandbox})] == [plugin.pid]
            assert find_cni_plugins({"d" * 64}) == []
        finally:
            plugin.kill()
