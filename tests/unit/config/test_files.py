"""The configuration file and its drop-ins: kinds, order, merging, paths, and all problems at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.config.codec import to_document, to_yaml
from pykubelet.config.errors import ConfigError
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.load import find_drop_ins, load_config_files, merge_patch
from pykubelet.config.types import DEFAULT_EVICTION_HARD, KubeletConfiguration
from pykubelet.config.validation.validate import validate

SAMPLES = Path(__file__).parents[2] / "data"
HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


def gates_for(in_file: dict[str, bool]) -> Callable[[str], bool]:
    return FeatureGates().with_overrides(in_file).enabled


def load(path: Path | None, drop_ins: Path | None = None) -> KubeletConfiguration:
    return load_config_files(path, drop_ins, gates_for).config


def problems_of(path: Path | None, drop_ins: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, drop_ins)
    return str(caught.value).splitlines()


def write(path: Path, body: str, head: str = HEAD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + body)
    return path


def test_load_config_files_kubeadm_file_is_valid() -> None:
    config = load(SAMPLES / "kubelet-kubeadm-v1.25.yaml")
    assert validate(config, gates_for(config.feature_gates)) == []
    assert config.cgroup_driver == "systemd"
    assert config.cluster_dns == ["10.96.0.10"]
    assert config.static_pod_path == "/etc/kubernetes/manifests"
    assert config.rotate_certificates
    changed = {
        field
        for field, value in to_document(config).items()
        if value != to_document(KubeletConfiguration())[field]
    }
    assert changed == {
        "authentication",
        "cgroupDriver",
        "clusterDNS",
        "clusterDomain",
        "crashLoopBackOff",
        "evictionHard",
        "resolvConf",
        "rotateCertificates",
        "staticPodPath",
    }, "zero durations and empty blocks are the defaults"


def test_load_config_files_hand_written_file_is_valid() -> None:
    path = SAMPLES / "kubelet-hand-built-v1.25.yaml"
    config = load(path)
    assert validate(config, gates_for(config.feature_gates)) == []
    assert config.static_pod_path == str(SAMPLES.resolve() / "manifests")
    assert config.tls_cert_file == str(SAMPLES.resolve() / "pki/kubelet.crt")
    assert config.authentication.x509.client_ca_file == "/etc/kubernetes/ca.pem"
    assert config.volume_plugin_dir == "/usr/libexec/kubernetes/kubelet-plugins/volume/exec"
    assert config.rotate_certificates
    assert config.resolv_conf == ""
    assert config.event_record_qps == 0
    assert config.read_only_port == 10255
    assert config.image_gc_high_threshold_percent == 85
    assert config.iptables_drop_bit == 15
    assert config.eviction_hard["pid.available"] == "1000"
    assert config.eviction_minimum_reclaim == {"nodefs.available": "1Gi", "imagefs.available": "5%"}
    assert config.logging.flush_frequency == Duration.parse("5s")
    assert config.reserved_memory[0].limits == {"memory": "1100Mi", "hugepages-2Mi": "1024"}
    assert config.volume_stats_agg_period == Duration.parse("-1s")


def test_load_config_files_to_yaml_roundtrip(tmp_path: Path) -> None:
    for sample in ("kubelet-kubeadm-v1.25.yaml", "kubelet-hand-built-v1.25.yaml"):
        config = load(SAMPLES / sample)
        (tmp_path / "again.yaml").write_text(to_yaml(config))
        assert load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("", ["apiVersion: is missing: write", "kind: is missing: write"]),
        (
            "kind: KubeletConfiguration\n",
            ["apiVersion: is missing: write apiVersion: kubelet.config.k8s.io/v1beta1"],
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v1beta1\n",
            ["kind: is missing: write kind: KubeletConfiguration"],
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v1\nkind: KubeletConfiguration\n",
            ["apiVersion: is 'kubelet.config.k8s.io/v1', which"],
        ),
        (
            "apiVersion: v1\nkind: Pod\n",
            ["apiVersion: is 'v1', which", "kind: is 'Pod', which this agent cannot read"],
        ),
        ("apiVersion: 1\nkind: [a]\n", ["apiVersion: is not text, which", "kind: is not text, which"]),
    ],
)
def test_load_config_files_other_kind_or_api_version_rejected(
    tmp_path: Path, head: str, expected: list[str]
) -> None:
    path = write(tmp_path / "kubelet.yaml", "nonsense: 1\n", head)
    found = [line.removeprefix(f"{path}: ") for line in problems_of(path)]
    assert len(found) == len(expected), "the fields of another kind are not looked at"
    assert all(problem.startswith(start) for problem, start in zip(found, expected, strict=True))


def test_load_config_files_json_accepted(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.json"
    path.write_text(
        '{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "maxPods": 7}'
    )
    assert load(path).max_pods == 7


def test_load_config_files_without_file_uses_legacy_defaults() -> None:
    config = load(None)
    assert config.authorization.mode == "AlwaysAllow"
    assert config.read_only_port == 10255
    assert config.eviction_hard == DEFAULT_EVICTION_HARD
    assert validate(config, gates_for({})) == []


def test_load_config_files_relative_paths_resolved_against_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "staticPodPath: a\ntlsCertFile: ./b\ntlsPrivateKeyFile: ../c\nresolvConf: d\nvolumePluginDir: e/\n"
        "podLogsDir: f\nauthentication: {x509: {clientCAFile: g}}\ncgroupRoot: h\n"
    )
    write(tmp_path / "etc/kubelet.yaml", body)
    monkeypatch.chdir(tmp_path)
    config = load(Path("etc/kubelet.yaml"))
    assert config.static_pod_path == f"{tmp_path}/etc/a"
    assert config.tls_cert_file == f"{tmp_path}/etc/b"
    assert config.tls_private_key_file == f"{tmp_path}/c"
    assert config.resolv_conf == f"{tmp_path}/etc/d"
    assert config.volume_plugin_dir == f"{tmp_path}/etc/e"
    assert config.pod_logs_dir == f"{tmp_path}/etc/f"
    assert config.authentication.x509.client_ca_file == f"{tmp_path}/etc/g"
    assert config.cgroup_root == "h"


def test_load_config_files_feature_gates_in_file_affect_defaults(tmp_path: Path) -> None:
    body = "featureGates: {KubeletEnsureSecretPulledImages: false, KubeletCrashLoopBackOffMax: false}\n"
    config = load(write(tmp_path / "kubelet.yaml", body))
    assert config.image_pull_credentials_verification_policy == ""
    assert config.crash_loop_back_off.max_container_restart_period is None
    assert validate(config, gates_for(config.feature_gates)) == []


def test_find_drop_ins_sorted_and_other_files_skipped(tmp_path: Path) -> None:
    used = ["10-a.conf", "20/x.conf", "20/y/z.conf", "20.conf", "é.conf"]
    hidden = [".conf", ".hidden.conf"]
    skipped = ["20/x.yaml", "README", "b.conf.bak", "c.yaml"]
    for name in (*used, *hidden, *skipped):
        write(tmp_path / name, "")
    (tmp_path / "folder.conf").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "20")
    found = find_drop_ins(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.used] == sorted(hidden) + used
    assert sorted(str(path.relative_to(tmp_path)) for path in found.skipped) == sorted(
        [*skipped, "elsewhere"]
    )


def test_load_config_files_drop_in_directory_symlink_followed(tmp_path: Path) -> None:
    write(tmp_path / "real/a.conf", "maxPods: 5\n")
    (tmp_path / "link").symlink_to("real")
    assert load(None, tmp_path / "link").max_pods == 5


def test_load_config_files_drop_ins_merged_like_upstream(tmp_path: Path) -> None:
    main = write(
        tmp_path / "kubelet.yaml",
        "maxPods: 50\nport: 1234\nclusterDNS: [10.0.0.1]\nsystemReserved: {cpu: 1m, memory: 1Mi}\n"
        "authentication: {webhook: {enabled: false}}\npodsPerCore: 3\nstaticPodPath: manifests\n",
    )
    write(
        tmp_path / "d/10.conf",
        "maxPods: 60\nclusterDNS: [10.0.0.2, 10.0.0.3]\nsystemReserved: {cpu: 2m, pid: '5'}\n"
        "authentication: {anonymous: {enabled: true}}\nevictionHard: {memory.available: 1Gi}\n",
    )
    write(
        tmp_path / "d/20.conf",
        "maxPods: 70\nport: null\nsystemReserved: {memory: null}\nnodeStatusUpdateFrequency: 20s\n"
        "tlsCertFile: relative\n",
    )
    config = load(main, tmp_path / "d")
    assert config.max_pods == 70
    assert config.port == 10250, "null takes a field back to its default"
    assert config.cluster_dns == ["10.0.0.2", "10.0.0.3"], "lists are replaced"
    assert config.system_reserved == {"cpu": "2m", "pid": "5"}, "maps are merged"
    assert not config.authentication.webhook.enabled
    assert config.authentication.anonymous.enabled
    assert config.pods_per_core == 3
    assert config.eviction_hard == {**DEFAULT_EVICTION_HARD, "memory.available": "1Gi"}
    assert config.node_status_report_frequency == Duration.parse("5m"), "the main file's default stays"
    assert config.static_pod_path == f"{tmp_path}/manifests"
    assert config.tls_cert_file == "relative", "only the main file's paths are resolved"


def test_load_config_files_drop_ins_without_main_file_override_legacy_defaults(tmp_path: Path) -> None:
    write(tmp_path / "a.conf", "maxPods: 5\nauthorization: {mode: Webhook}\n")
    config = load(None, tmp_path)
    assert (config.max_pods, config.authorization.mode, config.read_only_port) == (5, "Webhook", 10255)


def test_load_config_files_drop_in_disables_feature_gate(tmp_path: Path) -> None:
    main = write(tmp_path / "kubelet.yaml", "")
    write(tmp_path / "d/a.conf", "featureGates: {KubeletEnsureSecretPulledImages: false}\n")
    write(tmp_path / "d/b.conf", "featureGates: {KubeletCrashLoopBackOffMax: false}\n")
    config = load(main, tmp_path / "d")
    assert config.image_pull_credentials_verification_policy == ""
    assert config.crash_loop_back_off.max_container_restart_period is None


def test_load_config_files_empty_drop_in_directory_changes_nothing(tmp_path: Path) -> None:
    main = write(tmp_path / "kubelet.yaml", "enforceNodeAllocatable: []\nmaxPods: 9\n")
    (tmp_path / "d").mkdir()
    assert load(main, tmp_path / "d") == load(main)


def test_load_config_files_several_files_all_problems_name_their_file(tmp_path: Path) -> None:
    main = write(tmp_path / "kubelet.yaml", "maxPods: x\nnope: 1\n")
    write(tmp_path / "d/1.conf", "port: x\n")
    write(tmp_path / "d/2.conf", "", "kind: Pod\napiVersion: v1\n")
    (tmp_path / "d/3.conf").touch()
    write(tmp_path / "d/4.conf", "a: 1\na: 2\n")
    (tmp_path / "d/5.conf").symlink_to(tmp_path)
    found = problems_of(main, tmp_path / "d")
    assert [line.removeprefix(f"{tmp_path}/").split(":")[:2] for line in found] == [
        ["d/2.conf", " apiVersion"],
        ["d/2.conf", " kind"],
        ["d/3.conf", " is empty"],
        ["d/4.conf", " line 4"],
        ["d/5.conf", " is a folder"],
        ["kubelet.yaml", " maxPods"],
        ["kubelet.yaml", " nope"],
        ["d/1.conf", " port"],
    ]


def test_load_config_files_malformed_and_invalid_fields_all_reported(tmp_path: Path) -> None:
    path = write(
        tmp_path / "kubelet.yaml",
        "maxPods: x\nport: 99999\ne: 1\n.: 2\n"
        "imageGCHighThresholdPercent: x\nimageGCLowThresholdPercent: 90\n"
        "evictionHard: {memory.available: '0', pid.available: 5}\n",
    )
    assert [line.split(":")[0] for line in problems_of(path)] == [
        "maxPods",
        "imageGCHighThresholdPercent",
        "evictionHard[pid.available]",
        "e",
        "[.]",
        "port",
    ], "what is compared with a malformed field is not judged"


def test_load_config_files_single_file_problem_omits_file_name(tmp_path: Path) -> None:
    path = write(tmp_path / "kubelet.yaml", "maxPods: x\n")
    assert problems_of(path) == ["maxPods: must be a whole number, not the text 'x'"]


def test_load_config_files_drop_in_directory_missing_reported(tmp_path: Path) -> None:
    main = write(tmp_path / "kubelet.yaml", "maxPods: x\n")
    assert problems_of(main, tmp_path / "none") == [
        f"{tmp_path}/none: is not a folder: give the folder of the drop-in files",
        "maxPods: must be a whole number, not the text 'x'",
    ]


def test_load_config_files_feature_gate_problems_propagated(tmp_path: Path) -> None:
    def strict(in_file: dict[str, bool]) -> Callable[[str], bool]:
        gates = FeatureGates().with_overrides(in_file)
        if gates.problems:
            raise ConfigError(gates.problems)
        return gates.enabled

    path = write(tmp_path / "kubelet.yaml", "featureGates: {NoSuchGate: true}\n")
    with pytest.raises(ConfigError, match="NoSuchGate"):
        load_config_files(path, None, strict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(MAPPINGS, MAPPINGS)
def test_merge_patch_idempotent_and_null_removes_key(target: dict[str, Any], patch: dict[str, Any]) -> None:
    merged = merge_patch(target, patch)
    assert merge_patch(merged, patch) == merged, "merging twice is merging once"
    assert merge_patch(target, {}) == target
    for key in target.keys() | patch.keys():
        if key not in patch:
            assert merged[key] == target[key]
        elif patch[key] is None:
            assert key not in merged
        elif not isinstance(patch[key], dict):
            assert merged[key] == patch[key]
        else:
            assert merged[key] == merge_patch(target.get(key), patch[key])
