"""Classification of every field, and differences between two configurations."""

import copy
from pathlib import Path
from typing import Any

import pytest

from pykubelet.config.codec import to_document
from pykubelet.config.live import (
    CONSUMERS,
    MAX_VALUE_CHARACTERS,
    RELOADABLE,
    RESTART,
    consumer_fields,
    differences,
    field_paths,
    markdown_table,
    restart_reason,
    with_fields,
)
from pykubelet.config.types import KubeletConfiguration, Tracing, VModuleItem
from pykubelet.logs.mask import MASK

PATHS = [path for path, _ in field_paths()]
PAGE = Path(__file__).parents[3] / "docs" / "live-configuration.md"


@pytest.mark.parametrize("path", PATHS)
def test_field_every_path_is_reloadable_or_requires_restart(path: str) -> None:
    assert (path in RELOADABLE) != (path in RESTART), (
        f"{path}: add it to RELOADABLE with its consumer, or to RESTART with the reason (config/live.py)"
    )


def test_tables_no_unknown_fields_and_consumers() -> None:
    assert (RELOADABLE.keys() | RESTART.keys()) == set(PATHS)
    assert {name for consumers in RELOADABLE.values() for name in consumers} == CONSUMERS.keys()
    assert len(RELOADABLE) == 44, "CHANGELOG.md has the number"
    assert consumer_fields("dns") == {"clusterDNS", "clusterDomain"}


def test_cluster_domain_does_not_take_effect_on_mounter() -> None:
    """Verify that the mounter's resolv.conf, which has the cluster's name servers only, is not named."""
    assert consumer_fields("mounterDNS") == {"clusterDNS"}
    rows = [line for line in PAGE.read_text().splitlines() if "--experimental-mounter-path" in line]
    assert [row.split("`")[1] for row in rows] == ["clusterDNS"]


def test_field_paths_all_top_level_fields_covered() -> None:
    document = to_document(KubeletConfiguration())
    assert {path.partition(".")[0] for path in PATHS} == document.keys() - {"kind", "apiVersion"}
    assert {"logging.verbosity", "logging.options.json.splitStream", "tracing"} <= set(PATHS)


def test_differences_same_configuration_empty() -> None:
    assert differences(KubeletConfiguration(), KubeletConfiguration()) == []


def test_differences_nested_lists_and_durations_shown_as_in_file() -> None:
    before, after = KubeletConfiguration(), KubeletConfiguration()
    after.logging.verbosity = 4
    after.logging.vmodule = [VModuleItem(file_pattern="loop", verbosity=5)]
    after.sync_frequency = type(after.sync_frequency).parse("90s")
    after.tracing = Tracing(endpoint="otel:4317")
    after.port = 10251
    assert [str(change) for change in differences(before, after)] == [
        "logging.verbosity: 0 -> 4",
        'logging.vmodule: [] -> [{"filePattern":"loop","verbosity":5}]',
        "port: 10250 -> 10251",
        'syncFrequency: "1m0s" -> "1m30s"',
        'tracing: null -> {"endpoint":"otel:4317","samplingRatePerMillion":null}',
    ]
    assert [change.path for change in differences(before, after) if change.restart_reason] == [
        "port",
        "tracing",
    ]


def test_differences_secrets_masked_and_long_values_cut() -> None:
    before, after = KubeletConfiguration(), KubeletConfiguration()
    before.static_pod_url_header = {"Authorization": ["Bearer one-secret"]}
    after.static_pod_url_header = {"X-Key": ["two-secret"]}
    after.static_pod_url = "https://user:three-secret@host/pods"
    after.allowed_unsafe_sysctls = [f"net.core.{number}" for number in range(1000)]
    changes = {change.path: change for change in differences(before, after)}
    assert "secret" not in " ".join(map(str, changes.values()))
    assert (changes["staticPodURLHeader"].before, changes["staticPodURLHeader"].after) == (MASK, MASK)
    assert len(changes["allowedUnsafeSysctls"].after) == MAX_VALUE_CHARACTERS + 1


def test_with_fields_replaces_only_these_and_changes_no_argument() -> None:
    running, new = KubeletConfiguration(), KubeletConfiguration(max_pods=5, port=1)
    new.logging.verbosity = 9
    unchanged = copy.deepcopy(running)
    mixed = with_fields(running, new, ["maxPods", "logging.verbosity"])
    assert (mixed.max_pods, mixed.logging.verbosity, mixed.port) == (5, 9, 10250)
    assert running == unchanged
    assert [change.path for change in differences(running, mixed)] == ["logging.verbosity", "maxPods"]


@pytest.mark.parametrize(
    ("policies", "pinned"),
    [
        ({}, set()),
        ({"cpu_manager_policy": "static"}, {"kubeReserved", "systemReserved"}),
        (
            {"memory_manager_policy": "Static"},
            {"kubeReserved", "systemReserved", "evictionHard", "mergeDefaultEvictionSettings"},
        ),
    ],
)
def test_restart_reason_resource_managers_pin_reservations(
    policies: dict[str, Any], pinned: set[str]
) -> None:
    config = KubeletConfiguration(**policies)
    assert {path for path in RELOADABLE if restart_reason(path, config)} == pinned
    assert all(restart_reason(path, config) for path in RESTART)


def test_documentation_contains_current_tables() -> None:
    """Verify that docs/live-configuration.md has the tables of `markdown_table`."""
    assert markdown_table() in PAGE.read_text()
