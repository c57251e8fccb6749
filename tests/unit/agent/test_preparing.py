"""What a node finds out before it starts: which cgroups there are, and which driver the runtime uses."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.agent.host_setup import StartupError, check_machine, take_cgroup_driver
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.runtime_pb2 import CGROUPFS, SYSTEMD, LinuxRuntimeConfiguration, RuntimeConfigResponse
from pykubelet.linux import cgroupfs as cgroups
from pykubelet.transport.errors import CriError, Unavailable, Unimplemented

Answer = RuntimeConfigResponse | CriError


def tells(driver: Any) -> RuntimeConfigResponse:
    return RuntimeConfigResponse(linux=LinuxRuntimeConfiguration(cgroup_driver=driver))


UNKNOWN = Unimplemented("RuntimeConfig", "Unimplemented", "unknown method")
AWAY = Unavailable("RuntimeConfig", "Unavailable", "not yet")


async def taken(configured: str, *answers: Answer) -> str:
    script = list(answers)

    async def runtime_config() -> RuntimeConfigResponse:
        answer = script.pop(0)
        if isinstance(answer, CriError):
            raise answer
        return answer

    cri: Any = SimpleNamespace(runtime=SimpleNamespace(runtime_config=runtime_config))
    config = KubeletConfiguration(cgroup_driver=configured)
    await take_cgroup_driver(cri, config, FeatureGates())
    assert not script
    return config.cgroup_driver


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("configured", "answers", "expected"),
    [
        ("cgroupfs", [tells(SYSTEMD)], "systemd"),
        ("systemd", [tells(CGROUPFS)], "cgroupfs"),
        ("cgroupfs", [tells(CGROUPFS)], "cgroupfs"),
        ("systemd", [UNKNOWN], "systemd"),
        # An answer without anything in it says nothing about drivers.
        ("cgroupfs", [RuntimeConfigResponse()], "cgroupfs"),
        ("cgroupfs", [AWAY, tells(SYSTEMD)], "systemd"),
        ("cgroupfs", [AWAY, UNKNOWN], "cgroupfs"),
    ],
)
async def test_take_cgroup_driver_runtime_config_overrides_configuration(
    configured: str, answers: list[Answer], expected: str
) -> None:
    assert await taken(configured, *answers) == expected


@pytest.mark.looptime
async def test_take_cgroup_driver_runtime_unavailable_or_unknown_raises_startup_error() -> None:
    with pytest.raises(StartupError, match=r"cannot query the container runtime .*code = Unavailable"):
        await taken("cgroupfs", AWAY, AWAY, AWAY)
    assert asyncio.get_running_loop().time() >= 4
    with pytest.raises(StartupError, match=r"unknown cgroup driver \(7\)"):
        await taken("cgroupfs", tells(7))


def test_check_machine_cgroups_missing_raises_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/sys/fs/cgroup")

    monkeypatch.setattr(cgroups, "detect_cgroups", missing)
    with pytest.raises(StartupError, match=r"'/sys/fs/cgroup': mount /proc and /sys$"):
        check_machine(KubeletConfiguration())
