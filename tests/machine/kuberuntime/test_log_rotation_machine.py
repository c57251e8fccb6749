"""Rotation of a real container's log, read and followed through the API while it is rotated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path

import pytest

from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.log_rotation.manager import ContainerLogManager
from pykubelet.kuberuntime.log_rotation.plan import RotationPolicy
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod
from pykubelet.server.logs.log_files import LineWriter, LogFile, follow_blocks, present_blocks
from pykubelet.util.tasks import TaskScope
from tests.support.cri_pods import connected, shell, start_pod
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

LINES = 600_000
WRITER = f"until [ -e /go ]; do sleep 0.05; done; seq 1 {LINES}; touch /done; sleep 1000"
POLICY = RotationPolicy(max_size=2 * 2**20, max_files=4)


class Container:
    """A real container and the manager of its log."""

    def __init__(self, cri: RuntimeConnection, container_id: str, path: Path, root: Path) -> None:
        self.cri = cri
        self.path = path
        self.readers = LogReaders()
        self._container_id = container_id
        self._pods: list[ObservedPod] = []
        self.set_phase("running")
        self.manager = ContainerLogManager(
            cri.runtime.reopen_container_log,
            lambda: self._pods,
            root,
            POLICY,
            self.readers,
            workers=1,
            interval=3.0,
        )

    def set_phase(self, phase: ContainerPhase) -> None:
        container = ObservedContainer(id=self._container_id, name="c", phase=phase, log_path=str(self.path))
        self._pods = [ObservedPod(uid="u", containers=(container,))]

    def sizes(self) -> dict[str, int]:
        found = {}
        for path in self.path.parent.iterdir():
            try:
                found[path.name] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found


@asynccontextmanager
async def started(runtime: RunningRuntime) -> AsyncIterator[tuple[Container, object]]:
    async with connected(runtime.endpoint) as cri:
        pod = await start_pod(cri, runtime.instance, runtime.busybox_image, "sh", "-c", WRITER)
        try:
            status = (await cri.runtime.container_status(pod.container)).status
            container = Container(cri, pod.container, Path(status.log_path), runtime.instance.pod_logs)
            async with TaskScope() as scope:
                scope.start(container.manager.run(), name="manager")
                yield container, pod
        finally:
            await cri.runtime.stop_pod_sandbox(pod.sandbox)
            await cri.runtime.remove_pod_sandbox(pod.sandbox)


async def follow_all(container: Container) -> list[int]:
    """Follow the log until its last line; returns the numbers of its lines."""
    # The runtime may split a line between two files, as a partial entry.
    writer, output, last = LineWriter(), bytearray(), f"\n{LINES}\n".encode()

    async def may_grow() -> bool:
        return not output.endswith(last)

    with (
        container.readers.reading(str(container.path)) as reader,
        closing(LogFile(container.path)) as log,
    ):
        async with aclosing(follow_blocks(log, may_grow, reader.on_file)) as blocks:
            async for block in blocks:
                output += b"".join(writer.texts(block))
    return [int(line) for line in output.split()]


async def test_manager_fast_writer_follower_reads_each_line_once_within_bound(
    private_runtime: RunningRuntime,
) -> None:
    async with started(private_runtime) as (container, pod):
        following = asyncio.create_task(follow_all(container))
        await asyncio.sleep(0)
        await shell(container.cri, pod, "touch /go")  # type: ignore[arg-type]
        largest, names = 0, set[str]()
        async with asyncio.timeout(120):
            while not following.done():
                sizes = container.sizes()
                largest, names = max(largest, sum(sizes.values())), names | sizes.keys()
                await asyncio.sleep(0.02)
        found = await following
        assert len(found) == LINES
        assert found == list(range(1, LINES + 1))
        # More than are kept: how many there are depends on the speed of writer and manager.
        assert len({name.removesuffix(".gz") for name in names}) > POLICY.max_files, names
        # The first file may be a second late; the follower holds what it has not read.
        print(f"largest total {largest / 2**20:.1f} MiB of {POLICY.max_rotated_bytes / 2**20:.1f}")
        assert largest < 5 * POLICY.max_rotated_bytes

        # The others are compressed within two intervals, in place, and still readable as one stream.
        def is_compressed() -> bool:
            rotated = sorted(name for name in container.sizes() if name != "0.log")
            # A file that was rotated late is so large that a third one is removed for the limit in bytes.
            forms = [name.endswith(".gz") for name in rotated]
            return len(forms) in (2, 3) and all(forms[:-1]) and not forms[-1]

        async with asyncio.timeout(60):
            while not is_compressed():
                await asyncio.sleep(0.05)
        assert sum(container.sizes().values()) <= POLICY.max_rotated_bytes + POLICY.max_size
        with closing(LogFile(container.path)) as log:
            files = [*log.older(since=0), log]
            writer, output = LineWriter(), bytearray()
            for file in files:
                async for block in present_blocks(file):
                    output += b"".join(writer.texts(block))
            for file in files:
                file.close()
        # The first line may be the end of one that started in a file that was removed.
        numbers = [int(line) for line in output.split()[1:]]
        assert numbers == list(range(numbers[0], LINES + 1))
        assert len(numbers) > 50_000


async def test_manager_log_renamed_by_killed_kubelet_reopened(private_runtime: RunningRuntime) -> None:
    async with started(private_runtime) as (container, pod):
        container.path.rename(container.path.with_name("0.log.20260102-030405"))
        async with asyncio.timeout(30):
            while not container.path.exists():
                await asyncio.sleep(0.02)
        await shell(container.cri, pod, "touch /go")  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while not container.path.stat().st_size:
                await asyncio.sleep(0.02)
