"""Asking one credential provider once: a request on its standard input, the answer on its output.

The program gets a minute and a bounded answer, and is ended with everything it started when it
takes longer, says more, or nobody waits any more. What it answers is secret and appears in no
message; its complaints on standard error do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pykubelet.api.duration import Duration
from pykubelet.api.text import quoted
from pykubelet.images.keyring import Credentials, Registries
from pykubelet.images.provider_config import CredentialProvider

TIMEOUT_SECONDS = 60.0
MAX_ANSWER_BYTES = 1024 * 1024

_MAX_COMPLAINT_BYTES = 1024
_CHUNK = 64 * 1024
_END_SECONDS = 5.0

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


async def ask_provider(provider: CredentialProvider, program: Path, repository: str) -> Answer:
    """Ask for the credentials of a repository; raises ProviderError."""
    request = {
        "kind": "CredentialProviderRequest",
        "apiVersion": provider.api_version,
        "image": repository,
    }
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


async def _run(program: Path, args: Sequence[str], environment: dict[str, str], request: bytes) -> bytes:
    try:
        process = await asyncio.create_subprocess_exec(
            str(program),
            *args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise ProviderError(f"{program} could not be started: {why}") from None
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    complete = False
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(stdin, request))
            complaint = tasks.create_task(_drain(stderr))
            output = await _read(stdout)
            if len(output) > MAX_ANSWER_BYTES:
                await _end(process)
            await process.wait()
        complete = True
    except TimeoutError:
        raise ProviderError(f"it did not answer within {TIMEOUT_SECONDS:g} s") from None
    finally:
        if not complete:
            await _end(process)
    if len(output) > MAX_ANSWER_BYTES:
        raise ProviderError(f"its answer is longer than {MAX_ANSWER_BYTES // 1024} KiB")
    if process.returncode:
        words = " ".join(complaint.result().decode(errors="replace").split())
        raise ProviderError(f"it failed with status {process.returncode}: {words or 'it gave no reason'}")
    return output


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and what it started: all of it is in a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Its end is not seen before all that it wrote was read. Who left the session may keep the pipe
    # open for good; that is not worth waiting for.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            assert process.stdout is not None
            await _drain(process.stdout)
            await process.wait()


async def _feed(stream: asyncio.StreamWriter, request: bytes) -> None:
    # A program need not read the request to know its answer.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(request)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read to the end, or until it is too much."""
    output = bytearray()
    while len(output) <= MAX_ANSWER_BYTES and (chunk := await stream.read(_CHUNK)):
        output += chunk
    return bytes(output)


async def _drain(stream: asyncio.StreamReader) -> bytes:
    """Read to the end and give the beginning."""
    kept = b""
    while chunk := await stream.read(_CHUNK):
        kept += chunk[: _MAX_COMPLAINT_BYTES - len(kept)]
    return kept
