"""The facts of the page, from the parts of a kubelet."""

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.page import NodePage
from pykubelet.cli.node import doctor
from pykubelet.cli.node.doctor import (
    DoctorContext,
    Finding,
    Status,
    evaluate_clock,
    evaluate_kernel_defaults,
    evaluate_swap,
    examine,
)
from pykubelet.cli.process import host_problems
from pykubelet.config.types import KubeletConfiguration
from pykubelet.images.image_gc import ImageGCError, ImageGCPolicy
from pykubelet.linux.host_info import ClockState
from pykubelet.linux.kernel import SwapArea
from pykubelet.server.page.facts import HostFinding
from pykubelet.server.page.node_view import node_problems
from tests.unit.images.test_image_gc import Rig as ImageRig
from tests.unit.images.test_image_gc import listed


class Images:
    """Image garbage collection that a test makes fail."""

    policy = ImageGCPolicy()
    records: tuple[()] = ()
    activity = ""
    listed_at: float | None = None

    def __init__(self) -> None:
        self.calls = 0
        self.error: ImageGCError | None = None

    async def detect(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


async def nothing(*_: object, **__: object) -> None:
    return None


def parts_of(root: Path, config: KubeletConfiguration) -> Any:
    """Return the dependencies of a page without pods."""
    return SimpleNamespace(
        settings=SimpleNamespace(flags=SimpleNamespace(root_dir=str(root)), node_name="n1", config=config),
        reloader=SimpleNamespace(config=config),
        started=datetime.now(UTC),
        registry=CollectorRegistry(),
        checks={"ping": lambda: None},
        runtime_checks={},
        host_problems=list,
        eviction=SimpleNamespace(report=nothing),
        images=SimpleNamespace(pulls=list),
        image_gc=Images(),
        engine=SimpleNamespace(pods=list),
        statistics=SimpleNamespace(
            collector=SimpleNamespace(record=lambda path: None),
            host_filesystems=SimpleNamespace(of_directory=nothing),
            latest_storage=dict,
            runtime=SimpleNamespace(
                latest_layers=dict, image_filesystems=lambda: _done(SimpleNamespace(images=None))
            ),
        ),
    )


async def _done(value: object) -> object:
    return value


async def test_node_after_reload_has_reservations_and_capacity_of_new_configuration(tmp_path: Path) -> None:
    config = KubeletConfiguration(kube_reserved={"cpu": "100m"}, max_pods=10)
    parts = parts_of(tmp_path, config)
    page = NodePage(parts, None, lambda: 0)
    node = await page.node()
    assert (node.reserved_cores, node.max_pods) == (0.1, 10)
    parts.reloader.config = KubeletConfiguration(kube_reserved={"cpu": "300m", "memory": "1Gi"}, max_pods=20)
    node = await page.node()
    assert (node.reserved_cores, node.reserved_memory, node.max_pods) == (0.3, 1 << 30, 20)


async def test_node_while_runtime_is_down_names_it(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, KubeletConfiguration())
    problem: list[str] = []
    parts.runtime_checks["container runtime"] = lambda: "; ".join(problem) or None
    page = NodePage(parts, None, lambda: 0)
    assert node_problems(await page.node()) == []
    problem.append("connection refused")
    assert node_problems(await page.node()) == ["container runtime: connection refused"]


async def test_node_has_findings_of_doctor_about_the_host_cached(tmp_path: Path) -> None:
    parts, calls = parts_of(tmp_path, KubeletConfiguration()), []

    def examine() -> list[HostFinding]:
        calls.append(threading.current_thread())
        return [HostFinding("swap", "on", "swapoff -a")]

    parts.host_problems = examine
    page = NodePage(parts, None, lambda: 0)
    for _ in range(3):
        assert (await page.node()).host_problems == [HostFinding("swap", "on", "swapoff -a")]
    assert len(calls) == 1
    assert calls[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("fail_swap_on", "protect_kernel_defaults", "expected"),
    [
        (False, False, {"clock"}),
        (True, False, {"swap", "clock"}),
        (False, True, {"kernel settings", "clock"}),
    ],
)
async def test_node_has_only_findings_that_its_configuration_requires(
    tmp_path: Path, fail_swap_on: bool, protect_kernel_defaults: bool, expected: set[str]
) -> None:
    config = KubeletConfiguration(fail_swap_on=fail_swap_on, protect_kernel_defaults=protect_kernel_defaults)
    parts = parts_of(tmp_path, config)
    swap = SwapArea("/swap", "file", 1024, 0, -2)
    found = [
        *evaluate_swap([swap]),
        *evaluate_kernel_defaults({"vm/panic_on_oom": (0, 1)}),
        *evaluate_clock(ClockState(synchronised=False, max_error_seconds=1.0)),
    ]
    parts.host_problems = lambda: found
    page = NodePage(parts, None, lambda: 0)
    assert {each.area for each in (await page.node()).host_problems} == expected


def test_host_problems_are_those_of_doctor() -> None:
    expected = {
        finding.area for finding in examine(DoctorContext(Path("/"))) if finding.status is not Status.OK
    }
    found = host_problems()
    assert {problem.area for problem in found} <= expected
    assert all(problem.remedy for problem in found)


def test_host_problems_are_all_findings_that_are_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("area", status, status.value, "remedy") for status in Status]
    monkeypatch.setattr(doctor, "RUNNING_HOST_CHECKS", (lambda _: found,))
    assert [problem.what for problem in host_problems()] == [Status.WARN.value, Status.FAIL.value]


async def test_images_are_listed_when_older_than_ten_seconds_and_failure_is_reported(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, KubeletConfiguration())
    gc = cast("Images", parts.image_gc)
    page = NodePage(parts, None, lambda: 0)
    for _ in range(3):
        assert (await page.images()).problem == ""
    assert gc.calls == 1
    page._images_time -= 11
    gc.error = ImageGCError("connection refused")
    assert (await page.images()).problem == "connection refused"
    page._images_time = asyncio.get_running_loop().time() - 11
    gc.error = None
    assert (await page.images()).problem == ""
    assert gc.calls == 3


@pytest.mark.looptime
async def test_images_during_a_removal_are_those_of_the_last_list_without_delay(tmp_path: Path) -> None:
    loop, rig = asyncio.get_running_loop(), ImageRig()
    rig.add(listed("a", 10))
    parts = parts_of(tmp_path, KubeletConfiguration())
    parts.image_gc = rig.gc
    page = NodePage(parts, None, lambda: 0)
    facts = await page.images()
    assert (len(facts.images), facts.problem, facts.waits_for) == (1, "", "")
    await asyncio.sleep(11)
    rig.images.remove_seconds = 60.0
    collection = asyncio.create_task(rig.gc.delete_unused_images())
    await asyncio.sleep(20)
    before = loop.time()
    facts = await page.images()
    assert loop.time() == before
    assert (len(facts.images), facts.problem) == (1, "")
    assert facts.waits_for == "unused images are being removed"
    assert facts.listed_at == before - 20
    await collection
    facts = await page.images()
    assert (len(facts.images), facts.waits_for) == (0, "")
