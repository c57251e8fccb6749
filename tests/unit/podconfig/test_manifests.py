import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.config.errors import ConfigError, Problem
from pykubelet.podconfig.manifests import MAX_BYTES, read_bytes, read_manifest
from tests.unit.podconfig.making import document, manifest, written


def names(text: str) -> list[str]:
    return [pod.metadata.name for pod in read_manifest(text.encode(), "here").pods]


def problem(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as err:
        read_manifest(data, "here")
    [only] = err.value.problems
    assert only.path == "here"
    return only.message


LIST: dict[str, Any] = {"apiVersion": "v1", "kind": "PodList", "items": [document("a"), document("b")]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (manifest("a"), ["a"]),
        (json.dumps(document("a")), ["a"]),
        ("\ufeff" + manifest("a"), ["a"]),
        (json.dumps(LIST), ["a", "b"]),
        (yaml.safe_dump(LIST), ["a", "b"]),
        (json.dumps({**LIST, "kind": "List"}), ["a", "b"]),
        (json.dumps({**LIST, "items": [{"metadata": {"name": "c"}}]}), ["c"]),
        (json.dumps({**LIST, "items": []}), []),
        (json.dumps({**LIST, "items": None}), []),
        ("# comment\n---\n" + manifest("a") + "---\n---\n" + manifest("b"), ["a", "b"]),
        (manifest("a") + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n", ["a"]),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n", []),
    ],
)
def test_read_manifest_accepts_pods_lists_and_documents(text: str, expected: list[str]) -> None:
    assert names(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("a: [", "is neither YAML nor JSON"),
        ('{"kind": "Pod", ', "is neither YAML nor JSON"),
        ("- a\n", "is not a mapping"),
        ("just text", "is not a mapping"),
        ("a: 1", "must say what it is"),
        ("kind: Pod", "must say what it is"),
        ("apiVersion: apps/v1\nkind: Thing", "is a 'Thing' of 'apps/v1'"),
        ("apiVersion: v1\nkind: Service", "is a Service: a standalone node has no service network"),
        ("apiVersion: v1\nkind: Thing", "is a 'Thing': only Pod and PodList can be run"),
        ("apiVersion: v1\nkind: PodList\nitems: {}", "items: must be a list"),
        ("apiVersion: v1\nkind: PodList\nitems: [1]", "is not a mapping"),
        ("apiVersion: v1\nkind: List\nitems: [{a: 1}]", "must say what it is"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"a\0b", ""),
        (b"x" * (MAX_BYTES + 1), "is larger than 10 MiB"),
        (manifest("a") + "metadata: {name: b}\n", "is repeated"),
    ],
)
def test_read_manifest_invalid_text_raises_config_error(text: str | bytes, message: str) -> None:
    assert message in problem(text)


def test_read_manifest_wrong_type_names_field() -> None:
    bad = document(containers=[{"name": "main", "image": "x", "command": ["sleep", 5]}])
    assert problem(json.dumps(bad)) == "spec.containers[0].command[1]: expected `str`, got `int`"
    assert problem(json.dumps({**LIST, "items": [document(), bad]})).startswith("items[1].spec.containers[0]")
    assert problem(json.dumps(document(containers=[{}]))) == (
        "spec.containers[0]: object missing required field `name`"
    )
    assert problem(json.dumps(document(containers=5))) == "spec.containers: expected `array`, got `int`"


def test_read_manifest_invalid_quantity_names_field() -> None:
    bad = document(containers=[{"name": "main", "image": "x", "resources": {"limits": {"cpu": "lots"}}}])
    assert "'lots' is not a quantity" in problem(json.dumps(bad))
    assert problem(json.dumps(bad)).startswith("spec.containers[0].resources.limits")


def test_read_manifest_null_field_equals_absent_field() -> None:
    nothing = document(hostAliases=None, securityContext={"runAsUser": None}, nodeSelector=None)
    nothing["metadata"] |= {"labels": None, "creationTimestamp": None}
    nothing["status"] = None
    [pod] = read_manifest(json.dumps(nothing).encode(), "here").pods
    assert pod == written(securityContext={})


def test_read_manifest_unknown_fields_are_ignored() -> None:
    assert names(manifest(affinity={"nodeAffinity": {}}, notAField=1)) == ["web"]


def test_read_manifest_yaml_bomb_and_deep_nesting_are_rejected() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    assert "unfolds to more than 250000 values" in problem("\n".join(lines))
    assert "unfolds to more than 250000 values" in problem("\n".join(lines[:6])), "a million is too many"
    assert "levels deep" in problem("a: " + "[" * 5000 + "]" * 5000)
    assert "levels deep" in problem('{"a": ' * 5000 + "1" + "}" * 5000)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_read_manifest_any_bytes_raises_only_config_error(data: bytes) -> None:
    problems: list[Problem] = []
    try:
        read_manifest(data, "here")
    except ConfigError as err:
        problems = err.problems
    assert all("\n" not in str(problem) for problem in problems)


def test_read_bytes_rejects_irregular_and_too_large_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    assert read_bytes(tmp_path / "a") == b"text"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="larger than 10 MiB"):
        read_bytes(tmp_path / "huge")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
