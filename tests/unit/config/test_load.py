"""The whole way from a command line to flags, configuration and gates, and everything that can be wrong."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.flags.flag_table import BY_NAME, FLAGS, default_text
from pykubelet.config.load import baseline, load
from pykubelet.config.no_effect import flag_reason
from pykubelet.config.types import API_VERSION, KIND

from .samples import SAMPLES, Sample
from .test_flags import REFERENCE, sample

NEWER_DEFAULTS = {
    "container-runtime-endpoint": ("unix:///run/containerd/containerd.sock", "v1.36 has a default"),
    "enforce-node-allocatable": ("pods", "the reference's list shows it in brackets"),
    "event-burst": ("100", "raised in v1.27"),
    "event-qps": ("50", "raised in v1.27"),
    "eviction-hard": (
        "imagefs.available<15%,imagefs.inodesFree<5%,memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%",
        "v1.36 has a fifth threshold",
    ),
    "kube-api-burst": ("100", "raised in v1.27"),
    "kube-api-qps": ("50", "raised in v1.27"),
    "logging-format": ("text", "the reference's list leaves it out"),
}


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", REFERENCE)
def test_load_flag_defaults_match_upstream(name: str) -> None:
    expected, _ = NEWER_DEFAULTS.get(name, (REFERENCE[name][1], ""))
    assert default_text(BY_NAME[name], baseline()) == expected
    if name in NEWER_DEFAULTS:
        assert expected != REFERENCE[name][1], "no longer a difference"


def test_load_without_flags_yields_standalone_baseline() -> None:
    loaded = load([])
    assert loaded.action == "run"
    assert loaded.warnings == []
    assert loaded.flag_values["config"] == ""
    assert loaded.config == baseline()
    assert loaded.flags.standalone


@pytest.mark.parametrize(
    ("argv", "action"),
    [
        (["--help"], "help"),
        (["-h", "--config=/does/not/exist"], "help"),
        (["--version"], "version"),
        (["--version=raw", "--max-pods=-1"], "version"),
        (["--version=false"], "run"),
        (["--version=v1.36.0-mine"], "run"),
        (["--help", "--version"], "help"),
    ],
)
def test_load_help_and_version_flags_select_action(argv: list[str], action: str) -> None:
    assert load(argv).action == action


def test_load_help_with_unknown_flag_reports_problem() -> None:
    assert problems("--help", "--hlep") == ["--hlep: there is no such flag: did you mean --help?"]


def test_load_config_file_flags_one_common_warning() -> None:
    (line,) = load(["--max-pods=5", "--port=10260", "--max-pods=6", "-v2", "--cert-dir=/c"]).warnings
    assert "--max-pods, --port" in line
    assert "--config" in line
    assert "-v" not in line


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_load_each_flag_warns_by_status(flag: Any, tmp_path: Path) -> None:
    text, _, beside = SAMPLES.get(flag.name, Sample(*sample(flag)))
    config = tmp_path / "config.yaml"
    kind = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    config.write_text(json.dumps(kind | {"shutdownGracePeriod": "30s"}))
    companions = {
        "drain-on-stop": [f"--config={config}"],
        "use-last-good-config": [f"--config={config}"],
        "watch-config": [f"--config={config}"],
        "exit-on-lock-contention": ["--lock-file=/l"],
        "bootstrap-kubeconfig": ["--kubeconfig=/k"],
        "image-credential-provider-config": ["--image-credential-provider-bin-dir=/b"],
        "image-credential-provider-bin-dir": ["--image-credential-provider-config=/c"],
    }
    if flag.name in ("config", "config-dir"):
        return
    if flag.name == "node-ip":
        text = "10.0.0.1"
    loaded = load([*beside, *companions.get(flag.name, []), f"--{flag.name}={text}"])
    about = [line for line in loaded.warnings if re.search(rf"--{flag.name}(?![\w-])", line)]
    words = {"file": "belong in", "deprecated": "is deprecated"}
    expected = "is set but has no effect" if flag_reason(flag) else words.get(flag.status, "")
    assert [expected in line for line in about] == ([True] if expected else [])
    if flag.attribute:
        assert getattr(loaded.flags, flag.attribute) == flag.kind.parse(text)


def test_load_several_problems_in_flags_file_and_gates_all_reported(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        json.dumps(
            {"apiVersion": API_VERSION, "kind": KIND, "maxPods": -5, "featureGates": {"NodeSwop": True}}
        )
    )
    lines = problems(
        f"--config={file}",
        "--prot=1",
        "--sync-frequency=10",
        "--feature-gates=SidecarContainers=false",
        "--node-labels=kubernetes.io/mine=1",
        "--image-gc-high-threshold=200",
        "serve",
    )
    text = "\n".join(lines)
    for place in (
        "--prot:",
        "--sync-frequency:",
        "'serve':",
        "--feature-gates: SidecarContainers",
        "featureGates.NodeSwop:",
        "--node-labels:",
        "maxPods",
        "imageGCHighThresholdPercent",
        "(set by --image-gc-high-threshold)",
    ):
        assert place in text
    assert len(set(lines)) == len(lines)


def test_load_unreadable_config_file_other_problems_still_reported(tmp_path: Path) -> None:
    lines = problems(f"--config={tmp_path}", "--port=-1", "--node-ip=nowhere")
    assert any(str(tmp_path) in line and "folder" in line for line in lines)
    assert any(line.startswith("port") and "--port" in line for line in lines)
    assert any(line.startswith("--node-ip") for line in lines)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--node-labels=kubernetes.io/role=x"], ["--node-labels", "kubelet.kubernetes.io"]),
        (["--node-labels=sub.k8s.io/role=x"], ["may not set itself"]),
        (["--node-labels=-bad=x"], ["the key '-bad'"]),
        (["--node-labels=a=b c"], ["the value 'b c' of 'a'"]),
        (["--node-ip=10.0.0.1,10.0.0.2"], ["--node-ip", "IPv4 and an IPv6"]),
        (["--node-ip=10.0.0.1,fd00::1,fd00::2"], ["--node-ip", "IPv4 and an IPv6"]),
        (["--node-ip=0.0.0.0,fd00::1"], ["stand alone"]),
        (["--node-ip=node-1"], ["not an IP address"]),
        (["--hostname-override=my node"], ["--hostname-override", "node-1.example.com"]),
        (["--hostname-override= "], ["--hostname-override"]),
        (["--drain-on-stop"], ["--drain-on-stop", "shutdownGracePeriod"]),
        (["--page-port=70000"], ["--page-port", "70000 is not a port"]),
        (["--cadvisor-port=-1"], ["--page-port", "-1 is not a port"]),
        (["--exit-on-lock-contention"], ["--lock-file"]),
        (["--image-credential-provider-config=/c"], ["--image-credential-provider-bin-dir"]),
        (["--image-credential-provider-bin-dir=/c"], ["--image-credential-provider-config"]),
        (["--housekeeping-interval=0s"], ["--housekeeping-interval", "longer than 0s"]),
        (["--runonce", "--kubeconfig=/k"], ["--runonce", "--kubeconfig"]),
        (["--cloud-provider=aws"], ["--cloud-provider", "external"]),
        (["--container-runtime=docker"], ["--container-runtime", "--container-runtime-endpoint"]),
        (["--feature-gates=Nope=true"], ["--feature-gates", "Nope"]),
        (["--feature-gates=WorkloadWithJob=true"], ["--feature-gates", "needs GenericWorkload"]),
    ],
)
def test_load_invalid_flag_value_reported(argv: list[str], words: list[str]) -> None:
    (line,) = problems(*argv)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "argv",
    [
        ["--node-labels=role=web,x.io/a=,kubernetes.io/hostname=a,a.node.kubernetes.io/b=c,node.kubernetes.io/d=e"],
        ["--node-ip="],
        ["--node-ip=::"],
        ["--node-ip=10.0.0.1, fd00::1"],
        ["--hostname-override=Node-1.Example.com"],
        ["--runonce", "--pod-manifest-path=/m"],
        ["--cloud-provider="],
    ],
)  # fmt: skip
def test_load_valid_flag_values_accepted(argv: list[str]) -> None:
    load(argv)


def test_load_node_ip_flag_split_into_addresses() -> None:
    assert load(["--node-ip=10.0.0.1, fd00::1"]).flags.node_ips == ("10.0.0.1", "fd00::1")
    assert load([]).flags.node_ips == ()


def test_load_bootstrap_kubeconfig_without_kubeconfig_warns() -> None:
    (line,) = load(["--bootstrap-kubeconfig=/b"]).warnings
    assert "--kubeconfig" in line


def test_load_kubelet_cgroups_outside_kube_reserved_cgroup_warns() -> None:
    warnings = load(["--kubelet-cgroups=/agent", "--kube-reserved-cgroup=/kube"]).warnings
    assert any("outside kubeReservedCgroup" in line for line in warnings)
    warnings = load(["--kubelet-cgroups=/kube/agent", "--kube-reserved-cgroup=/kube"]).warnings
    assert not any("outside" in line for line in warnings)


def test_load_flag_values_redact_secrets() -> None:
    shown = load(
        [
            "--manifest-url-header=Authorization:Bearer hunter2",
            "--manifest-url=https://me:hunter2@example.com/",
            "--storage-driver-password=hunter2",
            "--authorization-mode=Webhook",
            "--cluster-dns=10.0.0.1",
            "--cluster-dns=10.0.0.2",
        ]
    ).flag_values
    assert "hunter2" not in str(shown)
    assert shown["authorization-mode"] == "Webhook"
    assert shown["cluster-dns"] == "10.0.0.1,10.0.0.2"


def test_load_log_options_from_flags() -> None:
    options = load(
        [
            "-v4",
            "--vmodule=loop=5",
            "--logtostderr=false",
            "--log-file=/l",
            "--stderrthreshold=1",
            "--skip-headers",
        ]
    ).log_options()
    assert (options.verbosity, options.vmodule, options.to_stderr, options.file) == (
        4,
        [("loop", 5)],
        False,
        "/l",
    )
    assert options.stderr_threshold == logging.WARNING
    assert not options.headers
    split = load(
        ["--logging-format=json", "--log-json-split-stream", "--feature-gates=LoggingAlphaOptions=true"]
    )
    assert split.log_options().format == "json"
    assert split.log_options().split_stream


WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from([f"--{flag.name}" for flag in FLAGS]),
    st.builds(
        lambda flag, texts, pick: f"--{flag.name}={texts[pick]}",
        st.shared(st.sampled_from(FLAGS), key="flag"),
        st.shared(st.sampled_from(FLAGS), key="flag").map(sample),
        st.integers(0, 1),
    ),
    st.builds(lambda flag, text: f"--{flag.name}={text}", st.sampled_from(FLAGS), st.text(max_size=20)),
    st.builds(lambda name, number: f"--{name}={number}", st.sampled_from(sorted(SAMPLES)), st.integers()),
)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=6))
@example(["--config-dir=" + "x" * 300])
@example(["--config=" + "x" * 5000])
@example(["--config=/proc/self/mem"])
@example(["--config=\udcff\ud800"])
def test_load_any_arguments_loaded_or_reported(argv: list[str]) -> None:
    found: list[Problem] = []
    try:
        load(argv)
    except ConfigError as error:
        found = error.problems or [Problem("", "\n")]
    assert all("\n" not in str(problem) for problem in found)


@pytest.mark.parametrize("with_priority", [True, False])
def test_load_drain_on_stop_without_gate_reported(tmp_path: Path, with_priority: bool) -> None:
    """Verify that no configuration with periods disables the drain, by whichever gate."""
    config = tmp_path / "config.yaml"
    off = {"GracefulNodeShutdown": False, "WindowsGracefulNodeShutdown": False}
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "featureGates": off | {"GracefulNodeShutdownBasedOnPodPriority": with_priority},
        "shutdownGracePeriodByPodPriority": [{"priority": 0, "shutdownGracePeriodSeconds": 30}],
    }
    config.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="GracefulNodeShutdownBasedOnPodPriority"):
        load([f"--config={config}", "--drain-on-stop"])
