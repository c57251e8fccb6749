"""A container with a process that CRI does not know of, as a cut-off start can leave it, is removed."""

import subprocess
from pathlib import Path

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.removal import remove_container
from pykubelet.transport.errors import CriError
from tests.support.cri_pods import connected, container_pid, start_pod
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


async def test_remove_container_process_unknown_to_cri_is_killed(
    private_runtime: RunningRuntime, tmp_path: Path
) -> None:
    ctr = ["ctr", "--address", str(private_runtime.instance.socket), "--namespace", "k8s.io"]
    async with connected(private_runtime.endpoint) as cri:
        pod = await start_pod(cri, private_runtime.instance, private_runtime.busybox_image, "sleep", "3600")
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name="lost"),
            image=pb.ImageSpec(image=private_runtime.busybox_image),
            command=["sleep", "3600"],
            log_path="lost/0.log",
        )
        box = (await cri.runtime.pod_sandbox_status(pod.sandbox)).status
        sandbox = pb.PodSandboxConfig(metadata=box.metadata, log_directory="/tmp")
        lost = await cri.runtime.create_container(pod.sandbox, config, sandbox)
        # A process that the container's CRI state does not know of: by another door than CRI.
        start = ["tasks", "start", "--detach", "--fifo-dir", str(tmp_path), lost]
        subprocess.run([*ctr, *start], check=True, capture_output=True)
        (line,) = (line for line in _tasks(ctr) if lost in line)
        pid = int(line.split()[1])
        with pytest.raises(CriError, match="cannot delete running task"):
            await cri.runtime.remove_container(lost)
        other = await container_pid(cri, pod)
        await remove_container(cri, lost)
        assert not Path(f"/proc/{pid}").exists()
        assert not [line for line in _tasks(ctr) if lost in line]
        assert lost not in [one.id for one in await cri.runtime.list_containers()]
        # Its neighbour lives, and removing what is gone is fine.
        assert Path(f"/proc/{other}").exists()
        await remove_container(cri, lost)
        await cri.runtime.stop_pod_sandbox(pod.sandbox)
        await cri.runtime.remove_pod_sandbox(pod.sandbox)


def _tasks(ctr: list[str]) -> list[str]:
    done = subprocess.run([*ctr, "tasks", "list"], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
