"""An agent that is killed while it mounts, writes and unmounts; another one goes on."""

import contextlib
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.mounts import read_mounts
from tests.support.volume_programs import loops_left
from tests.support.volumes import Server, Shelf, needs_root, pod_with, volumes_at

KILLS = 8
MOUNTED = ("config", "disk", "memory", "secret", "info", "all", "folder")


def the_shelf() -> Shelf:
    return Shelf(config_maps={"c": {"a": "1", "b/c": "2"}}, secrets={"s": {"a": b"1"}})


def the_server(root: Path) -> Server:
    """A cluster with a folder and a file of this machine, as a volume and as a disk."""
    server = Server()
    folder, disk = root.parent / "local", root.parent / "disk"
    folder.mkdir(exist_ok=True)
    if not disk.exists():
        disk.write_bytes(bytes(1 << 20))
    server.claim("folder", "folder-pv")
    server.volume("folder-pv", "folder", local={"path": str(folder)}, mountOptions=["noexec"])
    server.claim("disk", "disk-pv")
    server.volume("disk-pv", "disk", local={"path": str(disk)}, volumeMode="Block")
    return server


def the_pod() -> Pod:
    items = [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]
    return pod_with(
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "config", "configMap": {"name": "c", "items": [{"key": "a", "path": "x/y"}]}},
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "info", "downwardAPI": {"items": items}},
        {"name": "all", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        {"name": "folder", "persistentVolumeClaim": {"claimName": "folder", "readOnly": True}},
        {"name": "block", "persistentVolumeClaim": {"claimName": "disk"}},
        containers=[
            {
                "name": "main",
                "image": "i",
                "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in MOUNTED],
                "volumeDevices": [{"name": "block", "devicePath": "/dev/x"}],
            }
        ],
        securityContext={"fsGroup": 2000},
    )


PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.support.volumes import volumes_at
from tests.machine.volumes.test_kills import the_pod, the_server, the_shelf

async def main():
    shelf = the_shelf()
    root = Path(sys.argv[1])
    volumes, pod = volumes_at(root, shelf, server=the_server(root)), the_pod()
    print("ready", flush=True)
    while True:
        mounted = await volumes.mount(pod)
        await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "x/y"})
        shelf.generation += 1
        shelf.config_maps["c"]["a"] += "1"
        await volumes.refresh(pod)
        await volumes.unmount(pod.uid)

asyncio.run(main())
"""


@pytest.mark.machine
@needs_root
async def test_pod_volumes_kubelet_process_killed_next_one_recovers(root: Path) -> None:
    chance = random.Random(5)
    seen = set[int]()
    for attempt in range(4 * KILLS):
        if attempt >= KILLS and len(seen) > 1:
            break
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, root], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        ) as agent:
            try:
                assert agent.stdout is not None
                assert agent.stdout.readline() == b"ready\n"
                time.sleep(chance.uniform(0, 0.25) * (1 + attempt // KILLS))
            finally:
                agent.send_signal(signal.SIGKILL)
        seen.add(len(read_mounts(root.resolve())))
        volumes, pod = volumes_at(root, the_shelf(), server=the_server(root)), the_pod()
        if chance.random() < 0.5:
            mounted = await volumes.mount(pod)
            bound = read_mounts((root / "pods/u-1/volumes").resolve())
            assert len(bound) == 5
            (folder,) = (mount for mount in bound if mount.point.name == "folder-pv")
            assert {"ro", "noexec"} <= folder.options
            assert stat.S_ISBLK(Path(mounted["block"].device).stat().st_mode)
            assert Path(mounted["config"].path, "x/y").read_text() == "1"
            assert Path(mounted["all"].path, "token").read_text() == "p//3600/1"
            for name in ("config", "all", "secret"):
                hidden = [path for path in Path(mounted[name].path).iterdir() if path.name.startswith("..")]
                assert len(hidden) == 2, "no half-written versions"
            parts = await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "x/y"})
            assert Path(parts[0]).read_text() == "1"
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
        assert loops_left(root.parent) == []
        with contextlib.suppress(FileNotFoundError):
            assert {path.name for path in (root / "pods/u-1").rglob("*")} <= {"volumes", "plugins"}
    assert len(seen) > 1, "the kills met different moments"
