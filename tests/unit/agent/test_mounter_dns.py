"""resolv.conf of the root directory that `--experimental-mounter-path` mounts in."""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from pykubelet.agent import mounter_dns
from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.live_consumers import prepare_mounter_dns
from pykubelet.agent.mounter_dns import MounterDns, mounter_resolv_conf
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.logs.logger import ROOT
from pykubelet.util.files import write_if_changed
from pykubelet.util.tasks import TaskScope


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", "nameserver 10.0.0.10\nnameserver fd00::a\n"),
        (
            "nameserver 192.0.2.1\nsearch a.example b.example\noptions ndots:2\n",
            "nameserver 10.0.0.10\nnameserver fd00::a\nsearch a.example b.example\n",
        ),
        ("nameserver 192.0.2.1\n", "nameserver 10.0.0.10\nnameserver fd00::a\nsearch\n"),
    ],
)
def test_mounter_resolv_conf_has_cluster_dns_and_host_searches(host: str, expected: str) -> None:
    assert mounter_resolv_conf(["10.0.0.10", "fd00::a"], host) == expected


def test_mounter_resolv_conf_malformed_host_file_raises() -> None:
    with pytest.raises(ContainerConfigError):
        mounter_resolv_conf([], "nameserver\n")


def settings(root: Path, host: str = "") -> AgentSettings:
    """Return the settings of a node with a mounter below `root`, and with `host` as `resolvConf`."""
    flags = KubeletFlags(experimental_mounter_path=str(root / "mounter"))
    return AgentSettings(flags, KubeletConfiguration(resolv_conf=host), FeatureGates(), "vm")


async def test_mounter_dns_reloads_of_cluster_dns_write_last_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rootfs" / "etc" / "resolv.conf"
    path.parent.mkdir(parents=True)
    dns = MounterDns(settings(tmp_path))
    await dns.write(["10.0.0.10"])
    assert path.read_text() == "nameserver 10.0.0.10\n"
    written: list[bytes] = []

    def write(path: Path, data: bytes) -> None:
        if b"10.0.0.11" in data:
            time.sleep(0.2)  # the later ones must not overtake it
        write_if_changed(path, data)
        written.append(data)

    monkeypatch.setattr(mounter_dns, "write_if_changed", write)
    async with asyncio.timeout(20), TaskScope() as tasks:
        for number in range(11, 15):
            config = KubeletConfiguration(cluster_dns=[f"10.0.0.{number}"])
            (await prepare_mounter_dns(dns, tasks, config))()
        while len(written) < 4:
            await asyncio.sleep(0.01)
    assert path.read_text() == "nameserver 10.0.0.14\n"


async def test_mounter_dns_write_fails_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rootfs").write_text("")
    logger = logging.getLogger(ROOT)
    before, logger.propagate = logger.propagate, True
    try:
        await MounterDns(settings(tmp_path)).write(["10.0.0.10"])
    finally:
        logger.propagate = before
    assert "Failed to write resolv.conf for --experimental-mounter-path" in caplog.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, b"nameserver 10.0.0.10\n"),
        (b"nameserver\n", b"nameserver 10.0.0.10\n"),
        (b"search a\xff\n", b"nameserver 10.0.0.10\nsearch a\xff\n"),
    ],
    ids=["missing", "malformed", "not UTF-8"],
)
async def test_mounter_dns_invalid_host_file_name_servers_are_written(
    tmp_path: Path, content: bytes | None, expected: bytes
) -> None:
    path, host = tmp_path / "rootfs" / "etc" / "resolv.conf", tmp_path / "host"
    path.parent.mkdir(parents=True)
    path.write_text("nameserver 10.0.0.9\n")
    if content is not None:
        host.write_bytes(content)
    await MounterDns(settings(tmp_path, str(host))).write(["10.0.0.10"])
    assert path.read_bytes() == expected
