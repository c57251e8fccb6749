"""A kubelet in a user namespace, where kernel settings and the kernel log may be out of reach."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.agent import oom_kills
from pykubelet.agent.host_setup import StartupError, set_kernel_defaults
from pykubelet.agent.oom_kills import build_oom_watcher, check_kernel_log
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.linux import kernel

OFF, ON = FeatureGates(), FeatureGates().with_overrides({"KubeletInUserNamespace": True})


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("         0          0 4294967295\n", False),
        ("         0       1000          1\n         1     100000      65536\n", True),
        ("         0     100000 4294967295\n", True),
    ],
)
def test_in_user_namespace_by_uid_map(tmp_path: Path, text: str, inside: bool) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "uid_map").write_text(text)
    assert kernel.in_user_namespace(tmp_path) == inside


def test_in_user_namespace_kernel_without_them_is_false(tmp_path: Path) -> None:
    assert not kernel.in_user_namespace(tmp_path)


def denied() -> int:
    raise PermissionError(1, "Operation not permitted")


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "kernel_default_differences", lambda: {"vm/overcommit_memory": (1, 0)})
    monkeypatch.setattr(kernel, "write_sysctl", lambda *_: denied())


@pytest.mark.parametrize("inside", [True, False])
def test_user_namespace_without_gate_does_not_start(
    monkeypatch: pytest.MonkeyPatch, unwritable: None, inside: bool
) -> None:
    monkeypatch.setattr(kernel, "in_user_namespace", lambda: inside)
    for gates in (ON, OFF):
        if inside and gates is OFF:
            with pytest.raises(
                StartupError, match=r"overcommit_memory cannot be set.*KubeletInUserNamespace"
            ):
                set_kernel_defaults(gates)
            with pytest.raises(StartupError, match=r"/dev/kmsg cannot be opened.*KubeletInUserNamespace"):
                check_kernel_log(gates, denied)
        else:
            set_kernel_defaults(gates)
            check_kernel_log(gates, denied)


def test_build_oom_watcher_kernel_log_hidden_raises_before_any_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify that no pod has been started when the kubelet cannot start."""
    monkeypatch.setattr(kernel, "in_user_namespace", lambda: True)
    monkeypatch.setattr(oom_kills, "check_kernel_log", partial(check_kernel_log, open_log=denied))
    settings: Any = SimpleNamespace(gates=OFF)
    unused: Any = None
    with pytest.raises(StartupError, match="/dev/kmsg cannot be opened"):
        build_oom_watcher(settings, unused, unused, unused, unused, unused, unused)
