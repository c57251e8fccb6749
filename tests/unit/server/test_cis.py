"""Section 4.2 of the CIS Kubernetes Benchmark, against the configuration that `up` writes for a cluster."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pykubelet.cli.node.up import cluster_config
from pykubelet.config.load import LoadedConfig, load
from pykubelet.server.tls import TlsSettings, server_context
from pykubelet.standalone.instance import Instance

STRONG = ("ECDHE-ECDSA-AES", "ECDHE-RSA-AES", "ECDHE-ECDSA-CHACHA20", "ECDHE-RSA-CHACHA20", "TLS_")
PAGE = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    authority = tmp_path / "ca.crt"
    authority.touch()
    config = tmp_path / "kubelet.yaml"
    document = cluster_config(Instance.at(tmp_path / "d"), "unix:///run/containerd.sock", authority)
    config.write_text(yaml.safe_dump(document))
    return load([f"--config={config}", f"--kubeconfig={tmp_path / 'kubeconfig'}"])


def _ciphers_are_strong(loaded: LoadedConfig) -> bool:
    context = server_context(TlsSettings.from_config(loaded.config, request_certificates=True))
    ciphers = context.get_ciphers()
    return bool(ciphers) and all(
        cipher["name"].startswith(STRONG) and ("GCM" in cipher["name"] or "POLY1305" in cipher["name"])
        for cipher in ciphers
    )


CHECKS: dict[str, Callable[[LoadedConfig], object]] = {
    "4.2.1": lambda loaded: not loaded.config.authentication.anonymous.enabled,
    "4.2.2": lambda loaded: loaded.config.authorization.mode == "Webhook",
    "4.2.3": lambda loaded: loaded.config.authentication.x509.client_ca_file,
    "4.2.4": lambda loaded: loaded.config.read_only_port == 0,
    "4.2.5": lambda loaded: loaded.config.streaming_connection_idle_timeout.seconds > 0,
    "4.2.6": lambda loaded: loaded.config.make_iptables_util_chains,
    "4.2.7": lambda loaded: not loaded.flags.hostname_override,
    "4.2.8": lambda loaded: loaded.config.event_record_qps >= 0,
    "4.2.10": lambda loaded: loaded.config.rotate_certificates,
    "4.2.11": lambda loaded: loaded.gates.enabled("RotateKubeletServerCertificate"),
    "4.2.12": _ciphers_are_strong,
    "4.2.13": lambda loaded: loaded.config.pod_pids_limit > 0,
    "4.2.14": lambda loaded: loaded.config.seccomp_default,
}


def test_up_cluster_config_cis_benchmark_equals_docs(loaded: LoadedConfig) -> None:
    told = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| 4.2."):
            _, number, _, state, _ = (cell.strip() for cell in line.split("|"))
            told[number] = state.split()[0].rstrip(":")
    assert set(told) == {*CHECKS, "4.2.9"}
    assert told.pop("4.2.9") == "manual"
    assert {number: "passes" if check(loaded) else "fails" for number, check in CHECKS.items()} == told
