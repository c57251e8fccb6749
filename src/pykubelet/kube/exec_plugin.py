"""Credentials from a program (`exec` in a kubeconfig): one run of it, and the answer.

The program is told what is asked of it in KUBERNETES_EXEC_INFO and answers with an ExecCredential on
its output. It gets a minute, a bounded answer and no terminal. What it answers is secret and appears
in no message; its complaints do.
"""

from __future__ import annotations

import base64
import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from pykubelet.api.text import quoted
from pykubelet.kube.access import Access, ExecPlugin
from pykubelet.kube.plugin_process import TooMuch, run_bounded

TIMEOUT_SECONDS = 60.0
MAX_ANSWER_BYTES = 1024 * 1024


class PluginError(Exception):
    """The program gave no credentials that can be used: one line without secrets."""


@dataclass(frozen=True, slots=True)
class PluginAnswer:
    """What the program gave: a token, or a certificate with its key in PEM, or both."""

    token: str = field(default="", repr=False)
    identity: bytes = field(default=b"", repr=False)
    expires: datetime | None = None
    """None: until the API server refuses them."""


async def ask_plugin(
    plugin: ExecPlugin, access: Access, ca: bytes | None, *, environ: Mapping[str, str] = os.environ
) -> PluginAnswer:
    """Run the program; raises PluginError. `ca` is what the program may be told of the authority."""
    environment = {
        **environ,
        **plugin.env,
        "KUBERNETES_EXEC_INFO": exec_info(plugin, access, ca).decode(),
    }
    try:
        finished = await run_bounded(
            [plugin.command, *plugin.args], environment, seconds=TIMEOUT_SECONDS, max_bytes=MAX_ANSWER_BYTES
        )
    except FileNotFoundError:
        hint = f": {_plain(plugin.install_hint)}" if plugin.install_hint else ": install it"
        raise PluginError(f"exec plugin {plugin.command} was not found{hint}") from None
    except (OSError, ValueError) as err:
        if isinstance(err, TimeoutError):
            raise PluginError(
                f"exec plugin {plugin.command} did not answer within {TIMEOUT_SECONDS:g} s"
            ) from None
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise PluginError(f"exec plugin {plugin.command} could not be started: {why}") from None
    except TooMuch:
        raise PluginError(
            f"exec plugin {plugin.command}: its answer is longer than {MAX_ANSWER_BYTES // 1024} KiB"
        ) from None
    if finished.status:
        words = _plain(finished.complaint) or "it gave no reason"
        raise PluginError(f"exec plugin {plugin.command} failed with status {finished.status}: {words}")
    try:
        return read_answer(finished.output, plugin.api_version)
    except PluginError as err:
        raise PluginError(f"exec plugin {plugin.command}: {err}") from None


def exec_info(plugin: ExecPlugin, access: Access, ca: bytes | None) -> bytes:
    """Give what the program is told in KUBERNETES_EXEC_INFO."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.provide_cluster_info:
        cluster = {
            "server": access.server,
            "tls-server-name": access.tls_server_name,
            "insecure-skip-tls-verify": access.insecure,
            "certificate-authority-data": base64.b64encode(ca).decode() if ca else "",
            "proxy-url": access.proxy,
            "disable-compression": not access.compression,
            "config": plugin.cluster_config,
        }
        spec["cluster"] = {name: value for name, value in cluster.items() if value}
    return msgspec.json.encode({"kind": "ExecCredential", "apiVersion": plugin.api_version, "spec": spec})


class _Status(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    kind: str = ""
    api_version: str = ""
    status: _Status | None = None


def read_answer(output: bytes, api_version: str) -> PluginAnswer:
    """Read an ExecCredential; raises PluginError."""
    try:
        answer = msgspec.json.decode(output, type=_ExecCredential)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # The library's own words may quote what it read.
        raise PluginError("its answer is not a valid ExecCredential") from None
    if answer.kind != "ExecCredential":
        raise PluginError(f"its answer is a {quoted(answer.kind)}, not an ExecCredential")
    if answer.api_version != api_version:
        raise PluginError(
            f"its answer has apiVersion {quoted(answer.api_version)}, the kubeconfig wants {api_version}"
        )
    if answer.status is None:
        raise PluginError("its answer has no status")
    status = answer.status
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise PluginError("its answer has a certificate or a key, but not both")
    if not status.token and not status.client_certificate_data:
        raise PluginError("its answer has neither a token nor a certificate with its key")
    expires = status.expiration_timestamp
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    identity = f"{status.client_certificate_data}\n{status.client_key_data}".encode()
    return PluginAnswer(status.token, identity if status.client_certificate_data else b"", expires)


def _plain(text: str) -> str:
    """Put a stranger's text on one line, without what could upset a terminal."""
    shown = "".join(c if not unicodedata.category(c).startswith("C") else " " for c in text)
    return " ".join(shown.split())
