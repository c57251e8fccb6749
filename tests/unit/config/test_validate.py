"""Validation: every rule refuses something, names the field, and lets good values pass."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.config.codec import decode, explicit_fields
from pykubelet.config.errors import Problem
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration, complete
from pykubelet.config.validation import validate as validate_pods
from pykubelet.config.validation import validate_resources as validate_eviction
from pykubelet.config.validation import validate_resources as validate_managers
from pykubelet.config.validation import validate_resources as validate_reserved
from pykubelet.config.validation import validate_serving
from pykubelet.config.validation import validate_serving as validate_tls
from pykubelet.config.validation.validate import validate, validate_machine
from pykubelet.config.validation.validate_rules import check
from tests.unit.config.strategies import structs


def found(document: dict[str, Any], gates: dict[str, bool] | None = None) -> list[Problem]:
    enabled = FeatureGates().with_overrides(gates or {}).enabled
    config, problems = decode(KubeletConfiguration, document)
    assert problems == []
    complete(config, explicit_fields(KubeletConfiguration, document), enabled)
    return validate(config, enabled)


def rows(name: str) -> list[str]:
    text = (Path(__file__).parents[2] / "data" / name).read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


BAD: list[tuple[dict[str, Any], str, str]] = [
    (json.loads(document), path, piece)
    for document, path, piece in (row.split("\t") for row in rows("config-bad-values.tsv"))
]
GOOD: list[dict[str, Any]] = [json.loads(row) for row in rows("config-good-values.txt")]
ALPHA = {"CPUManagerPolicyAlphaOptions": True, "LoggingAlphaOptions": True, "MemoryQoS": True}


@pytest.mark.parametrize(
    ("document", "path", "piece"), BAD, ids=[f"{row[1]}-{n}" for n, row in enumerate(BAD)]
)
def test_validate_invalid_field_reported_with_path(document: dict[str, Any], path: str, piece: str) -> None:
    problems = found(document)
    assert [problem.path for problem in problems] == [path]
    assert piece in problems[0].message


def test_validate_every_rule_has_invalid_sample() -> None:
    themes = (validate_serving, validate_pods, validate_managers)
    config = KubeletConfiguration(cluster_dns=["x"], allowed_unsafe_sysctls=["x"])
    for theme in themes:
        for rule in theme._RULES:
            # A value of another type cannot be judged: only the rule's path is wanted.
            [path] = {
                problem.path.partition("[")[0]
                for problem in check([rule._replace(fault=lambda _: "x")], config)
            }
            assert any(row[1].partition("[")[0] == path for row in BAD), f"no bad value for {path}"


def test_validate_several_invalid_fields_all_reported() -> None:
    independent: dict[str, Any] = {}
    paths = []
    for document, path, _ in BAD:
        # One half of a pair would be set right by the other half.
        pair = path in ("tlsCertFile", "tlsPrivateKeyFile") or "Policy" in path
        if len(document) == 1 and not independent.keys() & document.keys() and not pair:
            independent |= document
            paths.append(path)
    assert len(paths) > 80
    assert set(paths) <= {problem.path for problem in found(independent)}


GATED: list[tuple[dict[str, Any], str, str]] = [
    ({"serverTLSBootstrap": True}, "RotateKubeletServerCertificate", "serverTLSBootstrap"),
    ({"shutdownGracePeriod": "5s"}, "GracefulNodeShutdown", "shutdownGracePeriod"),
    (
        {"shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": 1}]},
        "GracefulNodeShutdownBasedOnPodPriority",
        "shutdownGracePeriodByPodPriority",
    ),
    (
        {"crashLoopBackOff": {"maxContainerRestartPeriod": "10s"}},
        "KubeletCrashLoopBackOffMax",
        "crashLoopBackOff.maxContainerRestartPeriod",
    ),
    (
        {"imagePullCredentialsVerificationPolicy": "AlwaysVerify"},
        "KubeletEnsureSecretPulledImages",
        "imagePullCredentialsVerificationPolicy",
    ),
    (
        {"preloadedImagesVerificationAllowlist": ["a"]},
        "KubeletEnsureSecretPulledImages",
        "preloadedImagesVerificationAllowlist",
    ),
    ({"logging": {"format": "json"}}, "LoggingBetaOptions", "logging.format"),
    (
        {
            "cpuManagerPolicy": "static",
            "reservedSystemCPUs": "0",
            "cpuManagerPolicyOptions": {"distribute-cpus-across-numa": "true"},
        },
        "CPUManagerPolicyBetaOptions",
        "cpuManagerPolicyOptions[distribute-cpus-across-numa]",
    ),
    ({"cpuCFSQuotaPeriod": "50ms"}, "CustomCPUCFSQuotaPeriod", "cpuCFSQuotaPeriod"),
]


@pytest.mark.parametrize(("document", "gate", "path"), GATED, ids=[row[2] for row in GATED])
def test_validate_field_requires_feature_gate(document: dict[str, Any], gate: str, path: str) -> None:
    if path != "preloadedImagesVerificationAllowlist":
        assert found(document) == []
    others = {
        other: False
        for other in ("GracefulNodeShutdownBasedOnPodPriority",)
        if gate == "GracefulNodeShutdown"
    }
    problems = found(document, {gate: False, **others})
    assert [problem.path for problem in problems] == [path]
    assert problems[0].message.endswith(f"needs the feature gate {gate}")


def test_validate_crash_loop_gate_without_max_restart_period_reported() -> None:
    problems = validate(KubeletConfiguration(), lambda gate: gate == "KubeletCrashLoopBackOffMax")
    assert "crashLoopBackOff.maxContainerRestartPeriod" in [problem.path for problem in problems]


def test_validate_consulted_feature_gates_exist() -> None:
    asked: set[str] = set()

    def note(gate: str, on: bool) -> bool:
        asked.add(gate)
        return on

    for on in (True, False):
        for document, *_ in (*GATED, *BAD):
            config, _ = decode(KubeletConfiguration, document)
            complete(config, (), functools.partial(note, on=on))
            validate(config, functools.partial(note, on=on))
    assert {gate for _, gate, _ in GATED} <= asked
    assert {gate: type(FeatureGates().enabled(gate)) for gate in asked} == dict.fromkeys(asked, bool)


@pytest.mark.parametrize("document", GOOD, ids=range(len(GOOD)))
def test_validate_valid_configuration_has_no_problems(document: dict[str, Any]) -> None:
    assert found(document, ALPHA) == []


def test_validate_conflicting_cpu_manager_options_reported() -> None:
    for first, second in validate_managers.CPU_OPTION_CONFLICTS:
        options = {first: "true", second: "true"}
        document = {
            "cpuManagerPolicy": "static",
            "reservedSystemCPUs": "0",
            "cpuManagerPolicyOptions": options,
        }
        assert [problem.path for problem in found(document, ALPHA)] == [f"cpuManagerPolicyOptions[{first}]"]
        assert found({**document, "cpuManagerPolicyOptions": {first: "true", second: "false"}}, ALPHA) == []
    document = {
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": "0",
        "cpuManagerPolicyOptions": {"align-by-socket": "true"},
        "topologyManagerPolicy": "single-numa-node",
    }
    assert [problem.path for problem in found(document, ALPHA)] == [
        "cpuManagerPolicyOptions[align-by-socket]"
    ]


def test_validate_problem_messages_redact_secrets() -> None:
    problems = found({"staticPodURL": "ftp://user:hunter2@h", "staticPodURLHeader": {"X": ["hunter2\n"]}})
    assert len(problems) == 2
    assert "hunter2" not in str(problems)


@pytest.mark.parametrize(
    ("changes", "cgroup_v2", "paths"),
    [
        ({}, False, []),
        ({"fail_cgroup_v1": True}, True, []),
        ({"fail_cgroup_v1": True}, False, ["failCgroupV1"]),
        ({"single_process_oom_kill": False}, False, ["singleProcessOOMKill"]),
        ({"single_process_oom_kill": False}, True, []),
        ({"single_process_oom_kill": True}, False, []),
        ({"reserved_system_cpus": "0-1"}, True, []),
        ({"reserved_system_cpus": "0-2,7"}, True, ["reservedSystemCPUs"]),
    ],
)
def test_validate_machine_host_dependent_fields(
    changes: dict[str, Any], cgroup_v2: bool, paths: list[str]
) -> None:
    config = KubeletConfiguration(**changes)
    problems = validate_machine(config, cgroup_v2=cgroup_v2, online_cpus=frozenset({0, 1}))
    assert [problem.path for problem in problems] == paths


def test_validate_machine_limited_swap_requires_cgroup_v2() -> None:
    config = KubeletConfiguration()
    config.memory_swap.swap_behavior = "LimitedSwap"
    [problem] = validate_machine(config, cgroup_v2=False, online_cpus=frozenset())
    assert problem.path == "memorySwap.swapBehavior"
    assert validate_machine(config, cgroup_v2=True, online_cpus=frozenset()) == []


@settings(max_examples=60, deadline=None)
@given(structs(KubeletConfiguration), st.booleans())
def test_validate_any_configuration_one_line_problems_and_no_mutation(
    config: KubeletConfiguration, gates: bool
) -> None:
    problems = validate(config, lambda _: gates)
    assert all(problem.path and len(str(problem).splitlines()) == 1 for problem in problems)
    assert validate(config, lambda _: gates) == problems, "judging changes nothing"


def test_validate_tables_have_all_signals_enforcements_and_cipher_suites() -> None:
    assert len(validate_eviction.SIGNALS) == 9 + len(validate_eviction.WITH_CACHE_SIGNALS)
    assert len(validate_reserved.ENFORCEMENTS) == 6
    assert len(validate_tls.STRONG_CIPHER_SUITES + validate_tls.WEAK_CIPHER_SUITES) == 27
