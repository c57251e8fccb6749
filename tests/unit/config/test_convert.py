"""A converted command line means what the original meant."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pykubelet.config.convert import Converted, convert_flags
from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.flag_table import FLAGS
from pykubelet.config.load import LoadedConfig, load
from pykubelet.config.types import API_VERSION, KIND

from .samples import SAMPLES
from .test_flags import sample


def reload(converted: Converted, folder: Path) -> LoadedConfig:
    file = folder / "converted.yaml"
    file.write_text(converted.yaml)
    return load([f"--config={file}", *converted.flags])


def assert_same(argv: list[str], folder: Path) -> Converted:
    converted = convert_flags(argv)
    before, after = load(argv), reload(converted, folder)
    assert after.config == before.config
    assert dataclasses.replace(after.flags, config="", config_dir="") == dataclasses.replace(
        before.flags, config="", config_dir=""
    )
    assert after.gates.overrides == before.gates.overrides
    return converted


def test_convert_flags_no_flags_writes_legacy_defaults(tmp_path: Path) -> None:
    converted = assert_same([], tmp_path)
    assert converted.flags == []
    assert converted.notes == []
    assert yaml.safe_load(converted.yaml) == {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "readOnlyPort": 10255,
        "authentication": {"webhook": {"enabled": False}, "anonymous": {"enabled": True}},
        "authorization": {"mode": "AlwaysAllow"},
    }


def test_convert_flags_config_fields_moved_other_flags_stay(tmp_path: Path) -> None:
    converted = assert_same(
        [
            "--kubeconfig=/etc/kubeconfig",
            "--max-pods",
            "50",
            "--node-labels=a=b",
            "--node_labels=c=d",
            "--cluster-dns=10.0.0.1",
            "--cluster-dns=10.0.0.2",
            "--containerd=/c.sock",
            "--register-schedulable=false",
            "--exit-on-lock-contention",
            "--lock-file=/l",
            "-v=2",
        ],
        tmp_path,
    )
    document = yaml.safe_load(converted.yaml)
    assert document["maxPods"] == 50
    assert document["clusterDNS"] == ["10.0.0.1", "10.0.0.2"]
    assert document["logging"] == {"verbosity": 2}
    assert converted.flags == [
        "--kubeconfig=/etc/kubeconfig",
        "--node-labels=a=b",
        "--node-labels=c=d",
        "--register-schedulable=false",
        "--exit-on-lock-contention",
        "--lock-file=/l",
    ]
    assert converted.notes == ["--containerd is left out: it has no effect"]


def test_convert_flags_dependent_default_written_explicitly(tmp_path: Path) -> None:
    converted = assert_same(["--node-status-update-frequency=20s"], tmp_path)
    assert yaml.safe_load(converted.yaml)["nodeStatusReportFrequency"] == "5m0s"


def test_convert_flags_empty_eviction_hard_preserved(tmp_path: Path) -> None:
    assert yaml.safe_load(assert_same(["--eviction-hard="], tmp_path).yaml)["evictionHard"] == {}


def test_convert_flags_zero_not_expressible_in_file_stays_flag(tmp_path: Path) -> None:
    converted = assert_same(["--registry-burst=0", "--kube-api-burst=0"], tmp_path)
    assert "--registry-burst=0" in converted.flags
    assert "registryBurst" not in converted.yaml
    assert any("--registry-burst stays a flag" in note for note in converted.notes)


def test_convert_flags_relative_paths_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    converted = convert_flags(["--pod-manifest-path=manifests"])
    assert yaml.safe_load(converted.yaml)["staticPodPath"] == str(tmp_path / "manifests")
    assert any("staticPodPath" in note for note in converted.notes)


def test_convert_flags_config_file_and_drop_ins_merged(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "old.yaml").write_text(
        json.dumps({"apiVersion": API_VERSION, "kind": KIND, "maxPods": 5, "port": 1234})
    )
    (tmp_path / "conf.d" / "a.conf").write_text(
        json.dumps(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "maxPods": 6,
                "evictionHard": {"memory.available": "1Gi"},
            }
        )
    )
    converted = assert_same(
        [f"--config={tmp_path}/old.yaml", f"--config-dir={tmp_path}/conf.d", "--max-pods=7"], tmp_path
    )
    document = yaml.safe_load(converted.yaml)
    assert (document["maxPods"], document["port"]) == (7, 1234)
    assert document["evictionHard"]["memory.available"] == "1Gi"
    assert "authentication" not in document
    assert converted.flags == []
    assert len(converted.notes) == 2


def test_convert_flags_invalid_flag_raises_config_error() -> None:
    with pytest.raises(ConfigError):
        convert_flags(["--max-pods=many"])


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("pick", [0, 1])
def test_convert_flags_each_flag_same_configuration(name: str, pick: int, tmp_path: Path) -> None:
    chosen = SAMPLES[name]
    assert_same([*chosen.beside, f"--{name}={chosen[pick]}"], tmp_path)


ARGUMENTS = [f"--{name}={text}" for name, chosen in SAMPLES.items() for text in chosen[:2]] + [
    f"--{flag.name}={sample(flag)[0]}"
    for flag in FLAGS
    if not flag.field and flag.name not in ("help", "version", "config", "config-dir")
]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(ARGUMENTS), max_size=12))
def test_convert_flags_any_flags_same_configuration(argv: list[str]) -> None:
    try:
        load(argv)
    except ConfigError:
        assume(False)
    with tempfile.TemporaryDirectory() as folder:
        assert_same(argv, Path(folder))
