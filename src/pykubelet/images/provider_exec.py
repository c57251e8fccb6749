"""Asking one credential provider once: a request on its standard input, the answer on its output.

The program gets a minute and a bounded answer, and is ended with everything it started when it
takes longer, says more, or nobody waits any more. What it answers is secret and appears in no
message; its complaints on standard error do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from pykubelet.api.duration import Duration
from pykubelet.api.text import quoted
from pykubelet.images.keyring import Credentials, Registries
from pykubelet.images.provider_config import CredentialProvider
from pykubelet.kube.plugin_process import TooMuch, run_bounded

TIMEOUT_SECONDS = 60.0
MAX_ANSWER_BYTES = 1024 * 1024

CacheKey = Literal["Image", "Registry", "Global"]
"""The images that an answer is good for: this one, all of its registry, or all of the provider."""


class ProviderError(Exception):
    """A credential provider did not give an answer that can be used: one line without secrets."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider said."""

    registries: Registries
    cache_key: CacheKey
    cache_duration: Duration | None
    """For how long; None when the provider leaves it to the configuration."""


async def ask_provider(
    provider: CredentialProvider,
    program: Path,
    repository: str,
    token: str = "",
    annotations: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """Ask for the credentials of a repository, perhaps in a service account's name; raises ProviderError."""
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
    output = await _run(program, provider.args, environment, json.dumps(request).encode() + b"\n")
    return _read_answer(output, provider.api_version)


class _AuthConfig(msgspec.Struct, forbid_unknown_fields=True):
    username: str = ""
    password: str = ""


class _Response(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    kind: str = ""
    api_version: str = ""
    cache_key_type: CacheKey | None = None
    cache_duration: str | None = None
    auth: dict[str, _AuthConfig] | None = None


def _read_answer(output: bytes, api_version: str) -> Answer:
    try:
        response = msgspec.json.decode(output, type=_Response)
        duration = Duration.parse(response.cache_duration) if response.cache_duration is not None else None
    except (msgspec.MsgspecError, ValueError):
        # The library's own words may quote what it read.
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
    return Answer(registries, response.cache_key_type, duration)


async def _run(program: Path, args: Sequence[str], environment: Mapping[str, str], request: bytes) -> bytes:
    try:
        finished = await run_bounded(
            [str(program), *args],
            environment,
            seconds=TIMEOUT_SECONDS,
            max_bytes=MAX_ANSWER_BYTES,
            data=request,
        )
    except TimeoutError:
        raise ProviderError(f"it did not answer within {TIMEOUT_SECONDS:g} s") from None
    except TooMuch:
        raise ProviderError(f"its answer is longer than {MAX_ANSWER_BYTES // 1024} KiB") from None
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise ProviderError(f"{program} could not be started: {why}") from None
    if finished.status:
        words = finished.complaint or "it gave no reason"
        raise ProviderError(f"it failed with status {finished.status}: {words}")
    return finished.output
