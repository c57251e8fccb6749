"""flexVolume with a real driver: a program that mounts, and writes down how it was called."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.mounts import read_mounts
from pykubelet.volumes.errors import BadSource, VolumeNotReady, VolumePluginError
from pykubelet.volumes.mounts.mount_helper import HelperError, is_mounted
from pykubelet.volumes.plugins import flex
from pykubelet.volumes.plugins.flex import (
    DriverError,
    FlexVolumePlugin,
    NotSupportedError,
    driver_directory_name,
    parse_response,
)
from tests.support.volume_programs import surroundings, wanted
from tests.support.volumes import Shelf, mode_of, needs_root, pod_with

_DRIVER = """#!{python} -S
import json, os, subprocess, sys
command, *arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
def answer(status="Success", code=0, **more):
    print(json.dumps(dict(status=status, **more)))
    sys.exit(code)
def run(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        answer("Failure", 1, message=done.stderr.strip())
{body}
answer("Not supported", 1)
"""
PLAIN = """
if command == "init":
    answer(capabilities=dict(attach=False, selinuxRelabel=False))
if command == "mount":
    options = json.loads(arguments[1])
    run("mount", "-t", "tmpfs", "-o", options["kubernetes.io/readwrite"], "flex", arguments[0])
    answer()
if command == "unmount":
    run("umount", arguments[0])
    answer()
"""
ATTACHING = """
if command == "init":
    answer(Capabilities=dict(attach=True))
if command == "attach":
    answer(device="/dev/flex0")
if command == "waitforattach":
    answer(device=arguments[0] + "p1")
if command == "mountdevice":
    run("mount", "-t", "tmpfs", "flex", arguments[0])
    answer()
if command == "unmountdevice":
    run("umount", arguments[0])
    answer()
if command == "detach":
    answer()
"""


class Drivers:
    """A folder of drivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.parent / "calls"

    def add(self, body: str, name: str = "example.com~disk") -> None:
        program = self.folder / name / name.rpartition("~")[2]
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(_DRIVER.format(python=sys.executable, log=str(self.log), body=body))
        program.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def drivers(tmp_path: Path) -> Drivers:
    return Drivers(tmp_path / "drivers")


@pytest.fixture
def kind(root: Path, shelf: Shelf, drivers: Drivers) -> FlexVolumePlugin:
    return FlexVolumePlugin(surroundings(root, shelf, flex_drivers=drivers.folder))


def pod_of(driver: str = "example.com/disk", uid: str = "u-1", **source: Any) -> Pod:
    return pod_with(
        {"name": "v", "flexVolume": {"driver": driver, **source}},
        metadata={"uid": uid},
        serviceAccountName="robot",
        securityContext={"fsGroup": 2345},
    )


class TestAnswers:
    def test_parse_response_success_returns_capabilities(self) -> None:
        answer = parse_response("init", '{"Status":"Success","capabilities":{"fsGroup":false,"new":1},"x":2}')
        assert answer.capabilities is not None
        assert (answer.capabilities.attach, answer.capabilities.fsgroup) == (True, False)

    @pytest.mark.parametrize(
        ("said", "error", "message"),
        [
            ('{"status":"Failure","message":"no disk"}', DriverError, "status: Failure, reason: no disk"),
            ('{"status":"Not supported"}', NotSupportedError, "Not supported"),
            ("{}", DriverError, "status: , reason: "),
            ("mounted!", DriverError, "unreadable: .*: mounted!"),
            ("[]", DriverError, "unreadable"),
            ('{"status":3}', DriverError, "unreadable"),
            ("", DriverError, "unreadable"),
        ],
    )
    def test_parse_response_failure_raises(self, said: str, error: type[DriverError], message: str) -> None:
        with pytest.raises(error, match=message):
            parse_response("mount", said)

    @pytest.mark.parametrize(("driver", "folder"), [("a/b", "a~b"), ("b", "b"), ("a.com/x/b", "a.com~x~b")])
    def test_driver_directory_name_replaces_slashes(self, driver: str, folder: str) -> None:
        assert driver_directory_name(driver) == folder

    @pytest.mark.parametrize("driver", ["", ".", "..", "../x", ".hidden/x", "a/", "a\0b"])
    def test_driver_directory_name_invalid_driver_raises(self, driver: str) -> None:
        with pytest.raises(BadSource, match="cannot be the name of a FlexVolume driver"):
            driver_directory_name(driver)


@pytest.mark.machine
@needs_root
class TestPlainDrivers:
    async def test_set_up_and_tear_down_call_driver_and_leave_nothing(
        self, kind: FlexVolumePlugin, root: Path, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN)
        mounted = await kind.set_up(
            wanted(pod_of(fsType="xfs", options={"size": "3", "kubernetes.io/x": "y"}))
        )
        place = root / "pods/u-1/volumes/example.com~disk/v"
        assert (mounted.path, mounted.read_only, mounted.relabel) == (str(place), False, False)
        assert [one.kind for one in read_mounts() if one.point == place] == ["tmpfs"]
        assert (place.stat().st_gid, mode_of(place)) == (2345, "0o3777")
        await kind.set_up(wanted(pod_of()))
        init, mount = drivers.calls
        assert init == ["init"]
        assert mount[:2] == ["mount", str(place)]
        assert json.loads(mount[2]) == {
            "kubernetes.io/fsType": "xfs",
            "kubernetes.io/readwrite": "rw",
            "kubernetes.io/pvOrVolumeName": "v",
            "kubernetes.io/pod.name": "p",
            "kubernetes.io/pod.namespace": "default",
            "kubernetes.io/pod.uid": "u-1",
            "kubernetes.io/serviceAccount.name": "robot",
            "kubernetes.io/mounterArgs.FsGroup": "2345",
            "kubernetes.io/x": "y",
            "size": "3",
        }
        await kind.tear_down("u-1", "v")
        assert drivers.calls[2:] == [["unmount", str(place)]]
        assert not place.parent.exists()
        await kind.tear_down("u-1", "v")

    async def test_tear_down_kubelet_restarted_unmounts_unknown_pod(
        self, kind: FlexVolumePlugin, root: Path, shelf: Shelf, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN)
        await kind.set_up(wanted(pod_of()))
        other = FlexVolumePlugin(surroundings(root, shelf, flex_drivers=drivers.folder))
        await other.tear_down("u-1", "v")
        assert not (root / "pods/u-1/volumes/example.com~disk").exists()

    async def test_set_up_read_only_passes_ro_and_skips_fs_group(
        self, kind: FlexVolumePlugin, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN)
        mounted = await kind.set_up(wanted(pod_of(readOnly=True)))
        assert mounted.read_only
        assert Path(mounted.path).stat().st_gid == 0, "what cannot be written is not given away"
        assert json.loads(drivers.calls[1][2])["kubernetes.io/readwrite"] == "ro"
        await kind.tear_down("u-1", "v")

    async def test_set_up_ownership_walk_interrupted_is_repeated(
        self, kind: FlexVolumePlugin, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN)
        place = Path((await kind.set_up(wanted(pod_of()))).path)
        (place / "file").touch()
        place.chmod(0o755)
        await kind.set_up(wanted(pod_of()))
        assert (place / "file").stat().st_gid == 2345
        await kind.tear_down("u-1", "v")

    async def test_set_up_driver_replaced_calls_init_again(
        self, kind: FlexVolumePlugin, drivers: Drivers
    ) -> None:
        drivers.add("if command == 'init': answer('Failure', 1, message='not today')")
        with pytest.raises(DriverError, match="init command failed, status: Failure, reason: not today"):
            await kind.set_up(wanted(pod_of()))
        drivers.add(PLAIN)
        await kind.set_up(wanted(pod_of()))
        await kind.tear_down("u-1", "v")

    async def test_tear_down_driver_fails_is_forced_after_timeout(
        self, kind: FlexVolumePlugin, drivers: Drivers, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drivers.add(PLAIN)
        place = Path((await kind.set_up(wanted(pod_of()))).path)
        drivers.add("if command == 'unmount': answer('Failure', 1, message='not today')\n" + PLAIN)
        for _ in range(2):
            with pytest.raises(DriverError, match="not today"):
                await kind.tear_down("u-1", "v")
            assert is_mounted(place)
        monkeypatch.setattr(flex, "DRIVER_TIMEOUT_SECONDS", 0.0)
        await kind.tear_down("u-1", "v")
        assert not place.exists()
        assert not read_mounts(root)

    async def test_set_up_secret_of_driver_type_is_passed(
        self, kind: FlexVolumePlugin, shelf: Shelf, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN + "\nif command == 'mount': answer('Failure', 1, message='no')")
        shelf.secrets["s"] = {"key": b"\xffvalue"}
        volume = wanted(pod_of(secretRef={"name": "s"}))
        with pytest.raises(VolumePluginError, match=r"couldn't get secret s err: cannot get secret of type"):
            await kind.set_up(volume)
        shelf.types["s"] = "example.com/disk"
        await kind.set_up(volume)
        options = json.loads(drivers.calls[-1][2])
        assert options["kubernetes.io/secret/key"] == base64.b64encode(b"\xffvalue").decode()
        await kind.tear_down("u-1", "v")

    async def test_set_up_driver_fails_secret_options_masked_in_error(
        self, kind: FlexVolumePlugin, shelf: Shelf, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN.replace('run("mount"', 'sys.exit("broken"); run("mount"'))
        shelf.secrets["s"], shelf.types["s"] = {"key": b"value"}, "example.com/disk"
        with pytest.raises(HelperError, match=r"disk mount \S+ \*\*\* failed: exit status 1: broken$"):
            await kind.set_up(wanted(pod_of(secretRef={"name": "s"})))

    async def test_set_up_secret_missing_raises(self, kind: FlexVolumePlugin, drivers: Drivers) -> None:
        drivers.add(PLAIN)
        with pytest.raises(
            VolumePluginError, match=r"couldn't get secret default/s err: secret \"s\" not found"
        ):
            await kind.set_up(wanted(pod_of(secretRef={"name": "s"})))


@pytest.mark.machine
@needs_root
class TestFaults:
    async def test_set_up_driver_not_installed_raises(self, kind: FlexVolumePlugin, drivers: Drivers) -> None:
        with pytest.raises(BadSource, match=r"no volume plugin matched: .* is not installed at .*/disk$"):
            await kind.set_up(wanted(pod_of()))
        await kind.tear_down("u-1", "v")

    async def test_tear_down_driver_uninstalled_unmounts(
        self, kind: FlexVolumePlugin, root: Path, drivers: Drivers
    ) -> None:
        """A pod can always be deleted."""
        drivers.add(PLAIN)
        place = Path((await kind.set_up(wanted(pod_of()))).path)
        (drivers.folder / "example.com~disk/disk").unlink()
        await kind.tear_down("u-1", "v")
        assert not place.parent.exists()
        assert not read_mounts(root)

    async def test_set_up_mount_command_fails_leaves_nothing(
        self, kind: FlexVolumePlugin, root: Path, drivers: Drivers
    ) -> None:
        drivers.add(PLAIN.replace('"tmpfs"', '"nofs"'))
        with pytest.raises(
            DriverError, match=r"^mount command failed, status: Failure, reason: mount: .*flex does not exist"
        ):
            await kind.set_up(wanted(pod_of()))
        assert not (root / "pods/u-1/volumes/example.com~disk/v").exists()
        await kind.tear_down("u-1", "v")

    async def test_set_up_success_with_nonzero_exit_raises(
        self, kind: FlexVolumePlugin, drivers: Drivers
    ) -> None:
        drivers.add("if command == 'init': answer(capabilities=dict(attach=False))\nanswer(code=3)")
        with pytest.raises(HelperError, match="exit status 3"):
            await kind.set_up(wanted(pod_of()))


@pytest.mark.machine
@needs_root
class TestAttachingDrivers:
    async def test_set_up_two_pods_attach_and_mount_device_once(
        self, kind: FlexVolumePlugin, root: Path, drivers: Drivers
    ) -> None:
        drivers.add(ATTACHING)
        one = Path((await kind.set_up(wanted(pod_of()))).path)
        two = Path((await kind.set_up(wanted(pod_of(uid="u-2")))).path)
        (one / "file").write_text("shared")
        assert (two / "file").read_text() == "shared"
        device = root / "plugins/kubernetes.io/flexvolume/example.com/disk/mounts/v"
        calls = [
            [call[0], *(word for word in call[1:] if not word.startswith("{"))] for call in drivers.calls
        ]
        assert calls == [
            ["init"],
            ["attach", "n1"],
            ["waitforattach", "/dev/flex0"],
            ["mountdevice", str(device), "/dev/flex0p1"],
            ["mount", str(one)],
            ["attach", "n1"],
            ["waitforattach", "/dev/flex0"],
        ], "what it does not support is not asked for twice"
        await kind.tear_down("u-1", "v")
        assert (two / "file").read_text() == "shared"
        await kind.tear_down("u-2", "v")
        assert [call[0] for call in drivers.calls[7:]] == ["unmount", "unmountdevice", "detach"]
        assert not read_mounts(root)
        assert not device.exists()

    async def test_set_up_controller_attaches_waits_for_attached_device(
        self, root: Path, shelf: Shelf, drivers: Drivers
    ) -> None:
        """Then the agent only waits until they have, and says that it uses the volume."""
        drivers.add(ATTACHING)
        attached = ""

        async def device(wanted: object, name: str) -> str:
            assert name == "example.com/disk/v"
            if not attached:
                raise VolumeNotReady("not attached")
            return attached

        given = surroundings(
            root,
            shelf,
            flex_drivers=drivers.folder,
            api=object(),
            attached_device=device,
            attaches_volumes=False,
        )
        kind = FlexVolumePlugin(given)
        with pytest.raises(VolumeNotReady):
            await kind.set_up(wanted(pod_of()))
        attached = "/dev/flex9"
        mounted = await kind.set_up(wanted(pod_of()))
        assert mounted.attached == "example.com/disk/v"
        assert [call[:2] for call in drivers.calls[:2]] == [["init"], ["waitforattach", "/dev/flex9"]]
        await kind.tear_down("u-1", "v")
        assert drivers.calls[-1][0] == "unmountdevice"
