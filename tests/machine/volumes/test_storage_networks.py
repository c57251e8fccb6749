"""iscsi and fc without a storage network: `iscsiadm` and `/sys` are stand-ins, the disk is a loop device.

What is done to the disk (formatting, mounting, binding, mapping) is real.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.storage import PersistentVolume
from pykubelet.api.volume import FibreChannel, Iscsi
from pykubelet.linux.loop_devices import attach_loop, detach_loop, loops_of
from pykubelet.linux.mounts import read_mounts, unmount
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mounts.block import unmap_device
from pykubelet.volumes.mounts.mount_helper import HelperError
from pykubelet.volumes.plugins import iscsi
from pykubelet.volumes.plugins.fc import FcPlugin, fc_name
from pykubelet.volumes.plugins.iscsi import IscsiPlugin, disk_for
from pykubelet.volumes.plugins.network_disk import Scsi
from tests.support.volume_programs import StandIns, stand_ins, surroundings, wanted
from tests.support.volumes import Shelf, needs_root, pod_with

IQN = "iqn.2026-01.com.example:disk"
PORTAL = "192.0.2.7:3260"
SHOWN = "iface.iscsi_ifacename = default\\niface.transport_name = tcp\\niface.mtu = <empty>\\niface.port = 7"

ISCSIADM = """
from pathlib import Path
sys_dir, dev, device = Path({sys!r}), Path({dev!r}), {device!r}
words = sys.argv[1:]
def after(flag):
    return words[words.index(flag) + 1]
if words[:2] == ["-m", "iface"] and words[-1] == "show":
    print("{shown}")
elif "--login" in words or "--logout" in words:
    portal = after("-p")
    address, _, port = portal.rpartition(":")
    session = sys_dir / "class/iscsi_host/host3/device/session1"
    connection = session / "connection1:0/iscsi_connection/connection1:0"
    link = dev / "disk/by-path" / f"ip-{{portal}}-iscsi-{{after('-T')}}-lun-4"
    if "--login" in words:
        if portal in os.environ.get("DEAD_PORTALS", "").split():
            sys.exit("login failed")
        connection.mkdir(parents=True, exist_ok=True)
        for name in ("", "persistent_"):
            (connection / f"{{name}}address").write_text(address + "\\n")
            (connection / f"{{name}}port").write_text(port + "\\n")
        (session / "iscsi_session/session1").mkdir(parents=True, exist_ok=True)
        (session / "iscsi_session/session1/targetname").write_text(after("-T") + "\\n")
        block = session / "target3:0:0/3:0:0:4/block/sdz"
        block.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    else:
        link.unlink(missing_ok=True)
        import shutil
        shutil.rmtree(session, ignore_errors=True)
"""


@pytest.fixture
def scsi(tmp_path: Path) -> Scsi:
    scsi = Scsi(tmp_path / "sys", tmp_path / "dev")
    for folder in ("class/scsi_host/host3", "block/sdz/device"):
        (scsi.sys / folder).mkdir(parents=True)
    for file in ("class/scsi_host/host3/scan", "block/sdz/device/delete"):
        (scsi.sys / file).touch()
    (scsi.dev / "disk/by-path").mkdir(parents=True)
    (scsi.dev / "disk/by-id").mkdir(parents=True)
    return scsi


@pytest.fixture
def disk(tmp_path: Path, root: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    device, lock = attach_loop(image)
    os.close(lock)
    yield Path(device)
    for one in reversed(read_mounts(tmp_path)):
        for loop in loops_of(one.point):
            detach_loop(loop)
        unmount(one.point, detach=True)
    detach_loop(device)


@pytest.fixture
def programs(tmp_path: Path, scsi: Scsi, disk: Path) -> Iterator[StandIns]:
    with stand_ins(tmp_path / "bin") as made:
        made.add(
            "iscsiadm",
            ISCSIADM.format(sys=str(scsi.sys), dev=str(scsi.dev), device=str(disk), shown=SHOWN),
        )
        yield made


class TestNames:
    @pytest.mark.parametrize(
        ("source", "name", "portals"),
        [
            (Iscsi("192.0.2.7", IQN, 4), f"iface-default/{PORTAL}-{IQN}-lun-4", [PORTAL]),
            (
                Iscsi("192.0.2.7:1", IQN, 0, portals=["192.0.2.8"], iscsi_interface="ib"),
                f"iface-ib/192.0.2.7:1-{IQN}-lun-0",
                ["192.0.2.7:1", "192.0.2.8:3260"],
            ),
            (
                Iscsi("192.0.2.7", IQN, 4, initiator_name="iqn.me"),
                f"iface-{PORTAL}:v/{PORTAL}-{IQN}-lun-4",
                [PORTAL],
            ),
        ],
    )
    def test_disk_for_iscsi_source_returns_name_and_portals(
        self, source: Iscsi, name: str, portals: list[str]
    ) -> None:
        disk = disk_for(source, "v")
        assert (disk.name, disk.portals) == (name, portals)

    @pytest.mark.parametrize(
        "source",
        [
            Iscsi("192.0.2.7", "../../etc", 0),
            Iscsi("a/b", IQN, 0),
            Iscsi("192.0.2.7", IQN, 0, iscsi_interface=""),
            Iscsi("192.0.2.7", "--logout", 0),
            Iscsi("192.0.2.7", IQN, 0, initiator_name="a/../b"),
        ],
    )
    def test_disk_for_invalid_iscsi_source_raises(self, source: Iscsi) -> None:
        with pytest.raises(BadSource, match="cannot be part of an iSCSI disk's address"):
            disk_for(source, "v")

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            (FibreChannel(["50a", "50b"], 2), "50a-50b-lun-2"),
            (FibreChannel(wwids=["36 x", "y"]), "36_x-y"),
            (FibreChannel(["50a"], wwids=["36"]), "36"),
        ],
    )
    def test_fc_name_valid_source_returns_name(self, source: FibreChannel, name: str) -> None:
        assert fc_name(source) == name

    @pytest.mark.parametrize("source", [FibreChannel(), FibreChannel(["a"]), FibreChannel(wwids=["a/b"])])
    def test_fc_name_invalid_source_raises(self, source: FibreChannel) -> None:
        with pytest.raises(BadSource):
            fc_name(source)


@pytest.mark.parametrize("behind_pci", [False, True])
def test_disk_by_path_wildcard_in_name_is_literal(scsi: Scsi, behind_pci: bool) -> None:
    """Verify that wildcards in a pod's spec do not find the disks of other pods."""
    bus = "pci-0000:05:00.0-" if behind_pci else ""
    folder = scsi.dev / "disk/by-path"
    others = folder / f"{bus}ip-{PORTAL}-iscsi-{IQN}-lun-4"
    others.touch()
    assert scsi.disk_by_path(f"ip-{PORTAL}-iscsi-{IQN}-lun-4", behind_pci=behind_pci) == others
    for iqn in ("*", "iqn.*", "[i]" + IQN[1:], "?" + IQN[1:], "**"):
        assert scsi.disk_by_path(f"ip-{PORTAL}-iscsi-{iqn}-lun-4", behind_pci=behind_pci) is None
    own = folder / f"{bus}ip-{PORTAL}-iscsi-*-lun-4"
    own.touch()
    assert scsi.disk_by_path(f"ip-{PORTAL}-iscsi-*-lun-4", behind_pci=behind_pci) == own
    if behind_pci:
        assert scsi.disk_by_path("", behind_pci=True) is None


def iscsi_pod(uid: str = "u-1", **source: Any) -> Any:
    return pod_with(
        {"name": "v", "iscsi": {"targetPortal": "192.0.2.7", "iqn": IQN, "lun": 4} | source},
        metadata={"uid": uid},
        securityContext={"fsGroup": 2345},
    )


@pytest.mark.machine
@needs_root
class TestIscsi:
    @pytest.fixture
    def kind(self, root: Path, shelf: Shelf, scsi: Scsi) -> IscsiPlugin:
        return IscsiPlugin(surroundings(root, shelf), scsi)

    async def test_set_up_two_pods_share_one_login_and_disk(
        self, kind: IscsiPlugin, root: Path, scsi: Scsi, programs: StandIns
    ) -> None:
        one = await kind.set_up(wanted(iscsi_pod()))
        two = await kind.set_up(wanted(iscsi_pod("u-2", readOnly=True)))
        assert one.path == str(root / "pods/u-1/volumes/kubernetes.io~iscsi/v")
        assert (one.read_only, two.read_only) == (False, True)
        assert (one.relabel, two.relabel) == (True, False), "nobody can relabel what is read-only"
        Path(one.path, "file").write_text("shared")
        assert Path(two.path, "file").read_text() == "shared"
        with pytest.raises(OSError, match="Read-only"):
            Path(two.path, "new").touch()
        assert Path(one.path).stat().st_gid == 2345
        assert [call[1:] for call in programs.calls] == [
            ["-m", "iface", "-I", "default", "-o", "show"],
            ["-m", "discoverydb", "-t", "sendtargets", "-p", PORTAL, "-I", "default", "-o", "new"],
            ["-m", "discoverydb", "-t", "sendtargets", "-p", PORTAL, "-I", "default", "--discover"],
            [
                *("-m", "node", "-p", PORTAL, "-T", IQN, "-I", "default", "-o", "update"),
                *("-n", "node.session.scan", "-v", "manual"),
            ],
            ["-m", "node", "-p", PORTAL, "-T", IQN, "-I", "default", "--login"],
            ["-m", "node", "-p", PORTAL, "-T", IQN, "-o", "update", "-n", "node.startup", "-v", "manual"],
        ]
        assert (scsi.sys / "class/scsi_host/host3/scan").read_text() == "0 0 4"
        await kind.unmount_unused([])
        assert Path(one.path, "file").exists(), "the mount table says that it is in use"
        unmount(Path(one.path))
        await kind.unmount_unused([])
        assert Path(two.path, "file").exists()

    async def test_unmount_unused_kubelet_restarted_logs_out(
        self, kind: IscsiPlugin, root: Path, shelf: Shelf, scsi: Scsi, programs: StandIns
    ) -> None:
        """By another agent, which never saw the pod."""
        mounted = await kind.set_up(wanted(iscsi_pod()))
        disk = root / f"plugins/kubernetes.io/iscsi/iface-default/{PORTAL}-{IQN}-lun-4"
        assert disk.is_dir()
        unmount(Path(mounted.path))
        assert json.loads(_underneath(disk)) == {
            "VolName": "v",
            "Portals": [PORTAL],
            "Iqn": IQN,
            "Lun": "4",
            "InitIface": "default",
            "Iface": "default",
            "InitiatorName": "",
        }
        count = len(programs.calls)
        await IscsiPlugin(surroundings(root, shelf), scsi).unmount_unused([])
        assert not disk.exists()
        assert not read_mounts(root)
        node = ["-m", "node", "-p", PORTAL, "-T", IQN]
        assert [call[1:] for call in programs.calls[count:]] == [
            [*node, "--logout", "-I", "default"],
            [*node, "-o", "delete", "-I", "default"],
        ]
        assert (scsi.sys / "block/sdz/device/delete").read_text() == "1"

    async def test_unmount_unused_target_has_other_disk_keeps_login(
        self, kind: IscsiPlugin, root: Path, programs: StandIns
    ) -> None:
        mounted = await kind.set_up(wanted(iscsi_pod()))
        other = root / f"plugins/kubernetes.io/iscsi/volumeDevices/iface-default/{PORTAL}-{IQN}-lun-5"
        other.mkdir(parents=True)
        unmount(Path(mounted.path))
        count = len(programs.calls)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IscsiPlugin, "volume_name", lambda self, place: "busy")
            (root / "plugins/kubernetes.io~iscsi/volumeDevices/busy").mkdir(parents=True)
            await kind.unmount_unused([])
        assert len(programs.calls) == count
        assert not read_mounts(root)

    async def test_set_up_block_volume_is_mapped_as_device(
        self, kind: IscsiPlugin, root: Path, programs: StandIns, disk: Path
    ) -> None:
        volume = wanted(iscsi_pod(), name="pv-1", persistent=PersistentVolume(), block=True)
        mounted = await kind.set_up(volume)
        assert mounted.path == ""
        assert Path(mounted.device).resolve() == disk
        await kind.unmount_unused([])
        assert not [call for call in programs.calls if "--logout" in call]
        unmap_device(root, kind.directory_name, "u-1", "pv-1")
        await kind.unmount_unused([])
        assert [call for call in programs.calls if "--logout" in call]
        assert not list((root / "plugins/kubernetes.io/iscsi/volumeDevices").glob("iface-*/*"))

    async def test_set_up_chap_passes_secrets_to_iscsiadm(
        self, kind: IscsiPlugin, shelf: Shelf, programs: StandIns
    ) -> None:
        shelf.secrets["s"] = {
            "discovery.sendtargets.auth.username": b"me",
            "node.session.auth.password": b"hush",
        }
        pod = iscsi_pod(chapAuthDiscovery=True, chapAuthSession=True, secretRef={"name": "s"})
        mounted = await kind.set_up(wanted(pod))
        set_to = [call[-3:] for call in programs.calls if "-n" in call]
        assert set_to == [
            ["discovery.sendtargets.auth.authmethod", "-v", "CHAP"],
            ["discovery.sendtargets.auth.username", "-v", "me"],
            ["node.session.scan", "-v", "manual"],
            ["node.session.auth.authmethod", "-v", "CHAP"],
            ["node.session.auth.password", "-v", "hush"],
            ["node.startup", "-v", "manual"],
        ]
        unmount(Path(mounted.path))

    async def test_set_up_initiator_name_creates_own_interface(
        self, kind: IscsiPlugin, programs: StandIns
    ) -> None:
        mounted = await kind.set_up(wanted(iscsi_pod(initiatorName="iqn.2026-01.com.example:me")))
        own = f"{PORTAL}:v"
        assert [call[3:] for call in programs.calls if call[2] == "iface"] == [
            ["-I", "default", "-o", "show"],
            ["-I", own, "-o", "new"],
            ["-I", own, "-o", "update", "-n", "iface.initiatorname", "-v", "iqn.2026-01.com.example:me"],
            ["-I", own, "-o", "update", "-n", "iface.port", "-v", "7"],
            ["-I", own, "-o", "update", "-n", "iface.transport_name", "-v", "tcp"],
        ]
        unmount(Path(mounted.path))
        await kind.unmount_unused([])
        assert programs.calls[-1][1:] == ["-m", "iface", "-I", own, "-o", "delete"]

    async def test_set_up_one_portal_dead_uses_other(
        self, kind: IscsiPlugin, programs: StandIns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DEAD_PORTALS", "192.0.2.8:3260")
        monkeypatch.setattr(iscsi, "MULTIPATH_SECONDS", 0.1)
        mounted = await kind.set_up(wanted(iscsi_pod(portals=["192.0.2.8"])))
        assert len([call for call in programs.calls if "--login" in call]) == 1 + iscsi.MAX_ATTEMPTS
        unmount(Path(mounted.path))

    async def test_set_up_all_portals_dead_raises_and_leaves_nothing(
        self, kind: IscsiPlugin, root: Path, programs: StandIns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DEAD_PORTALS", PORTAL)
        with pytest.raises(
            VolumePluginError, match=r"failed to get any path for iscsi disk, .* login failed"
        ):
            await kind.set_up(wanted(iscsi_pod()))
        await kind.unmount_unused([])
        assert not list((root / "plugins/kubernetes.io/iscsi").glob("iface-*/*"))

    async def test_set_up_device_missing_raises_timeout(
        self, kind: IscsiPlugin, programs: StandIns, scsi: Scsi, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(iscsi, "DEVICE_SECONDS", 0.1)
        with pytest.raises(
            VolumePluginError, match=r"Timed out waiting for device at path .*-lun-5 after 0.1s"
        ):
            await kind.set_up(wanted(iscsi_pod(lun=5)))
        await kind.unmount_unused([])

    async def test_set_up_iscsiadm_missing_names_package(
        self, kind: IscsiPlugin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pykubelet.volumes.mounts.mount_helper.search_path", lambda: "/nowhere")
        with pytest.raises(HelperError, match="install the package open-iscsi"):
            await kind.set_up(wanted(iscsi_pod()))


@pytest.mark.machine
@needs_root
class TestFibreChannel:
    @pytest.fixture
    def kind(self, root: Path, shelf: Shelf, scsi: Scsi) -> FcPlugin:
        return FcPlugin(surroundings(root, shelf), scsi)

    def pod(self, **source: Any) -> Any:
        return pod_with({"name": "v", "fc": source or {"targetWWNs": ["50a"], "lun": 2}})

    async def test_set_up_mounts_disk_and_unmount_unused_deletes_device(
        self, kind: FcPlugin, root: Path, scsi: Scsi, disk: Path, programs: StandIns
    ) -> None:
        (scsi.dev / "disk/by-path/pci-0000:00:01-fc-0x50a-lun-2").symlink_to(disk)
        (scsi.dev / "disk/by-path/pci-0000:00:01-fc-0x50a-lun-21").symlink_to("/dev/null")
        delete = scsi.sys / "block" / disk.name / "device/delete"
        delete.parent.mkdir(parents=True)
        delete.touch()
        programs.add("blockdev")
        mounted = await kind.set_up(wanted(self.pod()))
        assert mounted.path == str(root / "pods/u-1/volumes/kubernetes.io~fc/v")
        Path(mounted.path, "file").write_text("kept")
        await kind.unmount_unused([])
        assert Path(mounted.path, "file").exists()
        unmount(Path(mounted.path))
        await kind.unmount_unused([])
        assert not (root / "plugins/kubernetes.io/fc/50a-lun-2").exists()
        assert programs.calls == [["blockdev", "--flushbufs", str(disk)]]
        assert delete.read_text() == "1"
        assert (scsi.sys / "class/scsi_host/host3/scan").read_text() == "- - -"

    async def test_attach_multipath_disk_uses_device_mapper_and_detach_flushes(
        self, kind: FcPlugin, scsi: Scsi, disk: Path, programs: StandIns
    ) -> None:
        """The device on top is found, used, and taken apart."""
        for name in ("sda", "sdb"):
            (scsi.dev / name).touch()
            (scsi.sys / "block/dm-0/slaves" / name).mkdir(parents=True)
            (scsi.sys / "block" / name / "device").mkdir(parents=True)
            (scsi.sys / "block" / name / "device/delete").touch()
        (scsi.dev / "dm-0").touch()
        (scsi.dev / "disk/by-id/scsi-36_x").symlink_to(scsi.dev / "sda")
        volume = wanted(self.pod(wwids=["36 x"]))
        place = kind.host.root / "plugins/kubernetes.io/fc/36_x"
        device = await kind.attach(volume, place)
        assert device == scsi.dev / "dm-0"
        programs.add("multipath")
        programs.add("blockdev")
        await kind.detach(place, device)
        assert programs.calls == [
            ["multipath", "-f", str(scsi.dev / "dm-0")],
            ["blockdev", "--flushbufs", str(scsi.dev / "sda")],
            ["blockdev", "--flushbufs", str(scsi.dev / "sdb")],
        ]
        assert [(scsi.sys / f"block/{name}/device/delete").read_text() for name in ("sda", "sdb")] == [
            "1",
            "1",
        ]

    async def test_set_up_disk_missing_raises(self, kind: FcPlugin, scsi: Scsi) -> None:
        with pytest.raises(VolumePluginError, match="no fc disk found"):
            await kind.set_up(wanted(self.pod()))


def _underneath(place: Path) -> str:
    """What a mount hides."""
    unmount(place)
    return (place / "iscsi.json").read_text()
