"""Start with the last valid configuration."""

from pathlib import Path

import pytest

from pykubelet.config.errors import ConfigError
from pykubelet.config.last_good import FILE_NAME, load_or_last_good, save_last_good
from pykubelet.config.live import differences
from pykubelet.config.load import load

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "config.yaml").write_text(HEAD + "maxPods: 42\nstaticPodPath: manifests\n")
    (tmp_path / "drop").mkdir()
    (tmp_path / "drop" / "10.conf").write_text(HEAD + "evictionHard: {memory.available: 1Gi}\n")
    return [
        f"--config={tmp_path / 'config.yaml'}",
        f"--config-dir={tmp_path / 'drop'}",
        f"--root-dir={tmp_path}",
        "--image-gc-high-threshold=90",
    ]


@pytest.mark.parametrize("flag", ["--watch-config", "--use-last-good-config"])
def test_load_or_last_good_invalid_files_use_stored_with_flags_of_now(
    tmp_path: Path, argv: list[str], flag: str
) -> None:
    before = load([*argv, flag])
    save_last_good(before)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    (tmp_path / "config.yaml").write_text(HEAD + "maxPods: many\n")
    loaded = load_or_last_good([*argv[:-1], "--image-gc-high-threshold=95", flag])
    changed = [str(change) for change in differences(before.config, loaded.config)]
    assert changed == ["imageGCHighThresholdPercent: 90 -> 95"]
    assert loaded.config.static_pod_path == str(tmp_path / "manifests")
    assert "maxPods" in loaded.fallback
    assert str(tmp_path / FILE_NAME) in loaded.fallback
    assert loaded.warnings[0] == loaded.fallback
    assert not [warning for warning in loaded.warnings if "no effect" in warning]
    assert loaded.flags.config == str(tmp_path / "config.yaml"), "a reload reads the original files"


def test_load_or_last_good_without_opt_in_fails_and_stores_nothing(tmp_path: Path, argv: list[str]) -> None:
    save_last_good(load(argv))
    assert not (tmp_path / FILE_NAME).exists()
    save_last_good(load([*argv, "--watch-config"]))
    (tmp_path / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_or_last_good(argv)


@pytest.mark.parametrize("stored", [None, "{", HEAD + "maxPods: -1\n"])
def test_load_or_last_good_no_valid_stored_one_fails_with_problems_of_files(
    tmp_path: Path, argv: list[str], stored: str | None
) -> None:
    if stored is not None:
        (tmp_path / FILE_NAME).write_text(stored)
    (tmp_path / "config.yaml").write_text(HEAD + "maxPods: -2\n")
    with pytest.raises(ConfigError, match="maxPods") as failure:
        load_or_last_good([*argv, "--watch-config"])
    assert FILE_NAME not in str(failure.value)


def test_load_or_last_good_invalid_flag_fails(tmp_path: Path, argv: list[str]) -> None:
    save_last_good(load([*argv, "--watch-config"]))
    with pytest.raises(ConfigError, match="--max-pods"):
        load_or_last_good([*argv, "--watch-config", "--max-pods=many"])


def test_load_or_last_good_valid_files_not_stored_ones(tmp_path: Path, argv: list[str]) -> None:
    save_last_good(load([*argv, "--watch-config"]))
    (tmp_path / "config.yaml").write_text(HEAD + "maxPods: 7\n")
    loaded = load_or_last_good([*argv, "--watch-config"])
    assert (loaded.config.max_pods, loaded.fallback) == (7, "")


@pytest.mark.parametrize("flag", ["--watch-config", "--use-last-good-config"])
def test_load_opt_in_without_files_warns(flag: str) -> None:
    loaded = load([flag])
    assert loaded.files is None
    assert any(flag in warning and "--config" in warning for warning in loaded.warnings)
