"""Default, file, drop-in, flag: each wins over what is before it, for every field that has a flag."""

import json
from pathlib import Path
from typing import Any

import pytest

from pykubelet.config.codec import to_document
from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import FLAGS, field_path, get_field, set_field
from pykubelet.config.load import baseline, load
from pykubelet.config.types import API_VERSION, KIND, KubeletConfiguration

from .samples import SAMPLES

FIELD_FLAGS = [flag for flag in FLAGS if flag.field]


def write(path: Path, **fields: Any) -> str:
    path.write_text(json.dumps({"apiVersion": API_VERSION, "kind": KIND, **fields}))
    return str(path)


def write_field(path: Path, flag: Flag, text: str) -> str:
    """Write a file in which one field has the value that a flag's text stands for."""
    config = KubeletConfiguration()
    set_field(config, flag.field, flag.kind.parse(text))
    value: Any = to_document(config)
    names = field_path(flag.field).split(".")
    for name in names:
        value = value[name]
    for name in reversed(names):
        value = {name: value}
    return write(path, **value)


def test_precedence_samples_cover_every_field_flag() -> None:
    assert set(SAMPLES) == {flag.name for flag in FIELD_FLAGS}


@pytest.mark.parametrize("flag", FIELD_FLAGS, ids=lambda flag: flag.name)
def test_precedence_flag_over_file_over_default(flag: Flag, tmp_path: Path) -> None:
    sample = SAMPLES[flag.name]
    one, other = flag.kind.parse(sample.one), flag.kind.parse(sample.other)
    assert get_field(baseline(), flag.field) != one
    assert one != other
    file = write_field(tmp_path / "config.yaml", flag, sample.one)

    def value(*argv: str) -> Any:
        return get_field(load([*sample.beside, *argv]).config, flag.field)

    assert value(f"--config={file}") == one
    assert value(f"--config={file}", f"--{flag.name}={sample.other}") == other
    assert value(f"--{flag.name}={sample.other}", f"--config={file}") == other
    assert value(f"--{flag.name}={sample.other}") == other


@pytest.mark.parametrize("flag", FIELD_FLAGS, ids=lambda flag: flag.name)
def test_precedence_flag_over_drop_in_over_file(flag: Flag, tmp_path: Path) -> None:
    sample = SAMPLES[flag.name]
    one, other = flag.kind.parse(sample.one), flag.kind.parse(sample.other)
    (tmp_path / "conf.d").mkdir()
    file = write(tmp_path / "config.yaml")
    write_field(tmp_path / "conf.d" / "10-one.conf", flag, sample.one)
    argv = [*sample.beside, f"--config={file}", f"--config-dir={tmp_path / 'conf.d'}"]
    merged = get_field(load(argv).config, flag.field)
    assert merged == ({**get_field(baseline(), flag.field), **one} if isinstance(one, dict) else one)
    assert get_field(load([*argv, f"--{flag.name}={sample.other}"]).config, flag.field) == other


def test_precedence_without_config_file_legacy_defaults_used(tmp_path: Path) -> None:
    config = load([]).config
    assert config.authentication.anonymous.enabled
    assert not config.authentication.webhook.enabled
    assert config.authorization.mode == "AlwaysAllow"
    assert config.read_only_port == 10255
    config = load(["--config", write(tmp_path / "config.yaml")]).config
    assert not config.authentication.anonymous.enabled
    assert config.authentication.webhook.enabled
    assert config.authorization.mode == "Webhook"
    assert config.read_only_port == 0


def test_precedence_drop_ins_without_config_file_override_legacy_defaults(tmp_path: Path) -> None:
    write(tmp_path / "10.conf", maxPods=7, authorization={"mode": "Webhook"})
    config = load(["--config-dir", str(tmp_path)]).config
    assert (config.max_pods, config.authorization.mode) == (7, "Webhook")
    assert config.authentication.anonymous.enabled
    assert config.read_only_port == 10255


def test_precedence_feature_gates_merged_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "config.yaml", featureGates={"EventedPLEG": True, "MemoryQoS": True})
    loaded = load([f"--config={file}", "--feature-gates=MemoryQoS=false,QOSReserved=true"])
    assert loaded.config.feature_gates == {"EventedPLEG": True, "MemoryQoS": False, "QOSReserved": True}
    assert [loaded.gates.enabled(name) for name in loaded.config.feature_gates] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("memory.available<1Gi", {"evictionHard": {"nodefs.available": "5%"}}, {"memory.available": "1Gi"}),
        ("", {"evictionHard": {"nodefs.available": "5%"}}, {}),
        ("memory.available<1Gi", {"mergeDefaultEvictionSettings": True}, {"memory.available": "1Gi"}),
    ],
)
def test_precedence_eviction_hard_flag_replaces_map_of_file(
    text: str, fields: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    file = write(tmp_path / "config.yaml", **fields)
    assert load([f"--eviction-hard={text}", f"--config={file}"]).config.eviction_hard == expected


def test_precedence_flag_does_not_change_defaults_derived_from_file(tmp_path: Path) -> None:
    file = write(tmp_path / "config.yaml", nodeStatusUpdateFrequency="20s")
    config = load([f"--config={file}", "--node-status-update-frequency=30s"]).config
    assert (str(config.node_status_update_frequency), str(config.node_status_report_frequency)) == (
        "30s",
        "20s",
    )
    assert str(load(["--node-status-update-frequency=30s"]).config.node_status_report_frequency) == "5m0s"
