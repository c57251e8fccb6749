"""The configuration of credential providers, good and bad."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.config.errors import ConfigError
from pykubelet.images.credential_provider import load_providers

PROVIDER: dict[str, Any] = {
    "name": "helper",
    "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
    "matchImages": ["*.example.com", "registry.io:8080/path"],
    "defaultCacheDuration": "10m",
}
TOKEN: dict[str, Any] = {
    "serviceAccountTokenAudience": "registry",
    "cacheType": "Token",
    "requireServiceAccount": True,
    "requiredServiceAccountAnnotationKeys": ["example.com/Role"],
}


def document(*providers: dict[str, Any], version: str = "v1") -> dict[str, Any]:
    return {
        "apiVersion": f"kubelet.config.k8s.io/{version}",
        "kind": "CredentialProviderConfig",
        "providers": list(providers),
    }


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("helper", "other"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def problems(config: Path, bin_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_providers(config, bin_dir)
    return str(caught.value)


@pytest.mark.parametrize("version", ["v1", "v1beta1", "v1alpha1"])
@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_load_providers_valid_file_returns_providers(
    tmp_path: Path, bin_dir: Path, version: str, write: Any
) -> None:
    config = tmp_path / "providers.yaml"
    given_provider = {**PROVIDER, "args": ["get"], "env": [{"name": "A", "value": "b"}, {"name": "E"}]}
    config.write_text(write(document(given_provider, version=version)))
    [found] = load_providers(config, bin_dir)
    assert found.name == "helper"
    assert found.match_images == PROVIDER["matchImages"]
    assert found.default_cache_duration == Duration.from_seconds(600)
    assert found.args == ["get"]
    assert [(variable.name, variable.value) for variable in found.env] == [("A", "b"), ("E", "")]
    assert found.token_attributes is None


def test_load_providers_zero_cache_duration_is_accepted(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "c").write_text(json.dumps(document({**PROVIDER, "defaultCacheDuration": "0s"})))
    [found] = load_providers(tmp_path / "c", bin_dir)
    assert found.default_cache_duration == 0


def test_load_providers_directory_reads_files_in_order(tmp_path: Path, bin_dir: Path) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "b.yaml").write_text(json.dumps(document(PROVIDER)))
    (folder / "a.json").write_text(json.dumps(document({**PROVIDER, "name": "other"})))
    (folder / "README").write_text("not a configuration")
    assert [provider.name for provider in load_providers(folder, bin_dir)] == ["other", "helper"]
    (folder / "c.yml").write_text(json.dumps(document(PROVIDER)))
    assert problems(folder, bin_dir) == "providers: 'helper' is there 2 times: keep one"


def test_load_providers_empty_or_missing_directory_raises(tmp_path: Path, bin_dir: Path) -> None:
    assert "has no .json, .yaml or .yml file" in problems(bin_dir, bin_dir)
    assert "does not exist" in problems(tmp_path / "none", bin_dir)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": None}, "providers[0].name: must be the name of a program"),
        ({"name": "../sh"}, "providers[0].name: must be the name of a program"),
        ({"name": ".."}, "providers[0].name: must be the name of a program"),
        ({"name": "a b"}, "providers[0].name: must be the name of a program"),
        (
            {"apiVersion": "v1"},
            "providers[0].apiVersion: must be one of credentialprovider.kubelet.k8s.io/v1",
        ),
        ({"matchImages": []}, "providers[0].matchImages: must have at least one pattern"),
        ({"matchImages": ["a b"]}, "providers[0].matchImages[0]: 'a b' must be a registry"),
        ({"defaultCacheDuration": None}, "providers[0].defaultCacheDuration: is missing"),
        ({"defaultCacheDuration": "-1s"}, "providers[0].defaultCacheDuration: must not be negative"),
        ({"defaultCacheDuration": 10}, "providers[0].defaultCacheDuration: must be text with a unit"),
        ({"matchImage": ["x"]}, "providers[0].matchImage: there is no such field: did you mean matchImages?"),
        ({"env": [{"value": "x"}]}, "providers[0].env[0].name: must be the name of a variable"),
        ({"args": "get"}, "providers[0].args: must be a list"),
        ({"tokenAttributes": {**TOKEN, "cacheType": "x"}}, "tokenAttributes.cacheType: must be one of"),
        ({"tokenAttributes": {**TOKEN, "serviceAccountTokenAudience": ""}}, "TokenAudience: is missing"),
        ({"tokenAttributes": {**TOKEN, "requireServiceAccount": None}}, "requireServiceAccount: is missing"),
        ({"tokenAttributes": {**TOKEN, "requireServiceAccount": False}}, "must be empty when"),
        (
            {"tokenAttributes": {**TOKEN, "optionalServiceAccountAnnotationKeys": ["example.com/Role"]}},
            "the annotation 'example.com/Role' is there 2 times",
        ),
        (
            {"tokenAttributes": {**TOKEN, "optionalServiceAccountAnnotationKeys": ["-"]}},
            "optionalServiceAccountAnnotationKeys: '-' must be",
        ),
        (
            {"tokenAttributes": TOKEN, "apiVersion": "credentialprovider.kubelet.k8s.io/v1beta1"},
            "tokenAttributes: needs a provider with apiVersion: credentialprovider.kubelet.k8s.io/v1",
        ),
    ],
)
def test_load_providers_invalid_field_raises(
    tmp_path: Path, bin_dir: Path, change: dict[str, Any], expected: str
) -> None:
    (tmp_path / "c").write_text(json.dumps(document({**PROVIDER, **change})))
    assert re.search(re.escape(expected), problems(tmp_path / "c", bin_dir))


def test_load_providers_token_attributes_only_with_gate(tmp_path: Path, bin_dir: Path) -> None:
    config = tmp_path / "c"
    config.write_text(json.dumps(document({**PROVIDER, "tokenAttributes": TOKEN})))
    assert load_providers(config, bin_dir, service_account_tokens=True)
    with pytest.raises(ConfigError, match=r"tokenAttributes: is not supported when the feature gate Kubelet"):
        load_providers(config, bin_dir, service_account_tokens=False)
    config.write_text(json.dumps(document(PROVIDER)))
    assert load_providers(config, bin_dir, service_account_tokens=False)


def test_load_providers_token_attributes_accepted_only_in_v1(tmp_path: Path, bin_dir: Path) -> None:
    config = tmp_path / "c"
    config.write_text(json.dumps(document({**PROVIDER, "tokenAttributes": TOKEN})))
    [found] = load_providers(config, bin_dir)
    assert found.token_attributes is not None
    assert found.token_attributes.require_service_account is True
    config.write_text(json.dumps(document({**PROVIDER, "tokenAttributes": TOKEN}, version="v1beta1")))
    assert "providers[0].tokenAttributes: there is no such field in" in problems(config, bin_dir)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"apiVersion": "kubelet.config.k8s.io/v2", "kind": "CredentialProviderConfig"},
            "apiVersion: must be",
        ),
        ({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "Pod"}, "kind: must be CredentialProviderConfig"),
        ({}, "apiVersion: must be kubelet.config.k8s.io/v1\nkind: must be CredentialProviderConfig"),
        (document(), "providers: must have at least one provider"),
    ],
)
def test_load_providers_wrong_document_raises(
    tmp_path: Path, bin_dir: Path, content: dict[str, Any], expected: str
) -> None:
    (tmp_path / "c").write_text(json.dumps(content))
    assert expected in problems(tmp_path / "c", bin_dir)


def test_load_providers_missing_or_not_executable_binary_raises(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "c").write_text(json.dumps(document(PROVIDER, {**PROVIDER, "name": "absent"})))
    assert problems(tmp_path / "c", bin_dir) == (
        f"{bin_dir}/absent: does not exist: install the program of this credential provider"
    )
    assert "is not a folder" in problems(tmp_path / "c", tmp_path / "nowhere")
    (bin_dir / "absent").write_text("")
    assert f"chmod +x {bin_dir}/absent" in problems(tmp_path / "c", bin_dir)


def test_load_providers_reports_all_problems_of_all_files(tmp_path: Path, bin_dir: Path) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "a.yaml").write_text("{")
    (folder / "b.yaml").write_text(json.dumps(document({**PROVIDER, "matchImages": [], "x": 1})))
    lines = problems(folder, bin_dir).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{folder}/a.yaml: ")
    assert lines[1] == f"{folder}/b.yaml: providers[0].x: there is no such field: remove it"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*PROVIDER, *TOKEN]), inner),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from([*PROVIDER, "env", "args", "tokenAttributes"]), values))
def test_load_providers_any_values_raises_only_config_error(
    tmp_path: Path, bin_dir: Path, change: dict[str, Any]
) -> None:
    (tmp_path / "c").write_text(json.dumps(document({**PROVIDER, **change})))
    with contextlib.suppress(ConfigError):
        load_providers(tmp_path / "c", bin_dir)
