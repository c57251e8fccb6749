"""Image garbage collection as the kubelet builds it, with a scripted runtime."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.images import KeptImages, build_image_gc, build_image_manager
from pykubelet.config.load import load
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.images.image_gc import ImageGCError
from pykubelet.images.pull_records import ImagePullCredentials, ImagePulledRecord, PullRecordFiles
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE, PAUSE_IMAGE
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope
from tests.support.cri import cri, folder, metrics, registry, scripted
from tests.support.cri_servers import Refuse, Runtime

__all__ = ["cri", "folder", "metrics", "registry", "scripted"]
EARLY = datetime(2020, 1, 1, tzinfo=UTC)
SEEDS = {PAUSE_IMAGE, BUSYBOX_IMAGE}


@pytest.fixture
async def tasks() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


def status(config: str) -> pb.StatusResponse:
    ready = [pb.RuntimeCondition(type=name, status=True) for name in ("RuntimeReady", "NetworkReady")]
    return pb.StatusResponse(status=pb.RuntimeStatus(conditions=ready), info={"config": config})


@pytest.mark.parametrize(
    ("config", "sandbox_info", "expected"),
    [
        (json.dumps({"sandboxImage": "example.org/pause:3"}), "", "example.org/pause:3"),
        (
            json.dumps({"sandboxImage": ""}),
            json.dumps({"image": "example.org/pause:4"}),
            "example.org/pause:4",
        ),
        ("{}", json.dumps({"image": ["no text"]}), ""),
        ("[]", "{}", ""),
        ("", "", ""),
    ],
    ids=["configuration", "sandbox", "bad field", "bad object", "unknown"],
)
async def test_find_sandbox_image_runtime_information_is_searched(
    scripted: Runtime, cri: RuntimeConnection, config: str, sandbox_info: str, expected: str
) -> None:
    box = pb.PodSandbox(id="box", metadata=pb.PodSandboxMetadata(name="p", uid="u", namespace="n"))
    scripted.answers["Status"] = status(config)
    scripted.answers["ListPodSandbox"] = pb.ListPodSandboxResponse(items=[box])
    scripted.answers["PodSandboxStatus"] = pb.PodSandboxStatusResponse(
        status=pb.PodSandboxStatus(id="box", metadata=box.metadata, created_at=1),
        info={"info": sandbox_info},
    )
    assert await KeptImages(cri).find_sandbox_image() == expected


@pytest.mark.parametrize("config", ["{", "{}"])
async def test_kept_names_without_information_keep_last_known_sandbox_image(
    scripted: Runtime, cri: RuntimeConnection, config: str
) -> None:
    kept = KeptImages(cri)
    scripted.answers["Status"] = status(config)
    assert await kept.names() == SEEDS
    scripted.answers["Status"] = status(json.dumps({"sandboxImage": "example.org/pause:3"}))
    assert await kept.names() == {*SEEDS, "example.org/pause:3"}
    scripted.answers["Status"] = status(config)
    assert await kept.names() == {*SEEDS, "example.org/pause:3"}


@pytest.mark.parametrize(
    ("image", "kept"),
    [
        ("pause:3", {"pause:3", "docker.io/library/pause:3"}),
        ("sha256:" + "a" * 64, {"sha256:" + "a" * 64}),
        ("Not a name", {"Not a name"}),
    ],
)
async def test_kept_names_sandbox_image_has_every_spelling(
    scripted: Runtime, cri: RuntimeConnection, image: str, kept: set[str]
) -> None:
    scripted.answers["Status"] = status(json.dumps({"sandboxImage": image}))
    assert await KeptImages(cri).names() >= {*SEEDS, *kept}


async def test_kept_names_runtime_down_raises_until_sandbox_image_is_known(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    kept = KeptImages(cri)
    scripted.answers["Status"] = Refuse("UNAVAILABLE", "down")
    with pytest.raises(CriError, match="down"):
        await kept.names()
    scripted.answers["Status"] = status(json.dumps({"sandboxImage": "example.org/pause:3"}))
    await kept.names()
    scripted.answers["Status"] = Refuse("UNAVAILABLE", "down")
    assert await kept.names() == {*SEEDS, "example.org/pause:3"}


def listed(name: str, size: int, handler: str = "") -> pb.Image:
    return pb.Image(
        id=f"sha256:{name}",
        repo_tags=[f"registry/{name}:1"],
        size=size,
        spec=pb.ImageSpec(runtime_handler=handler),
    )


@pytest.mark.parametrize("by_handler", [False, True])
async def test_build_image_gc_settings_and_file_system_of_the_runtime_are_used(
    scripted: Runtime,
    cri: RuntimeConnection,
    registry: CollectorRegistry,
    tasks: TaskScope,
    tmp_path: Path,
    by_handler: bool,
) -> None:
    """Verify that the sandbox image stays, that pull records are pruned, and that failures are events."""
    file = tmp_path / "config.json"
    document = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "imageMinimumGCAge": "1ns",
        # Every file system is above them.
        "imageGCHighThresholdPercent": 1,
        "imageGCLowThresholdPercent": 0,
        "featureGates": {"RuntimeClassInImageCriApi": by_handler},
    }
    file.write_text(json.dumps(document))
    loaded = load([f"--config={file}", f"--root-dir={tmp_path}"])
    settings = AgentSettings(loaded.flags, loaded.config, loaded.gates, "n1")
    assert not [line for line in loaded.warnings if "has no effect" in line or "have no effect" in line]
    records = PullRecordFiles(tmp_path)
    records.prepare()
    for name in ("a", "pause"):
        known = {f"registry/{name}": ImagePullCredentials(node_pods_accessible=True)}
        records.write_pulled(ImagePulledRecord(f"sha256:{name}", EARLY, known))
    scripted.answers["Status"] = status(json.dumps({"sandboxImage": "registry/pause:1"}))
    scripted.answers["ListImages"] = pb.ListImagesResponse(
        images=[listed("a", 10, handler="vm"), listed("pause", 10)]
    )
    fs = pb.FilesystemUsage(fs_id=pb.FilesystemIdentifier(mountpoint=str(tmp_path)))
    scripted.answers["ImageFsInfo"] = pb.ImageFsInfoResponse(image_filesystems=[fs])
    events: list[str] = []
    images = await build_image_manager(settings, cri, PodHistory(), None, registry, tasks)
    collector = build_image_gc(
        settings,
        cri,
        images,
        Filesystems(tmp_path, tasks),
        lambda kind, reason, message: events.append(reason),
        registry,
    )
    await collector.detect()
    with pytest.raises(ImageGCError, match=r"Insufficient free disk space .* \(freed 10 bytes\)"):
        await collector.collect()
    removed = [seen.request for seen in scripted.seen if seen.method == "RemoveImage"]
    assert removed == [
        pb.RemoveImageRequest(
            image=pb.ImageSpec(image="sha256:a", runtime_handler="vm" if by_handler else "")
        )
    ]
    assert events == ["FreeDiskSpaceFailed"]
    assert records.get_pulled("sha256:a") is None
    assert records.get_pulled("sha256:pause") is not None
    name = "kubelet_image_garbage_collected_total"
    assert registry.get_sample_value(name, {"reason": "space"}) == 1
