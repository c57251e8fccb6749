"""Environment variables of containers, and the configMaps, secrets and files that they come from.

`container_env` is pure. Later sources override earlier ones: device plugins, `envFrom`, then `env`; service
variables fill in what is left. A variable may refer to earlier ones and to services as `$(NAME)`. A value
that cannot be resolved fails the container before it is created.

Container configs are built without I/O (`config.py`), so `gather_env_sources` first fetches everything
concurrently. A source that cannot be fetched is an error only when it is used: a variable that does not need
it, or whose reference is optional, is not affected.

Environment files in volumes (`fileKeyRef`) have a strict subset of the shell's assignment syntax:

    NAME='value'   # a comment

A value is enclosed in single quotes, is literal and may span lines. `NAME= 'x'` assigns the empty string, as
in a shell. Anything else is an error, so that a file does not have another meaning here than in a shell.

Containers write these files, so they are untrusted: the path may be a symbolic link to a file of the host, a
pipe that blocks, or a file as large as the disk. `read_inside` accepts only regular files inside the volume,
up to LARGEST bytes. The parser reads each byte once, line by line, retains only the requested values and
blocks its thread for less than a second for the largest file; it never runs on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from pykubelet.api.downward_api import checked_size, expand, field_value, resource_value
from pykubelet.api.ip import by_family
from pykubelet.api.pod import (
    Container,
    EnvFromSource,
    EnvVarSource,
    FileKeySelector,
    KeySelector,
    NamedRef,
    Pod,
)
from pykubelet.kuberuntime.configuration.options import RunContainerOptions
from pykubelet.kuberuntime.errors import (
    ContainerConfigError,
    MissingSource,
    ServicesNotSynced,
    convert_expansion_errors,
)
from pykubelet.objects.base import ObjectError, ObjectNotFound, PodObjects
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.mounts.sub_path import opened_inside
from pykubelet.volumes.plugin import MountedVolume

_Kind = Literal["ConfigMap", "Secret"]
_Data = Mapping[str, str] | Mapping[str, bytes]


@convert_expansion_errors()
def container_env(pod: Pod, container: Container, options: RunContainerOptions) -> dict[str, str]:
    """Return a container's environment variables. Raises ContainerConfigError.

    Bytes of secrets that are not UTF-8 are in the values as `surrogateescape` encodes them.
    """
    if options.service_env is None and not is_static_pod(pod):
        raise ServicesNotSynced("services have not yet been read at least once, cannot construct envvars")
    services = options.service_env or {}
    sources = _Sources(pod, options)
    variables: dict[str, str] = {}
    size = 0
    for env_from in container.env_from:
        variables |= {env_from.prefix + key: value for key, value in sources.all_values(env_from).items()}
    for variable in container.env:
        value: str | None = variable.value
        if value:
            value = expand(value, variables, services)
        elif variable.value_from is not None:
            value = sources.value(variable.value_from, container)
        if value is not None:
            variables[variable.name] = value
            # Checked for each variable: a few references to a long value could exhaust the memory.
            size = checked_size(size + len(value))
    env = {**options.device_options.env, **variables}
    env |= {name: value for name, value in services.items() if name not in env}
    return env


class _Sources:
    """Sources of values; each configMap and secret is looked up once."""

    def __init__(self, pod: Pod, options: RunContainerOptions) -> None:
        self._pod = pod
        self._options = options
        self._objects: dict[_Kind, Callable[[str], _Data]] = {
            "ConfigMap": cache(options.config_map),
            "Secret": cache(options.secret),
        }

    def all_values(self, source: EnvFromSource) -> dict[str, str]:
        """Return all values of the configMap or secret of an `envFrom` source."""
        if source.config_map_ref is not None:
            return self._bulk("ConfigMap", source.config_map_ref)
        if source.secret_ref is not None:
            return self._bulk("Secret", source.secret_ref)
        return {}

    def value(self, source: EnvVarSource, container: Container) -> str | None:
        """Return a variable's value; None when the reference is optional and its target does not exist."""
        if source.field_ref is not None or source.resource_field_ref is not None:
            return self._downward_value(source, container)
        if source.config_map_key_ref is not None:
            return self._key_value("ConfigMap", source.config_map_key_ref)
        if source.secret_key_ref is not None:
            return self._key_value("Secret", source.secret_key_ref)
        if source.file_key_ref is not None and self._options.node.gates.enabled("EnvFiles"):
            return self._file_value(source.file_key_ref)
        return ""

    def _downward_value(self, source: EnvVarSource, container: Container) -> str:
        node = self._options.node
        try:
            if source.field_ref is not None:
                # With hostNetwork the pod has the host's IPs; the runtime reports none.
                ips = by_family(self._options.pod_ips, next(iter(node.host_ips), ""))
                pod_ips = node.host_ips if self._pod.spec.host_network else ips
                return field_value(source.field_ref, self._pod, pod_ips=pod_ips, host_ips=node.host_ips)
            assert source.resource_field_ref is not None
            return resource_value(
                source.resource_field_ref, self._pod, container, node.allocatable, pod_level=node.pod_level
            )
        except ValueError as err:
            raise ContainerConfigError(str(err)) from err

    def _bulk(self, kind: _Kind, ref: NamedRef) -> dict[str, str]:
        data = self._data(kind, ref.name, ref.optional)
        # Sorted, because the order of keys in an API object is not significant and may change.
        return {key: _text(data[key]) for key in sorted(data)}

    def _key_value(self, kind: _Kind, ref: KeySelector) -> str | None:
        data = self._data(kind, ref.name, ref.optional)
        if ref.key in data:
            return _text(data[ref.key])
        if ref.optional:
            return None
        raise ContainerConfigError(
            f"couldn't find key {ref.key} in {kind} {self._pod.metadata.namespace}/{ref.name}"
        )

    def _data(self, kind: _Kind, name: str, optional: bool | None) -> _Data:
        try:
            return self._objects[kind](name)
        except MissingSource:
            if optional:
                return {}
            raise

    def _file_value(self, ref: FileKeySelector) -> str | None:
        if ref.volume_name not in self._options.volumes:
            raise ContainerConfigError(f'cannot find the volume "{ref.volume_name}" referenced by FileKeyRef')
        try:
            value = self._options.env_file(ref.volume_name, ref.path, ref.key)
        except (OSError, ValueError) as err:
            raise ContainerConfigError(f"couldn't parse env file: {err}") from err
        if value:
            return value
        if ref.optional:
            return None
        raise ContainerConfigError(f'environment variable key "{ref.key}" not found in file "{ref.path}"')


def _text(value: str | bytes) -> str:
    """Decode bytes so that invalid UTF-8 reaches the runtime unchanged."""
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


MAX_LINE_BYTES = (64 << 10) - 1
"""Bytes of the longest line, without its line feed; upstream's scanner has a buffer of 64 KiB."""
_BLANKS = b" \t"


@dataclass(frozen=True, slots=True)
class EnvFile:
    """The requested values of an environment file, up to the first line that is not an assignment."""

    values: dict[str, str] = field(default_factory=dict)
    error: ValueError | None = None

    def value(self, key: str) -> str:
        """Return the first value of a variable; "" when the file does not set it.

        Raises ValueError, with the number of the line, when an invalid line precedes the variable.
        """
        if key not in self.values and self.error is not None:
            raise self.error
        return self.values.get(key, "")


def parse_env_file(data: bytes, keys: Collection[str]) -> EnvFile:
    """Parse the values of these variables, of each the first. Blocks for a time linear in `data`.

    Bytes that are not UTF-8 are in the values as `surrogateescape` writes them.
    """
    missing = {key.encode(errors="surrogateescape"): key for key in keys}
    values: dict[str, str] = {}
    try:
        for name, value in _assignments(data):
            key = missing.pop(name, None)
            if key is not None:
                values[key] = value.decode(errors="surrogateescape")
            if not missing:
                break
    except ValueError as err:
        return EnvFile(values, err)
    return EnvFile(values)


def _assignments(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    lines = _lines(data)
    for number, line in lines:
        text = line.lstrip(_BLANKS)
        if not text or text.startswith(b"#"):
            continue
        name, equals, value = text.partition(b"=")
        if not equals or not name or name != name.rstrip(_BLANKS):
            raise _invalid(number, "write NAME='value', with no space before the =")
        if value[:1] in (b" ", b"\t"):
            yield name, b""
        elif value.startswith(b"'"):
            yield name, _quoted(value[1:], number, lines)
        else:
            raise _invalid(number, "write the value in single quotes")


def _quoted(rest: bytes, first: int, lines: Iterator[tuple[int, bytes]]) -> bytes:
    """Return a value from behind its opening quote up to the closing one, which may be lines below."""
    number = first
    parts = []
    while True:
        part, quote, after = rest.partition(b"'")
        parts.append(part)
        if quote:
            break
        found = next(lines, None)
        if found is None:
            raise _invalid(first, "close the single quote")
        number, rest = found
    after = after.lstrip(_BLANKS)
    if after and not after.startswith(b"#"):
        raise _invalid(number, "write nothing but a # comment after the value")
    return b"\n".join(parts)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers, without line ends. Raises ValueError for one that is too long."""
    number, start = 0, 0
    while start < len(data):
        number += 1
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        if end - start > MAX_LINE_BYTES:
            raise _invalid(number, f"write at most {MAX_LINE_BYTES} bytes per line")
        yield number, data[start:end].removesuffix(b"\r")
        start = end + 1


def _invalid(line: int, remedy: str) -> ValueError:
    return ValueError(f"line {line} of the environment file is no assignment: {remedy}")


LARGEST = 1 << 20
"""Bytes of the largest file: more than the environment of a process may take."""


def read_inside(volume: Path, path: str) -> bytes:
    """Return the content of a file in a volume. Blocks.

    Raises OSError, and ValueError unless it is a regular file of at most LARGEST bytes; neither reveals paths
    of the host.
    """
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("the path must be relative and without '..'")
    try:
        with opened_inside(volume, path, make=False) as found:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise ValueError("it is not a file")
            with Path(f"/proc/self/fd/{found}").open("rb") as file:
                data = file.read(LARGEST + 1)
    except OSError as err:
        raise OSError(err.errno, err.strerror) from err
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return data


V = TypeVar("V")
MAX_FILES_BYTES = 16 << 20
"""Maximum bytes of all environment files of a container: the limit of all its variables together."""
_PARSE_LOCK = threading.Lock()
"""Held while a file is parsed: each thread that runs Python code delays the event loop by milliseconds."""


@dataclass(frozen=True, slots=True)
class EnvSources:
    """Fetched sources by name: their content, or the error."""

    config_maps: Mapping[str, Mapping[str, str] | ObjectError] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, bytes] | ObjectError] = field(default_factory=dict)
    files: Mapping[tuple[str, str], EnvFile | OSError | ValueError] = field(default_factory=dict)
    """Parsed environment files, by volume name and path in it."""

    def config_map(self, name: str) -> Mapping[str, str]:
        """Return a configMap. Raises ContainerConfigError, MissingSource when it does not exist."""
        return _unwrap(self.config_maps[name])

    def secret(self, name: str) -> Mapping[str, bytes]:
        """Return a secret. Raises ContainerConfigError, MissingSource when it does not exist."""
        return _unwrap(self.secrets[name])

    def file_value(self, volume: str, path: str, key: str) -> str:
        """Return a variable of an environment file, "" when it is not set. Raises OSError and ValueError."""
        found = self.files[volume, path]
        if isinstance(found, EnvFile):
            return found.value(key)
        raise found


async def gather_env_sources(
    objects: PodObjects, pod: Pod, container: Container, volumes: Mapping[str, MountedVolume]
) -> EnvSources:
    """Fetch all sources of a container's `env` and `envFrom`; failures are raised when they are used."""

    async def config_map(name: str) -> Mapping[str, str]:
        return (await objects.config_map(pod, name)).data

    async def secret(name: str) -> Mapping[str, bytes]:
        return (await objects.secret(pod, name)).data

    config_maps, secrets = set(_config_maps(container)), set(_secrets(container))
    keys_by_file = _file_keys(container, volumes)
    if not config_maps and not secrets and not keys_by_file:
        return EnvSources()
    async with asyncio.TaskGroup() as tasks:
        config_map_tasks = {name: tasks.create_task(_fetch(config_map, name)) for name in sorted(config_maps)}
        secret_tasks = {name: tasks.create_task(_fetch(secret, name)) for name in sorted(secrets)}
        files = tasks.create_task(_parsed_files(keys_by_file, volumes))
    return EnvSources(
        {name: task.result() for name, task in config_map_tasks.items()},
        {name: task.result() for name, task in secret_tasks.items()},
        files.result(),
    )


def _config_maps(container: Container) -> Iterator[str]:
    for env_from in container.env_from:
        if env_from.config_map_ref is not None:
            yield env_from.config_map_ref.name
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.config_map_key_ref is not None:
            yield variable.value_from.config_map_key_ref.name


def _secrets(container: Container) -> Iterator[str]:
    for env_from in container.env_from:
        if env_from.secret_ref is not None:
            yield env_from.secret_ref.name
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
            yield variable.value_from.secret_key_ref.name


def _file_keys(container: Container, volumes: Mapping[str, MountedVolume]) -> dict[tuple[str, str], set[str]]:
    """Return the variables that a container reads from each file, by volume name and path in it."""
    found: dict[tuple[str, str], set[str]] = {}
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.file_key_ref is not None:
            ref = variable.value_from.file_key_ref
            if ref.volume_name in volumes:
                found.setdefault((ref.volume_name, ref.path), set()).add(ref.key)
    return found


async def _parsed_files(
    keys_by_file: Mapping[tuple[str, str], Collection[str]], volumes: Mapping[str, MountedVolume]
) -> dict[tuple[str, str], EnvFile | OSError | ValueError]:
    if not keys_by_file:
        return {}
    try:
        # In its own thread, because a volume's file server may never respond.
        return await in_own_thread(lambda: _parse_files(keys_by_file, volumes), name="env files")
    except OSError as err:
        return dict.fromkeys(keys_by_file, err)


def _parse_files(
    keys_by_file: Mapping[tuple[str, str], Collection[str]], volumes: Mapping[str, MountedVolume]
) -> dict[tuple[str, str], EnvFile | OSError | ValueError]:
    """Parse each file once. Blocks; the files of one container together are bounded."""
    found: dict[tuple[str, str], EnvFile | OSError | ValueError] = {}
    remaining_bytes = MAX_FILES_BYTES
    for (name, path), keys in keys_by_file.items():
        try:
            if remaining_bytes <= 0:
                raise ValueError(f"the container's environment files have {MAX_FILES_BYTES} bytes or more")
            data = read_inside(Path(volumes[name].path), path)
            remaining_bytes -= len(data)
            with _PARSE_LOCK:
                found[name, path] = parse_env_file(data, keys)
        except (OSError, ValueError) as err:
            found[name, path] = err
    return found


async def _fetch(fetch: Callable[[str], Awaitable[V]], name: str) -> V | ObjectError:
    try:
        return await fetch(name)
    except ObjectError as err:
        return err


def _unwrap(found: V | ObjectError) -> V:
    if isinstance(found, ObjectNotFound):
        raise MissingSource(str(found)) from found
    if isinstance(found, ObjectError):
        raise ContainerConfigError(str(found)) from found
    return found
