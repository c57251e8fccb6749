"""Decoding: strict, complete in its complaints, and never an exception."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.config.codec import decode, explicit_fields, to_document
from pykubelet.config.types import Authentication, KubeletConfiguration, Logging
from pykubelet.config.validation.validate import validate


def problems_of(data: Any) -> list[str]:
    _, problems = decode(KubeletConfiguration, data)
    return [str(problem) for problem in problems]


def good(data: Any) -> KubeletConfiguration:
    config, problems = decode(KubeletConfiguration, data)
    assert problems == []
    return config


def test_decode_empty_or_null_document_yields_defaults() -> None:
    assert good({}) == KubeletConfiguration()
    assert good(dict.fromkeys(to_document(KubeletConfiguration()))) == KubeletConfiguration()


def test_decode_explicit_zero_used_only_for_upstream_pointer_fields() -> None:
    config = good(
        {
            "maxPods": 0,
            "port": 0,
            "address": "",
            "syncFrequency": "0s",
            "cgroupDriver": "",
            "logging": {"flushFrequency": 0, "format": ""},
            "registryPullQPS": 0,
            "resolvConf": "",
            "cpuCFSQuotaPeriod": "0s",
            "healthzPort": 0,
            "cgroupsPerQOS": False,
            "authentication": {"webhook": {"enabled": False, "cacheTTL": "0s"}},
        }
    )
    assert (config.max_pods, config.port, config.address) == (110, 10250, "0.0.0.0")
    assert config.sync_frequency == Duration.parse("1m")
    assert config.cgroup_driver == "cgroupfs"
    assert config.logging == Logging()
    assert (config.registry_pull_qps, config.resolv_conf, config.cpu_cfs_quota_period) == (0, "", 0)
    assert (config.healthz_port, config.cgroups_per_qos) == (0, False)
    assert not config.authentication.webhook.enabled
    assert config.authentication.webhook.cache_ttl == Duration.parse("2m")


def test_decode_empty_list_or_map_is_explicit_value() -> None:
    assert good({"enforceNodeAllocatable": []}).enforce_node_allocatable == []
    assert good({"enforceNodeAllocatable": None}).enforce_node_allocatable == ["pods"]
    assert explicit_fields(KubeletConfiguration, {"evictionHard": {}, "tlsCipherSuites": None}) == {
        "evictionHard"
    }


def test_explicit_fields_ignores_zero_values_and_invalid_fields() -> None:
    data = {"maxPods": 0, "port": 5, "resolvConf": "", "syncFrequency": "0s", "nonsense": 1, "address": 5}
    assert explicit_fields(KubeletConfiguration, data) == {"port", "resolvConf"}


def test_decode_quantities_numbers_accepted_and_canonicalized() -> None:
    limits = {
        "memory": " 1024Mi ",
        "hugepages-2Mi": 4096,
        "hugepages-1Gi": 1.5,
        "hugepages-4Ki": "1.953125Ki",
    }
    [reservation] = good({"reservedMemory": [{"numaNode": 1, "limits": limits}]}).reserved_memory
    assert list(reservation.limits.values()) == ["1Gi", "4096", "1500m", "2k"]


def test_decode_only_flush_frequency_accepts_nanoseconds() -> None:
    assert good({"logging": {"flushFrequency": 5_000_000_000}}).logging.flush_frequency == Duration.parse(
        "5s"
    )
    assert good({"logging": {"flushFrequency": "3s"}}).logging.flush_frequency == Duration.parse("3s")
    assert problems_of({"syncFrequency": 10}) == [
        "syncFrequency: must be text with a unit, such as 10s, not the number 10"
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"maxPods": "110"}, ["maxPods: must be a whole number, not the text '110': remove the quotes"]),
        ({"maxPods": "many"}, ["maxPods: must be a whole number, not the text 'many'"]),
        ({"maxPods": 1.5}, ["maxPods: must be a whole number, not the number 1.5"]),
        ({"maxPods": True}, ["maxPods: must be a whole number, not true"]),
        ({"maxPods": 2**31}, ["maxPods: must be from -2147483648 to 2147483647, not the number 2147483648"]),
        (
            {"maxOpenFiles": 10**200},
            ["maxOpenFiles: must be from -9223372036854775808 to 9223372036854775807"],
        ),
        (
            {"logging": {"verbosity": -1}},
            ["logging.verbosity: must be from 0 to 4294967295, not the number -1"],
        ),
        ({"failSwapOn": "true"}, ["failSwapOn: must be true or false, not the text 'true'"]),
        ({"failSwapOn": 1}, ["failSwapOn: must be true or false, not the number 1"]),
        ({"address": 5}, ["address: must be text, not the number 5: put it in quotes"]),
        ({"address": ["a"]}, ["address: must be text, not a list"]),
        ({"address": "a\0"}, ["address: holds a NUL character: remove it"]),
        (
            {"memoryThrottlingFactor": "1"},
            ["memoryThrottlingFactor: must be a number, not the text '1': remove the quotes"],
        ),
        (
            {"memoryThrottlingFactor": float("inf")},
            ["memoryThrottlingFactor: must be a usual number, not a huge number"],
        ),
        ({"clusterDNS": "10.0.0.1"}, ["clusterDNS: must be a list, not the text '10.0.0.1'"]),
        (
            {"clusterDNS": ["a", None, 5]},
            [
                "clusterDNS[1]: must be text, not empty",
                "clusterDNS[2]: must be text, not the number 5: put it in quotes",
            ],
        ),
        ({"evictionHard": ["a"]}, ["evictionHard: must be a mapping, not a list"]),
        (
            {"evictionHard": {"memory.available": 100}},
            ["evictionHard[memory.available]: must be text, not the number 100: put it in quotes"],
        ),
        ({"featureGates": {"X": "true"}}, ["featureGates[X]: must be true or false, not the text 'true'"]),
        ({"featureGates": {"X": None}}, ["featureGates[X]: must be true or false, not empty"]),
        ({"staticPodURLHeader": {"a": "b"}}, ["staticPodURLHeader[a]: must be a list, not the text 'b'"]),
        ({"authentication": []}, ["authentication: must be a mapping of fields, not a list"]),
        (
            {"authentication": {"x509": {"clientCAfile": "x"}}},
            ["authentication.x509.clientCAfile: there is no such field: did you mean clientCAFile?"],
        ),
        ({"maxpods": 5}, ["maxpods: there is no such field: did you mean maxPods?"]),
        ({"clusterDns": []}, ["clusterDns: there is no such field: did you mean clusterDNS?"]),
        ({"zzz": 5}, ["zzz: there is no such field: remove it"]),
        ({"a.b\n": 5}, ["[a.b\\n]: there is no such field: remove it"]),
        (
            {"registerWithTaints": [{"key": "a", "colour": "b"}]},
            ["registerWithTaints[0].colour: there is no such field: remove it"],
        ),
        ({"syncFrequency": "10"}, ["syncFrequency: '10' has no unit: write a number and a unit, such as"]),
        ({"syncFrequency": "soon"}, ["syncFrequency: 'soon' is not a duration: write"]),
        ({"syncFrequency": True}, ["syncFrequency: must be text with a unit, such as 10s, not true"]),
        ({"syncFrequency": ""}, ["syncFrequency: '' is not a duration: write"]),
        (
            {"logging": {"flushFrequency": 2**63}},
            ["logging.flushFrequency: must be from -9223372036854775808 to"],
        ),
        (
            {"reservedMemory": [{"limits": {"memory": "x"}}]},
            ["reservedMemory[0].limits[memory]: 'x' is not a quantity: write"],
        ),
        (
            {"reservedMemory": [{"limits": {"memory": True}}]},
            ["reservedMemory[0].limits[memory]: must be a quantity such as 64Mi, not true"],
        ),
        ([], ["document: must be a mapping of fields, not a list"]),
        (None, ["document: must be a mapping of fields, not empty"]),
        ("text", ["document: must be a mapping of fields, not the text 'text'"]),
    ],
    ids=str,
)
def test_decode_invalid_field_problem_message(data: Any, expected: list[str]) -> None:
    found = problems_of(data)
    assert len(found) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(found, expected, strict=True))


def test_decode_several_problems_all_reported_and_valid_fields_decoded() -> None:
    config, problems = decode(
        KubeletConfiguration,
        {"port": "x", "maxPods": 5, "nope": 1, "authentication": {"webhook": {"enabled": "x"}, "y": 1}},
        path="spec",
    )
    assert config.max_pods == 5
    assert config.authentication == Authentication()
    assert [problem.path for problem in problems] == [
        "spec.port",
        "spec.authentication.webhook.enabled",
        "spec.authentication.y",
        "spec.nope",
    ]


def test_decode_many_unknown_fields_reported_in_linear_time() -> None:
    assert len(problems_of({f"field{number}": 1 for number in range(20_000)})) == 20_000


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["5s", "1Gi", "10%"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(to_document(KubeletConfiguration()))


def paths_of(document: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in document.items():
        paths.append((*prefix, key))
        if isinstance(value, dict):
            paths += paths_of(value, (*prefix, key))
    return paths


PATHS = paths_of(to_document(KubeletConfiguration()))


@st.composite
def mutated_documents(draw: st.DrawFn) -> dict[str, Any]:
    document = to_document(KubeletConfiguration())
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=5)):
        target: Any = document
        for key in path[:-1]:
            target = target.get(key) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[path[-1]] = draw(JUNK)
    return document


@settings(max_examples=400)
@given(JUNK | st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=6) | mutated_documents(), st.booleans())
def test_decode_any_data_yields_configuration_or_one_line_problems(data: Any, gates: bool) -> None:
    config, problems = decode(KubeletConfiguration, data)
    assert isinstance(config, KubeletConfiguration)
    problems += validate(config, lambda _: gates)
    assert all(problem.path and len(str(problem).splitlines()) == 1 for problem in problems)
    to_document(config)
