"""One cluster and one user: all that is needed to ask an API server, as plain facts.

Files stay files here, because they change while the agent runs (`credentials.py` reads them).
Nothing secret shows in a `repr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A program that gives credentials when it is run."""

    command: str
    api_version: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    install_hint: str = ""
    provide_cluster_info: bool = False
    cluster_config: Any = field(default=None, repr=False)
    """What the cluster's own entry holds for plugins."""


@dataclass(frozen=True, slots=True)
class Impersonation:
    """The user in whose name requests are made."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Access:
    """One cluster and one user of a kubeconfig: all that is needed to ask the API server.

    Certificates and keys are PEM, given as bytes or as the file that holds them. An API server
    without TLS is asked without any credentials, so that they never travel in the clear.
    """

    server: str
    """`https://host:port`, perhaps with a path; never with a slash at the end."""
    tls_server_name: str = ""
    insecure: bool = False
    ca: bytes | Path | None = None
    """None: the machine's own certificate authorities."""
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
        """Whether the connection is protected."""
        return self.server.startswith("https:")
