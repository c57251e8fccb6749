"""Every field of the reference by name, type and default; and the defaults that depend on others."""

from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from pykubelet.api.duration import Duration
from pykubelet.config.codec import decode, explicit_fields, to_document
from pykubelet.config.documents import plain_value
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import (
    DEFAULT_EVICTION_HARD,
    IntRange,
    KubeletConfiguration,
    PointerMark,
    complete,
    legacy_defaults,
)

DATA = Path(__file__).parents[2] / "data" / "config-fields-v1.36.tsv"
ROWS = [line.split("\t") for line in DATA.read_text().splitlines()[1:]]

TEXT_TYPES = {
    "KubeletAuthorizationMode",
    "ImagePullCredentialsVerificationPolicy",
    "ResourceChangeDetectionStrategy",
    "MemoryReservationPolicy",
}
STRUCT_NAMES = {
    "Authentication": "KubeletAuthentication",
    "X509Authentication": "KubeletX509Authentication",
    "WebhookAuthentication": "KubeletWebhookAuthentication",
    "AnonymousAuthentication": "KubeletAnonymousAuthentication",
    "Authorization": "KubeletAuthorization",
    "WebhookAuthorization": "KubeletWebhookAuthorization",
    "MemorySwap": "MemorySwapConfiguration",
    "Logging": "logsapi.LoggingConfiguration",
    "CrashLoopBackOff": "CrashLoopBackOffConfig",
    "Taint": "v1.Taint",
    "Tracing": "tracingapi.TracingConfiguration",
}
INTEGERS = {
    IntRange(-(2**31), 2**31 - 1): "int32",
    IntRange(-(2**63), 2**63 - 1): "int64",
    IntRange(0, 2**32 - 1): "uint32",
}


def go_type(hint: Any, marks: tuple[Any, ...] = ()) -> str:
    """Spell one of our type hints as the reference does."""
    if get_origin(hint) is Annotated:
        return go_type(hint.__origin__, (*marks, *hint.__metadata__))
    if PointerMark() in marks:
        return "*" + go_type(hint, tuple(mark for mark in marks if mark != PointerMark()))
    if type(None) in get_args(hint):
        return go_type(get_args(hint)[0], marks)
    if get_origin(hint) is list:
        return "[]" + go_type(get_args(hint)[0])
    if get_origin(hint) is dict:
        return "map[string]" + go_type(get_args(hint)[1])
    if hint is int:
        return next(INTEGERS[mark] for mark in marks if mark in INTEGERS)
    if issubclass(hint, msgspec.Struct):
        name: str = hint.__name__
        return STRUCT_NAMES.get(name, name)
    return {bool: "bool", str: "string", float: "float64", Duration: "metav1.Duration"}[hint]


def hint_at(path: str) -> Any:
    hint: Any = KubeletConfiguration
    for name in path.split("."):
        while get_args(hint):
            hint = get_args(hint)[0]
        hints = get_type_hints(hint, include_extras=True)
        hint = next(hints[field.name] for field in msgspec.structs.fields(hint) if field.encode_name == name)
    return hint


def default_config() -> KubeletConfiguration:
    config = KubeletConfiguration()
    complete(config, (), FeatureGates().enabled)
    return config


@pytest.mark.parametrize(("path", "kind", "default"), ROWS, ids=[row[0] for row in ROWS])
def test_kubelet_configuration_field_type_and_default_match_upstream(
    path: str, kind: str, default: str
) -> None:
    assert go_type(hint_at(path)) == ("string" if kind in TEXT_TYPES else kind)
    value: Any = to_document(default_config())
    for name in path.split("."):
        value = value[name] if value is not None else None
    if path == "failCgroupV1":
        assert (default, value) == ("true", False), "the one deliberate difference"
    elif path == "evictionHard":
        assert value == DEFAULT_EVICTION_HARD
    elif isinstance(value, dict):
        assert default == ""
    elif not default:
        assert value in (None, False, 0, "", "0s", [])
    elif "Duration" in kind:
        assert Duration.parse(value) == Duration.parse(default)
    elif default == "[pods]":
        assert value == ["pods"]
    else:
        assert value == (default.strip('"') if kind == "string" else plain_value(default))


def test_kubelet_configuration_has_no_other_fields() -> None:
    known = {path.split(".")[0] for path, _, _ in ROWS}
    assert set(to_document(KubeletConfiguration())) == known | {"kind", "apiVersion"}


def completed(document: dict[str, Any], *, on: bool = True) -> KubeletConfiguration:
    config, problems = decode(KubeletConfiguration, document)
    assert problems == []
    complete(config, explicit_fields(KubeletConfiguration, document), lambda _: on)
    return config


@pytest.mark.parametrize(
    ("document", "report", "update"),
    [
        ({}, "5m", "10s"),
        ({"nodeStatusUpdateFrequency": "20s"}, "20s", "20s"),
        ({"nodeStatusUpdateFrequency": "0s"}, "5m", "10s"),
        ({"nodeStatusUpdateFrequency": "20s", "nodeStatusReportFrequency": "0s"}, "20s", "20s"),
        ({"nodeStatusUpdateFrequency": "20s", "nodeStatusReportFrequency": "1m"}, "1m", "20s"),
        ({"nodeStatusReportFrequency": "1m"}, "1m", "10s"),
    ],
)
def test_node_status_report_frequency_defaults_to_update_frequency(
    document: dict[str, Any], report: str, update: str
) -> None:
    config = completed(document)
    assert config.node_status_report_frequency == Duration.parse(report)
    assert config.node_status_update_frequency == Duration.parse(update)


@pytest.mark.parametrize(
    ("document", "serialize"),
    [
        ({}, True),
        ({"maxParallelImagePulls": 1}, True),
        ({"maxParallelImagePulls": 2}, False),
        ({"maxParallelImagePulls": 2, "serializeImagePulls": True}, True),
        ({"serializeImagePulls": False}, False),
    ],
)
def test_serialize_image_pulls_default_depends_on_parallel_pulls(
    document: dict[str, Any], serialize: bool
) -> None:
    assert completed(document).serialize_image_pulls is serialize


@pytest.mark.parametrize(("given", "limit"), [(-5, -1), (-1, -1), (0, 0), (100, 100)])
def test_pod_pids_limit_negative_normalized_to_minus_one(given: int, limit: int) -> None:
    assert completed({"podPidsLimit": given}).pod_pids_limit == limit


@pytest.mark.parametrize(
    ("document", "thresholds"),
    [
        ({}, dict(DEFAULT_EVICTION_HARD)),
        ({"evictionHard": None}, dict(DEFAULT_EVICTION_HARD)),
        ({"evictionHard": {}}, {}),
        ({"evictionHard": {"memory.available": "1Gi"}}, {"memory.available": "1Gi"}),
        (
            {"evictionHard": {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": True},
            {**DEFAULT_EVICTION_HARD, "memory.available": "1Gi"},
        ),
        ({"evictionHard": {}, "mergeDefaultEvictionSettings": True}, dict(DEFAULT_EVICTION_HARD)),
    ],
)
def test_eviction_hard_defaults_and_explicit_thresholds(
    document: dict[str, Any], thresholds: dict[str, str]
) -> None:
    assert completed(document).eviction_hard == thresholds


def test_feature_gate_dependent_defaults() -> None:
    on, off = completed({}), completed({}, on=False)
    assert on.crash_loop_back_off.max_container_restart_period == Duration.parse("5m")
    assert off.crash_loop_back_off.max_container_restart_period is None
    assert on.image_pull_credentials_verification_policy == "NeverVerifyPreloadedImages"
    assert off.image_pull_credentials_verification_policy == ""
    chosen = {
        "crashLoopBackOff": {"maxContainerRestartPeriod": "10s"},
        "imagePullCredentialsVerificationPolicy": "AlwaysVerify",
    }
    for config in (completed(chosen), completed(chosen, on=False)):
        assert config.crash_loop_back_off.max_container_restart_period == Duration.parse("10s")
        assert config.image_pull_credentials_verification_policy == "AlwaysVerify"


def test_default_config_instances_share_no_state() -> None:
    one, other = default_config(), default_config()
    one.eviction_hard["memory.available"] = "1Gi"
    one.enforce_node_allocatable.append("kube-reserved")
    one.authentication.anonymous.enabled = True
    assert other == default_config()


def test_legacy_defaults_without_config_file_differ_in_auth_and_read_only_port() -> None:
    differences = {
        field: value
        for field, value in to_document(legacy_defaults()).items()
        if value != to_document(KubeletConfiguration())[field]
    }
    assert differences == {
        "readOnlyPort": 10255,
        "authentication": {
            "x509": {"clientCAFile": ""},
            "webhook": {"enabled": False, "cacheTTL": "2m0s"},
            "anonymous": {"enabled": True},
        },
        "authorization": {
            "mode": "AlwaysAllow",
            "webhook": {"cacheAuthorizedTTL": "5m0s", "cacheUnauthorizedTTL": "30s"},
        },
    }
