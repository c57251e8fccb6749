"""What is written for containerd and CNI: valid whatever the path, and true to the machine."""

import dataclasses
import json
import subprocess
import tomllib
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.standalone.containerd_config import (
    choose_subnet,
    config_version,
    conflist,
    containerd_config,
    toml,
)
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.requirements import PROGRAMS, HostRequirements, choose_snapshotter, inspect_host
from tests.support.runtime import why_no_machine

MACHINE = HostRequirements(
    programs={name: Path("/usr/bin") / name for name in PROGRAMS},
    cni_plugin_dir=Path("/usr/lib/cni"),
    apparmor=False,
    may_lower_oom_score=False,
    containerd_version=(1, 6, 20),
)
NEWER = dataclasses.replace(MACHINE, containerd_version=(2, 4, 2))
CRI, IMAGES, RUNTIME = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
)


def written(instance: Instance, machine: HostRequirements = MACHINE, **changes: str) -> dict[str, Any]:
    options = {"pause_image": "p:1", "snapshotter": "overlayfs", "cgroup_driver": "cgroupfs", **changes}
    return tomllib.loads(containerd_config(instance, machine, **options))


def test_containerd_config_all_paths_below_data_dir() -> None:
    instance = Instance.at(Path("/srv/node"))
    document = written(instance)
    cri = document["plugins"][CRI]
    options = cri["containerd"]["runtimes"]["runc"]["options"]
    for place in (
        document["root"],
        document["state"],
        document["grpc"]["address"],
        document["plugins"]["io.containerd.internal.v1.opt"]["path"],
        cri["cni"]["conf_dir"],
        cri["registry"]["config_path"],
        options["Root"],
    ):
        assert place.startswith("/srv/node/")
    assert cri["netns_mounts_under_state_dir"] is True
    assert cri["sandbox_image"] == "p:1"
    assert cri["stream_server_address"] == "127.0.0.1"


def test_containerd_config_depends_on_host_capabilities() -> None:
    instance = Instance.at(Path("/srv/node"))
    poor = written(instance)
    rich = written(
        instance,
        dataclasses.replace(MACHINE, apparmor=True, may_lower_oom_score=True),
        snapshotter="native",
        cgroup_driver="systemd",
    )
    for document, able in ((poor, False), (rich, True)):
        cri = document["plugins"][CRI]
        assert cri["restrict_oom_score_adj"] is not able
        assert cri["disable_apparmor"] is not able
        assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is able
        assert (document["oom_score"] < 0) is able
        assert ("io.containerd.snapshotter.v1.native" in document["disabled_plugins"]) is not able


def test_containerd_config_version_3_for_containerd_2_has_same_settings() -> None:
    instance = Instance.at(Path("/srv/node"))
    old, new = written(instance), written(instance, NEWER)
    assert (old["version"], new["version"]) == (2, 3)
    before = old["plugins"][CRI]
    images, runtime = new["plugins"][IMAGES], new["plugins"][RUNTIME]
    assert images["pinned_images"] == {"sandbox": before["sandbox_image"]}
    assert images["snapshotter"] == before["containerd"]["snapshotter"]
    assert images["registry"] == before["registry"]
    assert runtime["cni"]["bin_dirs"] == [before["cni"]["bin_dir"]]
    assert runtime["cni"]["conf_dir"] == before["cni"]["conf_dir"]
    assert runtime["containerd"]["runtimes"] == before["containerd"]["runtimes"]
    assert new["plugins"][CRI]["stream_server_address"] == "127.0.0.1"
    moved = ("netns_mounts_under_state_dir", "restrict_oom_score_adj", "disable_apparmor")
    assert all(runtime[name] == before[name] for name in moved)
    shared = ("root", "state", "oom_score", "disabled_plugins", "grpc", "debug")
    assert all(new[name] == old[name] for name in shared)


@pytest.mark.parametrize(
    ("version", "expected"), [((0, 0, 0), 2), ((1, 7, 27), 2), ((2, 0, 0), 3), ((2, 4, 2), 3)]
)
def test_config_version_follows_containerd(version: tuple[int, int, int], expected: int) -> None:
    assert config_version(version) == expected


def test_containerd_config_containerd_2_0_has_one_plugin_directory() -> None:
    host = dataclasses.replace(MACHINE, containerd_version=(2, 0, 5))
    cni = written(Instance.at(Path("/srv/node")), host)["plugins"][RUNTIME]["cni"]
    assert cni["bin_dir"] == "/usr/lib/cni"


@given(st.text(st.characters(codec="utf-8")))
def test_toml_any_text_roundtrip(text: str) -> None:
    assert tomllib.loads(f"x = {toml(text)}") == {"x": text}


@given(st.text("""ab "'{}$%#=[]\\tü""", min_size=1, max_size=20))
def test_containerd_config_and_conflist_any_data_dir_escaped(name: str) -> None:
    try:
        instance = Instance.at(Path("/srv/node") / name)
    except EmbeddedError:
        return
    assert written(instance)["root"] == str(instance.containerd_root)
    network = json.loads(conflist(instance, IPv4Network("10.85.0.0/24")))
    assert network["plugins"][0]["ipam"]["dataDir"] == str(instance.cni_leases)


@pytest.mark.machine
@pytest.mark.skipif(bool(why_no_machine()), reason=why_no_machine())
def test_containerd_config_accepted_by_containerd(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    data_dir.mkdir()
    path = data_dir / "config.toml"
    host = inspect_host()
    text = containerd_config(
        instance, host, pause_image="p:1", snapshotter="overlayfs", cgroup_driver="systemd"
    )
    path.write_text(text)
    try:
        shown = subprocess.run(
            [str(host.programs["containerd"]), "--config", str(path), "config", "dump"],
            capture_output=True,
            text=True,
            check=True,
        )
        plugins = tomllib.loads(shown.stdout)["plugins"]
        if IMAGES in plugins:
            assert plugins[IMAGES]["pinned_images"] == {"sandbox": "p:1"}
            options = plugins[RUNTIME]["containerd"]["runtimes"]["runc"]["options"]
            assert options["SystemdCgroup"] is True
        else:
            assert plugins[CRI]["sandbox_image"] == "p:1"
        assert "unknown" not in shown.stderr.lower()
    finally:
        path.unlink()
        data_dir.rmdir()


def test_conflist_bridge_portmap_subnet_and_mtu() -> None:
    instance = Instance.at(Path("/srv/node"))
    network = json.loads(conflist(instance, IPv4Network("10.85.3.0/24"), 1400))
    bridge, portmap = network["plugins"]
    assert network["name"] == instance.name
    assert (bridge["bridge"], bridge["mtu"], bridge["ipMasq"]) == (instance.bridge, 1400, True)
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.85.3.0/24"}]]
    assert portmap["capabilities"] == {"portMappings": True}
    assert "mtu" not in json.loads(conflist(instance, IPv4Network("10.85.3.0/24")))["plugins"][0]


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ([], "10.85.0.0/24"),
        (["192.0.2.0/24", "10.84.0.0/16"], "10.85.0.0/24"),
        (["10.85.0.0/24", "10.85.1.7/32"], "10.85.2.0/24"),
        (["10.85.0.0/16"], "10.86.0.0/24"),
        (["10.0.0.0/8"], "172.16.0.0/24"),
        (["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/17"], "192.168.128.0/24"),
    ],
)
def test_choose_subnet_returns_first_free(used: list[str], expected: str) -> None:
    assert choose_subnet(map(IPv4Network, used)) == IPv4Network(expected)


def test_choose_subnet_none_free_raises_error() -> None:
    with pytest.raises(EmbeddedError, match="no private /24 network is free"):
        choose_subnet([IPv4Network("0.0.0.0/0")])


NETWORKS = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False),
    st.integers(int(IPv4Network("10.80.0.0/12")[0]), int(IPv4Network("10.80.0.0/12")[-1])),
    st.integers(14, 32),
)


@given(st.lists(NETWORKS, max_size=30))
def test_choose_subnet_private_free_and_order_independent(used: list[IPv4Network]) -> None:
    chosen = choose_subnet(used)
    assert chosen.prefixlen == 24
    assert chosen.is_private
    assert not any(chosen.overlaps(network) for network in used)
    assert choose_subnet(reversed(used)) == chosen
    assert choose_subnet([*used, chosen]) != chosen


@pytest.mark.machine
@pytest.mark.skipif(bool(why_no_machine()), reason=why_no_machine())
def test_choose_snapshotter_overlayfs_or_native_fallback(tmp_path: Path) -> None:
    assert choose_snapshotter(tmp_path) == "overlayfs"
    # procfs-like file systems cannot carry one; an overlay of overlays cannot, either.
    for part in ("l", "u", "w", "m"):
        (tmp_path / part).mkdir()
    options = f"lowerdir={tmp_path}/l,upperdir={tmp_path}/u,workdir={tmp_path}/w"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / "m")], check=True)
    try:
        assert choose_snapshotter(tmp_path / "m") == "native"
        assert list((tmp_path / "m").iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path / "m")], check=True)
