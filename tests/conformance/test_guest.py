"""The pass in the virtual machine, as far as it can be tested without booting it."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance import guest
from tests.conformance.guest import guest_equipment, in_guest, run_in_guest
from tests.conformance.report import SuiteError
from tests.conformance.rig import IN_GUEST, IN_NAMESPACE, ON_HOST, unit_text
from tests.vm.machine import (
    MARKER,
    SHARED,
    Equipment,
    guest_script,
    make_disk,
    qemu_command,
    unit_environment,
)

FOCUS = r"\[NodeConformance\] 100% \"quoted\""


def test_guest_equipment_passes_selection_and_results_on(tmp_path: Path) -> None:
    made = guest_equipment(tmp_path, {"AGENT": "reference", "FOCUS": FOCUS, "RESULTS": "/else", "OTHER": "1"})
    assert made.share == tmp_path
    assert made.disk_mb > 0
    assert made.environment == {
        "AGENT": "reference",
        "FOCUS": FOCUS,
        "PASS": "vm",
        "RESULTS": str(SHARED),
        IN_NAMESPACE: "1",
    }


def test_guest_equipment_other_pass_is_passed_on(tmp_path: Path) -> None:
    assert guest_equipment(tmp_path, {"PASS": "pressure"}).environment["PASS"] == "pressure"


def test_unit_text_kubelet_keeps_containers_and_environment(tmp_path: Path) -> None:
    text = unit_text(["/bin/kubelet", "--config=/a b"], tmp_path / "log", {"PATH": "/bin", "OTHER": "1"})
    assert text.splitlines() == [
        "[Service]",
        "ExecStart=/bin/kubelet '--config=/a b'",
        f"StandardOutput=append:{tmp_path}/log",
        f"StandardError=append:{tmp_path}/log",
        "KillMode=process",
        "Delegate=yes",
        'Environment="PATH=/bin"',
    ]


@pytest.mark.parametrize(("environ", "expected"), [({}, False), ({MARKER: "v2"}, True)])
def test_in_guest_marker_decides(environ: dict[str, str], expected: bool) -> None:
    assert in_guest(environ) is expected


@pytest.mark.parametrize("code", [0, 1])
def test_run_in_guest_suite_ran_to_its_end_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(guest, "run_command", lambda *_, **__: code)
    run_in_guest(tmp_path / "vm", {})
    assert (tmp_path / "vm").is_dir()


@pytest.mark.parametrize("code", [2, 3, 143])
def test_run_in_guest_suite_did_not_run_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(guest, "run_command", lambda *_, **__: code)
    with pytest.raises(SuiteError, match=f"ended with {code}: see its output"):
        run_in_guest(tmp_path, {})


def test_run_in_guest_machine_failed_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("the guest did not finish within 5400s")

    monkeypatch.setattr(guest, "run_command", fail)
    with pytest.raises(SuiteError, match="virtual machine failed: the guest did not finish"):
        run_in_guest(tmp_path, {})


def test_unit_environment_special_characters_are_quoted() -> None:
    (line,) = unit_environment({"FOCUS": FOCUS})
    # systemd's quoting of double quotes and backslashes is the shell's; %% is its %.
    assert shlex.split(line.removeprefix("Environment=").replace("%%", "%")) == [f"FOCUS={FOCUS}"]


def test_guest_script_equipment_is_mounted_before_command() -> None:
    lines = guest_script(["run", "a b"], Equipment(disk_mb=1, share=Path("/results"))).splitlines()
    disk, share, command = (
        next(number for number, line in enumerate(lines) if text in line)
        for text in ("mount /dev/vda /tmp", f"share {SHARED}", "run 'a b'")
    )
    assert disk < command > share


def test_guest_script_no_equipment_mounts_nothing() -> None:
    assert "mount" not in guest_script(["true"], Equipment())


def test_qemu_command_equipment_has_disk_and_writable_share() -> None:
    equipment = Equipment(memory_mb=123, disk_mb=1, share=Path("/a,b"))
    command = qemu_command(Path("/k"), Path("/i"), Path("/c"), "v2", equipment, Path("/d/disk"))
    assert command[command.index("-drive") + 1].startswith("file=/d/disk,format=raw,if=virtio")
    assert command[command.index("-m") + 1] == "123"
    host, share = (part for part in command if part.startswith("local,"))
    assert "readonly=on" in host
    assert "path=/a,,b," in share
    assert "readonly" not in share


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed")
def test_make_disk_has_file_system(tmp_path: Path) -> None:
    make_disk(tmp_path / "disk", 16)
    found = subprocess.run(
        ["dumpe2fs", "-h", tmp_path / "disk"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/sbin:/usr/sbin"},
    )
    assert "has_journal" in found.stdout
    assert (tmp_path / "disk").stat().st_size == 16 << 20


def test_rig_options_host_moves_no_processes() -> None:
    assert ON_HOST.runtime_prefix() == ON_HOST.flags() == []
    assert ON_HOST.settings() == {"cgroupDriver": "cgroupfs"}


def test_rig_options_guest_has_cgroups_of_system_containers() -> None:
    assert IN_GUEST.settings() == {"cgroupDriver": "systemd", "kubeletCgroups": "/kubelet.slice"}
    assert IN_GUEST.flags() == ["--runtime-cgroups=/system.slice/containerd.scope"]
    assert "--unit=containerd" in IN_GUEST.runtime_prefix()
