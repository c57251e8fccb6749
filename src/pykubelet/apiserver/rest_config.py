"""REST configuration: one cluster and one user of a kubeconfig.

`parse` is pure: it returns a `RestConfig` or raises KubeconfigError with one line that contains cause and
remedy. Unknown fields are ignored, as in client-go. Paths of certificates and tokens stay paths, because
the files change while the kubelet runs; `credentials.py` reads them. Secrets are excluded from `repr`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec

from pykubelet.api.meta import from_document
from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.apiserver.proxy import proxy_problem
from pykubelet.util.text import quoted


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """An exec credential plugin."""

    command: str
    api_version: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    install_hint: str = ""
    provide_cluster_info: bool = False
    cluster_config: Any = field(default=None, repr=False)
    """Configuration for plugins in the cluster's kubeconfig entry."""


@dataclass(frozen=True, slots=True)
class Impersonation:
    """The user to impersonate."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestConfig:
    """One cluster and one user of a kubeconfig, all that a client of the API server needs.

    Certificates and keys are PEM, as bytes or as the path of a file. Without TLS no credentials are sent, so
    that they never cross the network in clear text.
    """

    server: str
    """`https://host:port`, optionally with a path; without a trailing slash."""
    tls_server_name: str = ""
    insecure: bool = False
    ca: bytes | Path | None = None
    """None: the certificate authorities of the host."""
    certificate: bytes | Path | None = None
    key: bytes | Path | None = field(default=None, repr=False)
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    impersonate: Impersonation | None = None
    plugin: ExecPlugin | None = None
    proxy: str = field(default="", repr=False)
    compression: bool = True
    namespace: str = "default"

    @property
    def uses_tls(self) -> bool:
        """Whether the server URL is https."""
        return self.server.startswith("https:")


EXEC_API_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_SCHEMES = ("https", "http")


def load(path: Path, read: Callable[[Path], Mapping[str, Any]], context: str = "") -> RestConfig:
    """Read a kubeconfig file with `read` (which raises its own errors) and select a context.

    Relative paths in it are relative to its directory.
    """
    return parse(read(path), path, context)


def parse(document: Mapping[str, Any], where: Path, context: str = "") -> RestConfig:
    """Return the RestConfig of a kubeconfig; `where` is the path of the file.

    `context` overrides current-context. Raises KubeconfigError.
    """
    try:
        config = from_document(_Config, document)
        return _access(config, context, where.parent)
    except (ValueError, _Unusable) as err:
        raise KubeconfigError(f"{where}: {err}") from None


class _Struct(msgspec.Struct, rename="kebab"):
    """Base of the kubeconfig structs; null is equivalent to absent."""


class _Cluster(_Struct):
    server: str | None = None
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool | None = None
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    proxy_url: str | None = None
    disable_compression: bool | None = None
    extensions: list[dict[str, Any]] | None = None


class _EnvVar(_Struct):
    name: str = ""
    value: str = ""


class _Exec(_Struct, rename="camel"):
    command: str = ""
    args: list[str] | None = None
    env: list[_EnvVar] | None = None
    api_version: str = ""
    install_hint: str | None = None
    provide_cluster_info: bool | None = None
    interactive_mode: str | None = None


class _User(_Struct):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    as_: str | None = msgspec.field(default=None, name="as")
    as_uid: str | None = None
    as_groups: list[str] | None = None
    as_user_extra: dict[str, list[str]] | None = None
    username: str | None = None
    password: str | None = None
    auth_provider: dict[str, Any] | None = None
    exec: _Exec | None = None


class _Context(_Struct):
    cluster: str | None = None
    user: str | None = None
    namespace: str | None = None


class _NamedCluster(_Struct):
    name: str = ""
    cluster: _Cluster | None = None


class _NamedUser(_Struct):
    name: str = ""
    user: _User | None = None


class _NamedContext(_Struct):
    name: str = ""
    context: _Context | None = None


class _Config(_Struct):
    kind: str | None = None
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None
    current_context: str | None = None


class _Unusable(Exception):
    """The reason why the kubeconfig is unusable, without the path."""


_Part = TypeVar("_Part")


def _access(config: _Config, context_name: str, directory: Path) -> RestConfig:
    if config.kind not in (None, "", "Config"):
        raise _Unusable(f"is a {quoted(config.kind)}, not a kubeconfig: its kind must be Config")
    clusters = _by_name("clusters", [(c.name, c.cluster or _Cluster()) for c in config.clusters or ()])
    users = _by_name("users", [(u.name, u.user or _User()) for u in config.users or ()])
    contexts = _by_name("contexts", [(c.name, c.context or _Context()) for c in config.contexts or ()])
    name = context_name or config.current_context or ""
    if not name:
        raise _Unusable(f"has no current-context: set it to one of its contexts ({_names(contexts)})")
    context = _select("context", name, contexts)
    if not context.cluster:
        raise _Unusable(f"context {quoted(name)} names no cluster")
    if not context.user:
        raise _Unusable(f"context {quoted(name)} names no user")
    cluster = _select("cluster", context.cluster, clusters)
    user = _select("user", context.user, users)
    try:
        access = _cluster_access(cluster, directory, context.namespace or "default")
    except _Unusable as err:
        raise _Unusable(f"cluster {quoted(context.cluster)}: {err}") from None
    try:
        return _with_user(access, user, cluster, directory)
    except _Unusable as err:
        raise _Unusable(f"user {quoted(context.user)}: {err}") from None


def _cluster_access(cluster: _Cluster, directory: Path, namespace: str) -> RestConfig:
    if not cluster.server:
        raise _Unusable("has no server: write one such as https://10.0.0.1:6443")
    parts = _server_parts(cluster.server)
    if "@" in parts.netloc:
        raise _Unusable("server holds a user name or password: give them to the user instead")
    ca = _material(
        "certificate-authority", cluster.certificate_authority_data, cluster.certificate_authority, directory
    )
    if ca is not None and cluster.insecure_skip_tls_verify:
        raise _Unusable(
            "certificate-authority and insecure-skip-tls-verify contradict each other: remove the latter"
        )
    proxy = cluster.proxy_url or ""
    if proxy and (problem := proxy_problem(proxy)):
        raise _Unusable(f"proxy-url {problem}")
    return RestConfig(
        server=urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", "")),
        tls_server_name=cluster.tls_server_name or "",
        insecure=bool(cluster.insecure_skip_tls_verify),
        ca=ca,
        proxy=proxy,
        compression=not cluster.disable_compression,
        namespace=namespace,
    )


def _server_parts(server: str) -> SplitResult:
    try:
        parts = urlsplit(server)
        if parts.scheme in _SCHEMES and parts.hostname and (parts.port is None or parts.port > 0):
            return parts
    except ValueError:
        pass
    raise _Unusable(f"server {quoted(server)} is not a URL: write one such as https://10.0.0.1:6443")


def _with_user(access: RestConfig, user: _User, cluster: _Cluster, directory: Path) -> RestConfig:
    certificate = _material(
        "client-certificate", user.client_certificate_data, user.client_certificate, directory
    )
    key = _material("client-key", user.client_key_data, user.client_key, directory)
    if certificate is not None and key is None:
        raise _Unusable("has a client-certificate but no key: add client-key or client-key-data")
    if user.token and (user.username or user.password):
        raise _Unusable("has a token and a password: keep one of them")
    if user.auth_provider is not None:
        raise _Unusable(
            f"auth-provider {quoted(str(user.auth_provider.get('name', '')))} is not supported: "
            "use an exec plugin instead"
        )
    return dataclasses.replace(
        access,
        certificate=certificate,
        key=key if certificate is not None else None,
        token=user.token or "",
        token_file=_resolve_path(user.token_file, directory) if user.token_file else None,
        username=user.username or "",
        password=user.password or "",
        impersonate=_impersonation(user),
        plugin=_plugin(user.exec, cluster, directory) if user.exec is not None else None,
    )


def _impersonation(user: _User) -> Impersonation | None:
    if not user.as_:
        if user.as_uid or user.as_groups or user.as_user_extra:
            raise _Unusable("has as-uid, as-groups or as-user-extra without as: name the user too")
        return None
    extra = {name: tuple(values) for name, values in (user.as_user_extra or {}).items()}
    return Impersonation(user.as_, user.as_uid or "", tuple(user.as_groups or ()), extra)


def _plugin(plugin: _Exec, cluster: _Cluster, directory: Path) -> ExecPlugin:
    if not plugin.command:
        raise _Unusable("exec has no command")
    if plugin.api_version not in EXEC_API_VERSIONS:
        raise _Unusable(
            f"exec has apiVersion {quoted(plugin.api_version)}: it must be {' or '.join(EXEC_API_VERSIONS)}"
        )
    mode = plugin.interactive_mode or ("" if plugin.api_version == EXEC_API_VERSIONS[0] else "IfAvailable")
    if mode == "Always":
        raise _Unusable("exec has interactiveMode Always, but nobody sits in front of a node agent")
    if mode not in ("Never", "IfAvailable"):
        raise _Unusable(f"exec has interactiveMode {quoted(mode)}: it must be Never or IfAvailable")
    if any(not variable.name for variable in plugin.env or ()):
        raise _Unusable("exec has a variable without a name in env")
    extensions = {extension.get("name"): extension.get("extension") for extension in cluster.extensions or ()}
    return ExecPlugin(
        # As in client-go: a plain name is searched on PATH, a path is relative to the kubeconfig.
        command=str(_resolve_path(plugin.command, directory)) if os.sep in plugin.command else plugin.command,
        api_version=plugin.api_version,
        args=tuple(plugin.args or ()),
        env={variable.name: variable.value for variable in plugin.env or ()},
        install_hint=plugin.install_hint or "",
        provide_cluster_info=bool(plugin.provide_cluster_info),
        cluster_config=extensions.get(_EXEC_EXTENSION),
    )


def _material(name: str, data: str | None, file: str | None, directory: Path) -> bytes | Path | None:
    if data and file:
        raise _Unusable(f"has {name} and {name}-data: keep one of them")
    if data:
        try:
            return base64.b64decode("".join(data.split()), validate=True)
        except (binascii.Error, ValueError):
            raise _Unusable(f"{name}-data is not base64") from None
    return _resolve_path(file, directory) if file else None


def _resolve_path(path: str, directory: Path) -> Path:
    return Path(os.path.normpath(directory / path))


def _by_name(what: str, parts: list[tuple[str, _Part]]) -> dict[str, _Part]:
    if len(found := dict(parts)) != len(parts):
        names = [name for name, _ in parts]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unusable(f"has several {what} of the name {quoted(twice)}: keep one of them")
    return found


def _select(what: str, name: str, parts: Mapping[str, _Part]) -> _Part:
    if name not in parts:
        raise _Unusable(f"has no {what} {quoted(name)}: it has {_names(parts)}")
    return parts[name]


def _names(parts: Mapping[str, Any]) -> str:
    return ", ".join(quoted(name) for name in list(parts)[:5]) or "none"
