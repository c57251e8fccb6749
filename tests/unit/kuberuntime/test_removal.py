"""Removing a container of a pod that goes on takes the link to its log along."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.kuberuntime.observed import ObservedContainer
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.transport.errors import CriError, NotFound
from tests.support.pods import make_pod

POD = make_pod()
EXITED = ObservedContainer(id="c1", name="side", phase="exited")


def remover(links: Path | None, removed: list[str], error: CriError | None = None) -> ContainerRemover:
    async def remove_container(container_id: str) -> None:
        if error is not None:
            raise error
        assert links is None or not link_in(links).is_symlink(), "a kubelet killed here would leave the link"
        removed.append(container_id)

    cri: Any = SimpleNamespace(runtime=SimpleNamespace(remove_container=remove_container))
    return ContainerRemover(cri, links)


def link_in(links: Path) -> Path:
    return links / f"{POD.metadata.name}_{POD.metadata.namespace}_side-c1.log"


@pytest.fixture
def links(tmp_path: Path) -> Path:
    log_file = tmp_path / "pods/0.log"
    log_file.parent.mkdir()
    log_file.write_text("kept, because it counts as a restart\n")
    directory = tmp_path / "containers"
    directory.mkdir()
    link_in(directory).symlink_to(log_file)
    (directory / "another.log").symlink_to(log_file)
    return directory


async def test_container_remover_link_removed_first_log_stays(links: Path) -> None:
    removed: list[str] = []
    await remover(links, removed).remove(POD, EXITED)
    assert removed == ["c1"]
    assert [path.name for path in links.iterdir()] == ["another.log"]
    assert (links.parent / "pods/0.log").exists()


async def test_container_remover_failed_removal_is_retried(links: Path) -> None:
    removed: list[str] = []
    with pytest.raises(CriError, match="stuck"):
        await remover(links, removed, CriError("RemoveContainer", "Unknown", "stuck")).remove(POD, EXITED)
    await remover(links, removed).remove(POD, EXITED)
    assert removed == ["c1"]


async def test_container_remover_link_removal_fails_container_removed(links: Path) -> None:
    link_in(links).unlink()
    link_in(links).mkdir()
    removed: list[str] = []
    await remover(links, removed).remove(POD, EXITED)
    assert removed == ["c1"]


async def test_container_remover_container_gone_or_no_links_succeeds() -> None:
    removed: list[str] = []
    await remover(None, removed, NotFound("RemoveContainer", "NotFound", "gone")).remove(POD, EXITED)
    await remover(None, removed).remove(POD, EXITED)
    assert removed == ["c1"]
