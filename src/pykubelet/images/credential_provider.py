"""Credential providers: exec plugins that return registry credentials for images.

The configuration (`--image-credential-provider-config`, a file or a directory whose files are merged) lists
the plugins and the images that each is for; the binaries are in `--image-credential-provider-bin-dir`. It is
validated strictly and completely before the kubelet starts: a typo would otherwise surface weeks later as an
image that cannot be pulled.

`ImageManager` calls `ProviderPlugins.lookup` for each pull. A plugin runs only for images that match its
configuration, once at a time for the same image and identity, and not while its cached response is valid; the
cache is in memory. A plugin that fails is treated as one without credentials: the pull proceeds without it,
and the failure is in the log and in the pod's timeline.

A plugin receives a CredentialProviderRequest on standard input and writes its response to standard output. It
has 60 s and 1 MiB; it is killed with all its child processes when it exceeds either, or when no caller waits
any more. The response is secret and appears in no message; standard error does.

With `tokenAttributes` the request contains a token of the pod's service account, valid for the plugin's
audience only, and the configured annotations of the account. For an account without a required annotation the
plugin does not run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from pykubelet.api.duration import Duration
from pykubelet.api.names import qualified_name_problem
from pykubelet.api.pod import Pod
from pykubelet.config.codec import decode
from pykubelet.config.documents import read_document
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.config.types import ConfigStruct, Pointer
from pykubelet.images.credentials import (
    Credentials,
    CredentialSource,
    Keyring,
    Registries,
    ServiceAccountCoordinates,
    registry_key,
    registry_matches,
)
from pykubelet.images.metrics import ImageMetrics
from pykubelet.linux.processes import OutputTooLarge, run_bounded
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectError
from pykubelet.util.singleflight import ScopeClosed, Singleflight
from pykubelet.util.tasks import TaskScope
from pykubelet.util.text import quoted

if TYPE_CHECKING:
    from pykubelet.objects.cluster_objects import ClusterObjects

log = get_logger(__name__)
KIND = "CredentialProviderConfig"
API_VERSIONS = tuple(f"kubelet.config.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1"))
PROTOCOLS = tuple(f"credentialprovider.kubelet.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1"))
"""API versions of the protocol between kubelet and plugin, the preferred one first."""
_SUFFIXES = (".json", ".yaml", ".yml")
_CACHE_TYPES = ("ServiceAccount", "Token")


class ExecEnvVar(ConfigStruct):
    """An environment variable of a plugin, in addition to the kubelet's own."""

    name: str = ""
    value: str = ""


class TokenAttributes(ConfigStruct):
    """The service account token that a provider requires, and how its responses are cached."""

    service_account_token_audience: str = ""
    cache_type: str = ""
    require_service_account: Pointer[bool | None] = None
    required_service_account_annotation_keys: list[str] = []
    optional_service_account_annotation_keys: list[str] = []


class CredentialProvider(ConfigStruct):
    """A plugin and the images that it is for."""

    name: str = ""
    match_images: list[str] = []
    default_cache_duration: Pointer[Duration | None] = None
    api_version: str = ""
    args: list[str] = []
    env: list[ExecEnvVar] = []
    token_attributes: TokenAttributes | None = None


TOKEN_GATE = "KubeletServiceAccountTokenForCredentialProviders"  # noqa: S105
"""Feature gate of `tokenAttributes`."""


class _Document(ConfigStruct):
    api_version: str = ""
    kind: str = ""
    providers: list[CredentialProvider] = []


def load_providers(
    config: Path, bin_dir: Path, *, service_account_tokens: bool = True
) -> list[CredentialProvider]:
    """Read and validate the configuration and the binaries.

    `service_account_tokens` is whether providers may get tokens of pods. Raises ConfigError with all
    problems.
    """
    files = _files(config)
    providers: list[CredentialProvider] = []
    problems: list[Problem] = []
    for path in files:
        prefix = f"{path}: " if len(files) > 1 else ""
        try:
            found, invalid = _read(read_document(path), service_account_tokens=service_account_tokens)
        except ConfigError as err:
            problems += err.problems
            continue
        providers += found
        problems += [Problem(prefix + problem.path, problem.message) for problem in invalid]
    for name, count in Counter(provider.name for provider in providers).items():
        if count > 1:
            problems.append(Problem("providers", f"{quoted(name)} is there {count} times: keep one"))
    if not problems:
        problems += _binary_problems(providers, bin_dir)
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


def _read(
    document: dict[str, Any], *, service_account_tokens: bool
) -> tuple[list[CredentialProvider], list[Problem]]:
    """Validate the document of one file."""
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
        problems += _provider_problems(provider, path)
        if provider.token_attributes is not None and not service_account_tokens:
            message = f"is not supported when the feature gate {TOKEN_GATE} is disabled: enable it"
            problems.append(Problem(f"{path}.tokenAttributes", message))
        elif provider.token_attributes is not None:
            if version != API_VERSIONS[0]:
                message = f"there is no such field in {version}: write apiVersion: {API_VERSIONS[0]}"
                problems.append(Problem(f"{path}.tokenAttributes", message))
            problems += _token_problems(provider, provider.token_attributes, f"{path}.tokenAttributes")
    return read.providers, problems


def _provider_problems(provider: CredentialProvider, path: str) -> Iterator[Problem]:
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


def _token_problems(provider: CredentialProvider, token: TokenAttributes, path: str) -> Iterator[Problem]:
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


def _binary_problems(providers: list[CredentialProvider], bin_dir: Path) -> Iterator[Problem]:
    if not bin_dir.is_dir():
        yield Problem(str(bin_dir), "is not a folder: give the one with the credential providers' programs")
        return
    for provider in providers:
        binary = bin_dir / provider.name
        if not binary.is_file():
            yield Problem(str(binary), "does not exist: install the program of this credential provider")
        elif not os.access(binary, os.X_OK):
            yield Problem(str(binary), f"is not executable: chmod +x {binary}")


TIMEOUT_SECONDS = 60.0
MAX_RESPONSE_BYTES = 1024 * 1024
CacheKey = Literal["Image", "Registry", "Global"]
"""Scope of a cached response: this image, all images of its registry, or all of the provider."""


class ProviderError(Exception):
    """A credential provider failed or its response is invalid; the text is one line without secrets."""


@dataclass(frozen=True, slots=True)
class ProviderResponse:
    """The response of a provider."""

    registries: Registries
    cache_key: CacheKey
    cache_duration: Duration | None
    """Cache duration; None to use the one of the configuration."""


async def run_provider(
    provider: CredentialProvider,
    binary: Path,
    repository: str,
    token: str = "",
    annotations: Mapping[str, str] = MappingProxyType({}),
) -> ProviderResponse:
    """Run a provider for a repository, optionally with a service account token. Raises ProviderError."""
    request: dict[str, Any] = {
        "kind": "CredentialProviderRequest",
        "apiVersion": provider.api_version,
        "image": repository,
    }
    if token:
        request["serviceAccountToken"] = token
    if annotations:
        request["serviceAccountAnnotations"] = dict(annotations)
    environment = {**os.environ, **{variable.name: variable.value for variable in provider.env}}
    output = await _run(binary, provider.args, environment, json.dumps(request).encode() + b"\n")
    return _parse_response(output, provider.api_version)


class _AuthConfig(msgspec.Struct, forbid_unknown_fields=True):
    username: str = ""
    password: str = ""


class _Response(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    kind: str = ""
    api_version: str = ""
    cache_key_type: CacheKey | None = None
    cache_duration: str | None = None
    auth: dict[str, _AuthConfig] | None = None


def _parse_response(output: bytes, api_version: str) -> ProviderResponse:
    try:
        response = msgspec.json.decode(output, type=_Response)
        duration = Duration.parse(response.cache_duration) if response.cache_duration is not None else None
    except (msgspec.MsgspecError, ValueError):
        # The library's message may quote the content.
        raise ProviderError("its answer is not a valid CredentialProviderResponse") from None
    if response.kind != "CredentialProviderResponse":
        raise ProviderError(f"its answer is a {quoted(response.kind)}, not a CredentialProviderResponse")
    if response.api_version != api_version:
        raise ProviderError(
            f"its answer has apiVersion {quoted(response.api_version)}, the request had {api_version}"
        )
    if response.cache_key_type is None:
        raise ProviderError("its answer has no cacheKeyType: one of Image, Registry and Global is needed")
    registries = {
        registry: Credentials(auth.username, auth.password)
        for registry, auth in (response.auth or {}).items()
    }
    return ProviderResponse(registries, response.cache_key_type, duration)


async def _run(binary: Path, args: Sequence[str], environment: Mapping[str, str], request: bytes) -> bytes:
    try:
        finished = await run_bounded(
            [str(binary), *args],
            environment,
            seconds=TIMEOUT_SECONDS,
            max_bytes=MAX_RESPONSE_BYTES,
            data=request,
        )
    except TimeoutError:
        raise ProviderError(f"it did not answer within {TIMEOUT_SECONDS:g} s") from None
    except OutputTooLarge:
        raise ProviderError(f"its answer is longer than {MAX_RESPONSE_BYTES // 1024} KiB") from None
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else str(err)
        raise ProviderError(f"{binary} could not be started: {reason}") from None
    if finished.status:
        message = finished.stderr or "it gave no reason"
        raise ProviderError(f"it failed with status {finished.status}: {message}")
    return finished.output


TOKEN_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Identity:
    """The service account for which a provider runs."""

    namespace: str
    name: str
    uid: str
    token: str = field(repr=False)
    annotations: Mapping[str, str]

    def cache_key(self, token_attributes: TokenAttributes | None) -> str:
        """Return the cache key: identities with different keys must not share a response."""
        parts = [self.namespace, self.name, self.uid, *self._annotations()]
        if token_attributes is not None and token_attributes.cache_type == "Token":
            parts.append(self.fingerprint)
        return "\0".join(parts)

    def call_key(self) -> str:
        """Return the deduplication key: identities with different keys need separate runs."""
        return "\0".join([self.fingerprint, *self._annotations()])

    @property
    def source(self) -> ServiceAccountCoordinates | None:
        """The service account; None when the provider received no token."""
        return ServiceAccountCoordinates(self.uid, self.namespace, self.name) if self.name else None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token, used where the token must not appear."""
        return hashlib.sha256(self.token.encode()).hexdigest()

    def _annotations(self) -> list[str]:
        return [part for pair in sorted(self.annotations.items()) for part in pair]


NO_IDENTITY = Identity("", "", "", "", {})
"""Identity without a service account: none is required, or the pod has none and need not have one."""


async def identify(
    pod: Pod, token_attributes: TokenAttributes | None, accounts: ClusterObjects | None
) -> Identity | None:
    """Return the identity to use, or None when the provider must not run. Raises ProviderError."""
    if token_attributes is None:
        return NO_IDENTITY
    name = pod.spec.service_account_name
    if not name:
        return None if token_attributes.require_service_account else NO_IDENTITY
    if accounts is None:
        raise ProviderError(
            f"it wants a token of service account {name}, "
            "which only an API server can give, and this agent runs without one"
        )
    try:
        account = await accounts.service_account(pod)
    except ObjectError as err:
        raise ProviderError(f"failed to get service account: {err}") from err
    account_annotations = account.metadata.annotations
    required = token_attributes.required_service_account_annotation_keys
    if not all(key in account_annotations for key in required):
        return None
    keys = [*required, *token_attributes.optional_service_account_annotation_keys]
    annotations = {key: account_annotations[key] for key in keys if key in account_annotations}
    try:
        token = await accounts.token(
            pod,
            audience=token_attributes.service_account_token_audience,
            seconds=TOKEN_SECONDS,
            account_uid=account.metadata.uid,
        )
    except ObjectError as err:
        raise ProviderError(f"failed to get service account token: {err}") from err
    return Identity(pod.metadata.namespace, name, account.metadata.uid, token, annotations)


class ProviderResult(NamedTuple):
    """Credentials for an image, and the failures of providers."""

    credentials: list[Credentials]
    failures: list[str]
    """One line per failed provider."""


class CredentialPlugin(Protocol):
    """A credential provider: an exec plugin, or third-party code (`python_providers.py`)."""

    @property
    def name(self) -> str:
        """Name in logs."""

    def is_for(self, repository: str) -> bool:
        """Return whether the provider is for this image."""

    async def registries(self, repository: str, pod: Pod) -> _Tracked:
        """Return credentials and their source. Raises ProviderError."""


class ProviderPlugins:
    """All credential providers of the node."""

    def __init__(
        self,
        providers: Sequence[CredentialProvider],
        bin_dir: Path,
        tasks: TaskScope,
        metrics: ImageMetrics,
        accounts: ClusterObjects | None = None,
        further: Sequence[CredentialPlugin] = (),
    ) -> None:
        """Initialize with the configured exec plugins and `further` providers, which are tried after them."""
        self._bin_dir = bin_dir
        self._tasks = tasks
        self._metrics = metrics
        self._accounts = accounts
        self._providers: Sequence[CredentialProvider] = ()
        self._further = list(further)
        self._exec_plugins: list[_Plugin] = []
        self.set_providers(providers)

    @property
    def providers(self) -> Sequence[CredentialProvider]:
        """The configuration in effect."""
        return self._providers

    def set_providers(self, providers: Sequence[CredentialProvider]) -> None:
        """Replace the configuration; a provider that has not changed keeps its cached credentials."""
        known = dict(zip((provider.name for provider in self._providers), self._exec_plugins, strict=True))
        unchanged = {provider.name for provider in self._providers if provider in providers}
        self._exec_plugins = [
            known[provider.name]
            if provider.name in unchanged
            else _Plugin(provider, self._bin_dir, self._tasks, self._metrics, self._accounts)
            for provider in providers
        ]
        self._providers = list(providers)

    async def lookup(self, repository: str, pod: Pod) -> ProviderResult:
        """Query all providers that match this repository concurrently."""
        plugins: list[CredentialPlugin] = [*self._exec_plugins, *self._further]
        matching = [plugin for plugin in plugins if plugin.is_for(repository)]
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(_try(plugin, repository, pod)) for plugin in matching]
        keyring, failures = Keyring(), []
        for run in runs:
            match run.result():
                case str() as failure:
                    failures.append(failure)
                case registries, source:
                    keyring.add(registries, source)
        return ProviderResult(keyring.lookup(repository), failures)


_Tracked = tuple[Registries, CredentialSource | None]
"""Credentials of a provider, and the service account whose token it received."""


async def _try(plugin: CredentialPlugin, repository: str, pod: Pod) -> _Tracked | str:
    try:
        return await plugin.registries(repository, pod)
    except (ProviderError, ScopeClosed) as err:
        log.error(
            err,
            "Failed to get credentials from credential provider",
            provider=plugin.name,
            image=repository,
            pod=pod.full_name,
        )
        return f"credential provider {plugin.name} failed: {err}"


class _CacheEntry(NamedTuple):
    registries: Registries
    until: float


class _Plugin:
    """One provider and its cached responses."""

    def __init__(
        self,
        provider: CredentialProvider,
        bin_dir: Path,
        tasks: TaskScope,
        metrics: ImageMetrics,
        accounts: ClusterObjects | None,
    ) -> None:
        self.name = provider.name
        self._provider = provider
        self._binary = bin_dir / provider.name
        self._metrics = metrics
        self._accounts = accounts
        self._calls: Singleflight[tuple[str, str], Registries] = Singleflight(
            tasks, f"credential-provider-{self.name}"
        )
        self._cache: dict[_EntryKey, _CacheEntry] = {}

    def is_for(self, repository: str) -> bool:
        """Return whether this provider is configured for the image."""
        return any(registry_matches(pattern, repository) for pattern in self._provider.match_images)

    async def registries(self, repository: str, pod: Pod) -> _Tracked:
        """Return the cached or new credentials of the provider. Raises ProviderError."""
        identity = await identify(pod, self._provider.token_attributes, self._accounts)
        if identity is None:
            log.v(5).info(
                "Skipped credential provider, pod does not match its tokenAttributes",
                provider=self.name,
                pod=pod.full_name,
            )
            return {}, None
        now, owner = _now(), identity.cache_key(self._provider.token_attributes)
        for scope in ("Image", "Registry", "Global"):
            entry = self._cache.get(_entry_key(scope, repository, owner))
            if entry is not None and now < entry.until:
                return entry.registries, identity.source
        call = (repository, identity.call_key())
        registries = await self._calls.run(call, lambda: self._run_plugin(repository, identity, owner))
        return registries, identity.source

    async def _run_plugin(self, repository: str, identity: Identity, owner: str) -> Registries:
        log.v(5).info("Running credential provider", provider=self.name, image=repository)
        started = _now()
        failed = True
        try:
            response = await run_provider(
                self._provider, self._binary, repository, identity.token, identity.annotations
            )
            failed = False
        finally:
            self._metrics.observe_plugin_run(self.name, _now() - started, failed=failed)
        self._check_no_echo(response, identity)
        duration = response.cache_duration
        if duration is None:
            duration = self._provider.default_cache_duration
        now = _now()
        self._cache = {key: entry for key, entry in self._cache.items() if now < entry.until}
        if duration is not None and duration > 0:
            until = now + duration.seconds
            self._cache[_entry_key(response.cache_key, repository, owner)] = _CacheEntry(
                response.registries, until
            )
        return response.registries

    def _check_no_echo(self, response: ProviderResponse, identity: Identity) -> None:
        """Raise ProviderError if a response that other pods may reuse contains the pod's own token."""
        token_attributes = self._provider.token_attributes
        if token_attributes is None or not identity.token or token_attributes.cache_type == "Token":
            return
        if any(login.password == identity.token for login in response.registries.values()):
            raise ProviderError(
                "it gave the service account's token as the password: write cacheType: Token for it"
            )


_EntryKey = tuple[CacheKey, str, str]
"""Cache key: scope, image or registry, and identity."""


def _entry_key(scope: CacheKey, repository: str, owner: str) -> _EntryKey:
    name = {"Image": repository, "Registry": repository.partition("/")[0], "Global": ""}[scope]
    return scope, name, owner


def _now() -> float:
    return asyncio.get_running_loop().time()
