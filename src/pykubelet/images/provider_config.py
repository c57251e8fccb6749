"""The configuration of credential providers: which program is asked for which images.

`--image-credential-provider-config` names a file, or a folder whose files are taken together; the
programs lie in `--image-credential-provider-bin-dir`. Read strictly and completely before the agent
starts: a typing error here would otherwise show itself weeks later as an image that cannot be
pulled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykubelet.api.duration import Duration
from pykubelet.api.names import qualified_name_problem
from pykubelet.api.text import quoted
from pykubelet.config.decode import decode
from pykubelet.config.documents import read_document
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.types import ConfigStruct, Pointer
from pykubelet.images.keyring import registry_key

KIND = "CredentialProviderConfig"
API_VERSIONS = tuple(f"kubelet.config.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1"))
PROTOCOLS = tuple(f"credentialprovider.kubelet.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1"))
"""What the agent and a program can speak with each other."""

_SUFFIXES = (".json", ".yaml", ".yml")
_CACHE_TYPES = ("ServiceAccount", "Token")


class ExecEnvVar(ConfigStruct):
    """A variable that a program gets beside the agent's own."""

    name: str = ""
    value: str = ""


class TokenAttributes(ConfigStruct):
    """The token of the pod's service account that a provider wants."""

    service_account_token_audience: str = ""
    cache_type: str = ""
    require_service_account: Pointer[bool | None] = None
    required_service_account_annotation_keys: list[str] = []
    optional_service_account_annotation_keys: list[str] = []


class CredentialProvider(ConfigStruct):
    """One program and the images that it is asked for."""

    name: str = ""
    match_images: list[str] = []
    default_cache_duration: Pointer[Duration | None] = None
    api_version: str = ""
    args: list[str] = []
    env: list[ExecEnvVar] = []
    token_attributes: TokenAttributes | None = None


class _Document(ConfigStruct):
    api_version: str = ""
    kind: str = ""
    providers: list[CredentialProvider] = []


def load_providers(config: Path, bin_dir: Path) -> list[CredentialProvider]:
    """Read and check the configuration, the programs included; raises ConfigError with all problems."""
    files = _files(config)
    providers: list[CredentialProvider] = []
    problems: list[Problem] = []
    for path in files:
        where = f"{path}: " if len(files) > 1 else ""
        try:
            found, wrong = _read(read_document(path))
        except ConfigError as err:
            problems += err.problems
            continue
        providers += found
        problems += [Problem(where + problem.path, problem.message) for problem in wrong]
    for name, count in Counter(provider.name for provider in providers).items():
        if count > 1:
            problems.append(Problem("providers", f"{quoted(name)} is there {count} times: keep one"))
    if not problems:
        problems += _missing_programs(providers, bin_dir)
    if problems:
        raise ConfigError(problems)
    return providers


def _files(config: Path) -> list[Path]:
    if not config.is_dir():
        return [config]
    try:
        found = sorted(path for path in config.iterdir() if path.suffix in _SUFFIXES and not path.is_dir())
    except OSError as err:
        raise ConfigError([Problem(str(config), f"cannot be listed, {err.strerror}")]) from None
    if not found:
        message = "has no .json, .yaml or .yml file: put the configuration into it"
        raise ConfigError([Problem(str(config), message)])
    return found


def _read(document: dict[str, Any]) -> tuple[list[CredentialProvider], list[Problem]]:
    """Read one file's document."""
    version = document.get("apiVersion")
    problems = []
    if version not in API_VERSIONS:
        problems.append(Problem("apiVersion", f"must be {API_VERSIONS[0]}"))
    if document.get("kind") != KIND:
        problems.append(Problem("kind", f"must be {KIND}"))
    if problems:
        return [], problems
    read, problems = decode(_Document, document)
    if not read.providers and not problems:
        problems.append(Problem("providers", "must have at least one provider"))
    for index, provider in enumerate(read.providers):
        path = f"providers[{index}]"
        problems += _wrong(provider, path)
        if provider.token_attributes is not None:
            if version != API_VERSIONS[0]:
                message = f"there is no such field in {version}: write apiVersion: {API_VERSIONS[0]}"
                problems.append(Problem(f"{path}.tokenAttributes", message))
            problems += _wrong_token(provider, provider.token_attributes, f"{path}.tokenAttributes")
    return read.providers, problems


def _wrong(provider: CredentialProvider, path: str) -> Iterator[Problem]:
    if not provider.name or provider.name in (".", "..") or "/" in provider.name or " " in provider.name:
        yield Problem(f"{path}.name", "must be the name of a program in the providers' folder")
    if provider.api_version not in PROTOCOLS:
        yield Problem(f"{path}.apiVersion", f"must be one of {', '.join(PROTOCOLS)}")
    if not provider.match_images:
        yield Problem(f"{path}.matchImages", "must have at least one pattern, such as *.example.com")
    for index, pattern in enumerate(provider.match_images):
        if registry_key(pattern) is None:
            message = f"{quoted(pattern)} must be a registry such as *.example.com:5000/team"
            yield Problem(f"{path}.matchImages[{index}]", message)
    if provider.default_cache_duration is None:
        yield Problem(f"{path}.defaultCacheDuration", "is missing: write a duration such as 10m, or 0s")
    elif provider.default_cache_duration < 0:
        yield Problem(f"{path}.defaultCacheDuration", "must not be negative")
    for index, variable in enumerate(provider.env):
        if not variable.name or "=" in variable.name:
            yield Problem(f"{path}.env[{index}].name", "must be the name of a variable")


def _wrong_token(provider: CredentialProvider, token: TokenAttributes, path: str) -> Iterator[Problem]:
    required = token.required_service_account_annotation_keys
    optional = token.optional_service_account_annotation_keys
    if provider.api_version != PROTOCOLS[0]:
        yield Problem(path, f"needs a provider with apiVersion: {PROTOCOLS[0]}")
    if not token.service_account_token_audience:
        yield Problem(f"{path}.serviceAccountTokenAudience", "is missing: write who the token is for")
    if token.require_service_account is None:
        yield Problem(f"{path}.requireServiceAccount", "is missing: write true or false")
    elif not token.require_service_account and required:
        message = "must be empty when requireServiceAccount is false"
        yield Problem(f"{path}.requiredServiceAccountAnnotationKeys", message)
    if token.cache_type not in _CACHE_TYPES:
        yield Problem(f"{path}.cacheType", f"must be one of {', '.join(_CACHE_TYPES)}")
    for kind, keys in (("required", required), ("optional", optional)):
        for key in keys:
            if problem := qualified_name_problem(key.lower()):
                yield Problem(f"{path}.{kind}ServiceAccountAnnotationKeys", f"{quoted(key)} {problem}")
    for key, count in Counter([*required, *optional]).items():
        if count > 1:
            yield Problem(path, f"the annotation {quoted(key)} is there {count} times: keep one")


def _missing_programs(providers: list[CredentialProvider], bin_dir: Path) -> Iterator[Problem]:
    if not bin_dir.is_dir():
        yield Problem(str(bin_dir), "is not a folder: give the one with the credential providers' programs")
        return
    for provider in providers:
        program = bin_dir / provider.name
        if not program.is_file():
            yield Problem(str(program), "does not exist: install the program of this credential provider")
        elif not os.access(program, os.X_OK):
            yield Problem(str(program), f"is not executable: chmod +x {program}")
