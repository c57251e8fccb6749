"""Every setting is read by some code or listed as having no effect."""

import ast
import dataclasses
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import pykubelet
from pykubelet.config.feature_gates import known_gates
from pykubelet.config.flags.flag_table import FLAGS, field_path
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.load import load
from pykubelet.config.no_effect import CONSULTED_GATES, FIELDS, FLAG_ATTRIBUTES, UNREAD_GATES, flag_reason
from pykubelet.config.types import API_VERSION, KIND, KubeletConfiguration
from pykubelet.config.validation.validate_resources import CPU_OPTIONS
from pykubelet.node.status import _DECLARED

SOURCE = Path(pykubelet.__file__).parent
READERS_IN_CONFIG = ("config/types.py", "config/flags/kubelet_flags.py", "config/load.py")
"""Files of the configuration package that act on settings instead of parsing or validating them."""
READ_IN_CONFIG = {"feature_gates", "logging", "merge_default_eviction_settings"}
"""Fields that only those files act on; all others are read by the rest of the product."""
NESTED_READERS = {
    "logging": ("config/flags/kubelet_flags.py", "logs"),
    "logging.options.json": ("config/flags/kubelet_flags.py", "routing"),
    "logging.options.text": ("config/flags/kubelet_flags.py", "routing"),
    "logging.vmodule": ("config/flags/kubelet_flags.py", "item"),
    "register_with_taints": ("node/settings.py", "taint"),
    "reserved_memory": ("cm/memory/numa_nodes.py", "reservation"),
    "shutdown_grace_period_by_pod_priority": ("node/shutdown_groups.py", "entry"),
    "user_namespaces": ("agent/host_setup.py", "settings"),
}
"""File and local name where the fields of a nested struct are read, unless it has the struct's own name."""
ENFORCED_BY_VALIDATION = {"fail_cgroup_v1"}
NOT_SETTINGS = {"kind", "api_version"}


@cache
def attribute_reads() -> frozenset[tuple[str, str, str]]:
    """Return (file, receiver, attribute) of every attribute that is read, the receiver by its last name."""
    reads = set()
    for path in SOURCE.rglob("*.py"):
        relative = str(path.relative_to(SOURCE))
        if relative.startswith("config/") and relative not in READERS_IN_CONFIG:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                receiver = node.value
                if isinstance(receiver, ast.Attribute):
                    reads.add((relative, receiver.attr, node.attr))
                elif isinstance(receiver, ast.Name):
                    reads.add((relative, receiver.id, node.attr))
    return frozenset(reads)


def struct_of(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct inside Annotated, Optional and list hints."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    if get_origin(hint) in (Annotated, Union, UnionType, list):
        return next((found for arg in get_args(hint) if (found := struct_of(arg))), None)
    return None


def leaf_fields(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields that are not structs themselves."""
    for name, hint in get_type_hints(struct, include_extras=True).items():
        if name in NOT_SETTINGS and not prefix:
            continue
        inner = struct_of(hint)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from leaf_fields(inner, f"{prefix}{name}.")


def listed(path: str) -> bool:
    return any(path == entry or path.startswith(f"{entry}.") for entry in FIELDS)


def is_read(path: str) -> bool:
    top, (parent, _, name) = path.partition(".")[0], path.rpartition(".")
    if parent and not is_read(top):
        return False
    if found := NESTED_READERS.get(parent):
        return (*found, name) in attribute_reads()
    receivers = (parent.rpartition(".")[2],) if parent else ("config", "_config")
    return any(
        attribute == name
        and receiver in receivers
        and (not file.startswith("config/") or top in READ_IN_CONFIG)
        for file, receiver, attribute in attribute_reads()
    )


ALL_FIELDS = sorted(leaf_fields(KubeletConfiguration))


@pytest.mark.parametrize("path", ALL_FIELDS)
def test_config_field_is_read_or_listed(path: str) -> None:
    assert is_read(path) != listed(path) or path in ENFORCED_BY_VALIDATION, (
        f"{path}: list it in config/no_effect.py with the reason, or delete its entry if it is read"
    )


def test_config_field_reader_unread_field_is_found() -> None:
    assert not is_read("hairpin_mode")
    # Other structs have fields of these names, which some code reads.
    assert not is_read("memory_swap.enabled")
    assert not is_read("register_with_taints.name")
    assert is_read("max_pods")
    assert is_read("authentication.webhook.enabled")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KubeletFlags)])
def test_flag_attribute_is_read_or_listed(name: str) -> None:
    # `self` is KubeletFlags in its own file only: other classes have attributes of the same names.
    read = any(
        attribute == name
        and (receiver in ("flags", "_flags") or (file, receiver) == ("config/flags/kubelet_flags.py", "self"))
        for file, receiver, attribute in attribute_reads()
    )
    assert read != (name in FLAG_ATTRIBUTES)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_flag_has_target_or_no_effect_reason(flag: Any) -> None:
    assert flag.field or flag.attribute or flag_reason(flag)
    assert not (flag.status == "ignored" and (flag.field or flag.attribute))


GATE_READERS = ("enabled", "gates", "gate_enabled", "is_enabled")
"""Functions whose first argument is the name of a feature gate."""
GATE_NAMES = {*CPU_OPTIONS.values(), *_DECLARED} - {""}
"""Gates in tables, from which the argument of a reader is taken."""


def sources() -> Iterator[ast.Module]:
    for path in SOURCE.rglob("*.py"):
        if not path.name.endswith("_pb2.py") and path.name not in ("feature_gates.py", "no_effect.py"):
            yield ast.parse(path.read_text())


def gate_arguments(call: ast.Call) -> Iterator[ast.expr]:
    """Yield the argument of a call that reads a feature gate."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name) if name in GATE_READERS:
            yield from call.args[:1]
        case ast.Attribute(value=ast.Attribute(attr="overrides"), attr="get"):
            yield from call.args[:1]


def read_gates(trees: Collection[ast.Module]) -> set[str]:
    """Return the gates that are read by a literal or by a constant of a module."""
    constants = {
        target.id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            for argument in gate_arguments(node) if isinstance(node, ast.Call) else ():
                if isinstance(argument, ast.Constant):
                    found.add(argument.value)
                elif isinstance(argument, ast.Name):
                    found.add(constants.get(argument.id))
    return {gate for gate in found if isinstance(gate, str)}


def test_consulted_gates_match_source() -> None:
    found = read_gates(list(sources())) | GATE_NAMES
    assert found & known_gates().keys() == set(CONSULTED_GATES)


def test_read_gates_other_constants_of_that_name_do_not_count() -> None:
    text = 'Resource(KubeObject, "ClusterTrustBundle")\nGATE = "MemoryQoS"\nif gates.enabled(GATE): pass\n'
    assert read_gates([ast.parse(text)]) == {"MemoryQoS"}


def rows_of(name: str) -> list[list[str]]:
    """Return the rows of a table of `tests/data`."""
    lines = (Path(__file__).parents[2] / "data" / name).read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")][1:]


def upstream_gates() -> list[str]:
    """Return the gates that the upstream kubelet reads."""
    return [name for name, _ in rows_of("kubelet_gates.tsv")]


UPSTREAM = {setting: state for setting, state, _ in rows_of("no_effect.tsv")}
REASONS = {
    **{field_path(path): reason for path, reason in FIELDS.items()},
    **{
        f"--{flag.name}": flag_reason(flag)
        for flag in FLAGS
        if flag.attribute in FLAG_ATTRIBUTES or flag.status == "ignored"
    },
    **{f"featureGates.{name}": reason for name, reason in UNREAD_GATES.items()},
}


def test_settings_without_effect_are_those_of_checked_list() -> None:
    assert REASONS.keys() == UPSTREAM.keys()


@pytest.mark.parametrize(("setting", "state"), UPSTREAM.items())
def test_reason_names_effect_upstream(setting: str, state: str) -> None:
    assert state in ("ignored", "allowed", "removed", "differs")
    assert REASONS[setting].startswith("differs from upstream: ") == (state == "differs")
    if state == "ignored":
        assert re.search("the upstream kubelet (ignores it, too|has no|stores them)", REASONS[setting])


@pytest.mark.parametrize("name", upstream_gates())
def test_upstream_gate_is_read_or_explained(name: str) -> None:
    assert name in known_gates()
    assert (name in CONSULTED_GATES) != (name in UNREAD_GATES), (
        f"{name}: read it where its behaviour is, or add it to UNREAD_GATES with the reason and the remedy"
    )


def test_unread_gates_are_those_of_upstream() -> None:
    assert set(UNREAD_GATES) <= set(upstream_gates())


@pytest.mark.parametrize("name", UNREAD_GATES)
def test_load_unread_gate_warns_with_reason(name: str) -> None:
    gate = known_gates()[name]
    values = {name: not gate.default}
    # Gates that would be on without one that they need are switched off, too.
    for other in known_gates().values() if gate.default else ():
        if name in other.needs:
            values[other.name] = False
    for need in () if gate.default else gate.needs:
        values[need] = True
    requested = ",".join(f"{key}={str(value).lower()}" for key, value in values.items())
    lines = load([f"--feature-gates={requested}"]).warnings
    assert f"feature gate {name} is set but has no effect: {UNREAD_GATES[name]}" in lines


def test_load_gate_of_api_server_warns() -> None:
    lines = load(["--feature-gates=ClusterTrustBundle=true"]).warnings
    assert any("ClusterTrustBundle are set but have no effect" in line for line in lines)


@pytest.mark.parametrize("path", FIELDS)
def test_load_field_without_effect_warns(tmp_path: Path, path: str) -> None:
    config: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND}
    *parents, last = field_path(path).split(".")
    target = config
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = SAMPLE_VALUES.get(path, "5s")
    if path == "eviction_soft_grace_period":
        config |= {"evictionSoft": {"memory.available": "100Mi"}}
    if path == "eviction_soft":
        config |= {"evictionSoftGracePeriod": {"memory.available": "1m"}}
    if path == "shutdown_grace_period_critical_pods":
        config |= {"shutdownGracePeriod": "10s"}
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(config))
    warnings = load([f"--config={file}"]).warnings
    assert f"{field_path(path)} is set but has no effect: {FIELDS[path]}" in warnings


SAMPLE_VALUES: dict[str, Any] = {
    "content_type": "application/json",
    "eviction_max_pod_grace_period": 30,
    "eviction_minimum_reclaim": {"memory.available": "1Mi"},
    "eviction_soft": {"memory.available": "100Mi"},
    "eviction_soft_grace_period": {"memory.available": "1m"},
    "hairpin_mode": "none",
    "iptables_drop_bit": 13,
    "iptables_masquerade_bit": 14,  # also a value that equals the default was set by the operator
    "kernel_memcg_notification": True,
    "shutdown_grace_period_by_pod_priority": [{"priority": 1, "shutdownGracePeriodSeconds": 3}],
}


def test_load_unset_fields_warn_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "maxPods": 50}))
    assert load([f"--config={file}"]).warnings == []


def test_load_empty_fields_of_kubeadm_warn_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    buffers = {name: {"infoBufferSize": "0"} for name in ("json", "text")}
    logging = {"flushFrequency": 0, "options": buffers, "verbosity": 0}
    file.write_bytes(msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "logging": logging}))
    assert load([f"--config={file}"]).warnings == []


def test_load_feature_gate_without_reader_warns() -> None:
    unread = next(
        gate.name
        for gate in known_gates().values()
        if gate.stage == "Alpha"
        and not gate.needs
        and gate.name not in CONSULTED_GATES
        and gate.name not in UNREAD_GATES
        and not gate.name.startswith("All")
    )
    lines = load([f"--feature-gates={unread}=true"]).warnings
    assert any(unread in line and "have no effect" in line for line in lines)
    assert not any("have no effect" in line for line in load(["--feature-gates=MemoryQoS=true"]).warnings)


def test_load_flag_values_contain_every_flag_with_its_default() -> None:
    values = load(["--max-pods=7", "--manifest-url-header=X-Token:s3cr3t", "-v=3"]).flag_values
    assert list(values) == sorted(flag.name for flag in FLAGS)
    assert values["max-pods"] == "7"
    assert values["v"] == "3"
    assert "s3cr3t" not in values["manifest-url-header"]
    assert values["port"] == "10250"
    assert values["runonce"] == "false"
    assert values["one-output"] == "false"
    assert values["sync-frequency"] == "1m0s"
    assert values["cluster-dns"] == ""
