"""The number that a container's next start gets: one that never ran gives its own back."""

from pathlib import Path

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import StartError
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer
from pykubelet.transport.errors import CriError, NotFound
from tests.support.containers import make_container
from tests.unit.kuberuntime.starting import start

RAN = pb.ContainerStatus(id="old", state=pb.CONTAINER_EXITED, started_at=1, finished_at=2, exit_code=137)
NEVER_RAN = pb.ContainerStatus(id="old", state=pb.CONTAINER_EXITED, finished_at=2, exit_code=255)


class Runtime:
    """A runtime that has one old container, or has lost it, and keeps what it is asked for."""

    def __init__(self, old: pb.ContainerStatus | None) -> None:
        self._old = old
        self.removed: list[str] = []
        self.attempts: list[int] = []

    async def pod_sandbox_status(self, sandbox_id: str) -> pb.PodSandboxStatusResponse:
        return pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id=sandbox_id))

    async def container_status(self, _: str) -> pb.ContainerStatusResponse:
        if self._old is None:
            raise NotFound("ContainerStatus", "NotFound", "no such container")
        return pb.ContainerStatusResponse(status=self._old)

    async def remove_container(self, container_id: str) -> None:
        self.removed.append(container_id)

    async def create_container(self, _: str, config: pb.ContainerConfig, *__: object) -> str:
        self.attempts.append(config.metadata.attempt)
        return "new"

    async def start_container(self, _: str) -> None:
        pass


async def start_again(root: Path, runtime: Runtime, phase: ContainerPhase) -> None:
    """Start a container whose third incarnation was seen in this phase."""
    container = make_container()
    last = ObservedContainer(id="old", name=container.name, phase=phase, attempt=2, restart_count=2)
    await start(root, runtime, RuntimeNodeOptions(pod_logs_dir=str(root / "logs")), container, last=last)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """The folder with the container's three logs, all empty."""
    folder = tmp_path / "logs/shop_web_u-1/main"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.log").touch()
    return folder


@pytest.mark.parametrize(
    ("phase", "then", "attempt", "removed"),
    [
        ("exited", RAN, 3, []),
        ("created", NEVER_RAN, 2, ["old"]),
        ("unknown", RAN, 3, []),
        ("unknown", NEVER_RAN, 2, ["old"]),  # the runtime was killed in the middle of its start
        ("unknown", None, 3, []),
    ],
)
async def test_start_container_never_ran_reuses_attempt_number(
    tmp_path: Path,
    logs: Path,
    phase: ContainerPhase,
    then: pb.ContainerStatus | None,
    attempt: int,
    removed: list[str],
) -> None:
    runtime = Runtime(then)
    await start_again(tmp_path, runtime, phase)
    assert (runtime.attempts, runtime.removed) == ([attempt], removed)
    # The log of one that never ran must not count as a run, should the agent be killed before the next start.
    assert sorted(path.name for path in logs.iterdir()) == [f"{number}.log" for number in range(attempt)]


async def test_start_container_never_ran_nonempty_log_stays(tmp_path: Path, logs: Path) -> None:
    (logs / "2.log").write_text("words")
    await start_again(tmp_path, Runtime(NEVER_RAN), "created")
    assert (logs / "2.log").read_text() == "words"


async def test_start_container_removal_of_old_fails_log_stays(tmp_path: Path, logs: Path) -> None:
    """The earlier agent's start may still succeed, and write there."""

    class Starting(Runtime):
        async def remove_container(self, container_id: str) -> None:
            raise CriError("RemoveContainer", "Unknown", "container is in starting state, can't be removed")

    with pytest.raises(StartError) as caught:
        await start_again(tmp_path, Starting(NEVER_RAN), "created")
    assert caught.value.reason == "CreateContainerError"
    assert (logs / "2.log").exists()
