"""The record of pinned images: changes by several processes, damage, bounds."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.images import KeptImages
from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_gc import DiskUsage, ImageGC, ImageGCError, ImageGCPolicy
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageGCMetrics, ImageMetrics
from pykubelet.images.pins import MAX_NAMES, PinError, PinRecord
from pykubelet.images.puller import PullLimits
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.server.images import PruneReport
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import FakeContainers, FakeImages, an_image


def test_pin_record_changes_are_reported_and_kept(tmp_path: Path) -> None:
    pins = PinRecord(tmp_path)
    assert pins.names() == pins.remove(["a"]) == frozenset()
    assert pins.add(["a", "b"]) == {"a", "b"}
    assert pins.add(["b", "c"]) == {"c"}
    assert PinRecord(tmp_path).remove(["a", "x"]) == {"a"}
    assert PinRecord(tmp_path).names() == {"b", "c"}
    assert stat.S_IMODE(pins.path.stat().st_mode) == 0o600


def test_pin_record_concurrent_changes_lose_nothing(tmp_path: Path) -> None:
    names = [f"image-{number}" for number in range(60)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: PinRecord(tmp_path).add([name]), names))
    assert PinRecord(tmp_path).names() == set(names)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"images": [1]}', b"[" * 100_000, b" " * 2_000_000])
def test_pin_record_damaged_is_one_line_and_stays(tmp_path: Path, content: bytes) -> None:
    pins = PinRecord(tmp_path)
    pins.path.write_bytes(content)
    for change in (pins.names, lambda: pins.add(["a"]), lambda: pins.remove(["a"])):
        with pytest.raises(PinError, match=r"cannot be read: .*remove it and pin the images again") as caught:
            change()
        assert "\n" not in str(caught.value)
    assert pins.path.read_bytes() == content


def test_pin_record_too_many_names_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(PinError, match=f"more than {MAX_NAMES} names"):
        PinRecord(tmp_path).add(f"image-{number}" for number in range(MAX_NAMES + 1))
    with pytest.raises(PinError, match="cannot be changed: No such file"):
        PinRecord(tmp_path / "missing").add(["a"])


class Runtime:
    """The part of a runtime that knows its sandbox image."""

    async def status(self, *, verbose: bool) -> pb.StatusResponse:
        return pb.StatusResponse(info={"config": '{"sandboxImage": "pause"}'})


class Connection:
    runtime = Runtime()


@pytest.mark.looptime
async def test_prune_keeps_pinned_young_and_used_images(
    tmp_path: Path, service: FakeImages, scope: TaskScope, journal: PodHistory, metrics: ImageMetrics
) -> None:
    """Verify the rules of a prune, and that nothing is removed while the record cannot be read."""
    pins, containers = PinRecord(tmp_path), FakeContainers()
    manager = ImageManager(service, journal, scope, limits=PullLimits(), metrics=metrics)

    async def measure(path: Path) -> DiskUsage | None:
        return DiskUsage(100, 50)

    gc = ImageGC(
        service,
        containers,
        manager,
        measure,
        ImageGCPolicy(min_age=Duration.from_seconds(0)),
        lambda *_: None,
        ImageGCMetrics(CollectorRegistry()),
        kept_names=KeptImages(Connection(), pins).names,  # type: ignore[arg-type]  # only status is called
    )
    service.present = {name: an_image(name, size=10) for name in ("pause", "free", "pinned", "used")}
    containers.containers = [pb.Container(id="c", image_id="sha256:used")]
    pins.add(["pinned"])
    dry = await gc.prune(dry_run=True)
    assert ([item.key.id for item in dry.removed], service.removed) == (["sha256:free"], [])

    pins.path.write_text("damaged")
    with pytest.raises(ImageGCError, match="cannot be read"):
        await gc.prune(dry_run=False)
    assert service.removed == []

    pins.path.unlink()
    pins.add(["pinned"])
    gc.set_policy(ImageGCPolicy(min_age=Duration.from_seconds(1000)))
    young = await gc.prune(dry_run=False)
    assert (list(young.removed), young.young) == ([], 1)
    gc.set_policy(ImageGCPolicy(min_age=Duration.from_seconds(0)))
    done = await gc.prune(dry_run=False)
    assert [item.key.id for item in done.removed] == ["sha256:free"]
    assert [spec.image for spec in service.removed] == ["sha256:free"]


def test_prune_lines_name_images_and_bytes() -> None:
    from pykubelet.cli.images.removal import prune_lines
    from pykubelet.server.images import PrunedImage

    report = PruneReport([PrunedImage("sha256:1", ["a:1", "a@x"], 1024)], 1024, 2, "2m0s")
    assert prune_lines(report, dry_run=True) == [
        "Would remove a:1 (1.0 KiB)",
        "1 image, would free 1.0 KiB",
        "2 unused images kept: seen for less than 2m0s (imageMinimumGCAge)",
    ]
    assert prune_lines(PruneReport([], 0, 0, "2m0s"), dry_run=False) == ["No unused images to remove"]
