"""Gathers what a container's variables come from: configMaps, secrets and files in the pod's volumes.

A request for a container is made without asking anyone (`container_config.py`), so what it needs is
had before, all at the same time. What cannot be had is a problem only when it is looked up: a
variable that does not need it, or an optional one, goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pykubelet.api.pod import Container, Pod
from pykubelet.pods.objects import ObjectError, ObjectMissing, PodObjects
from pykubelet.runtime.env_file import EnvFile, parse_env_file
from pykubelet.runtime.problems import ConfigProblem, MissingSource
from pykubelet.tasks import in_own_thread
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.text_inside import read_inside

V = TypeVar("V")

MAX_FILES_BYTES = 16 << 20
"""Bytes of all environment files of a container: as much as all its variables may have together."""

_PARSING = threading.Lock()
"""Held while a file is parsed: the event loop waits milliseconds for each thread that runs Python code."""


@dataclass(frozen=True, slots=True)
class EnvSources:
    """What was gathered: contents by name, or why there are none."""

    config_maps: Mapping[str, Mapping[str, str] | ObjectError] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, bytes] | ObjectError] = field(default_factory=dict)
    files: Mapping[tuple[str, str], EnvFile | OSError | ValueError] = field(default_factory=dict)
    """Parsed environment files, by the volume's name and the path in it."""

    def config_map(self, name: str) -> Mapping[str, str]:
        """Look up a configMap; raises ConfigProblem, MissingSource when there is none."""
        return _given(self.config_maps[name])

    def secret(self, name: str) -> Mapping[str, bytes]:
        """Look up a secret; raises ConfigProblem, MissingSource when there is none."""
        return _given(self.secrets[name])

    def file_value(self, volume: str, path: str, key: str) -> str:
        """Return a variable of an environment file, "" when it is not set. Raises OSError and ValueError."""
        found = self.files[volume, path]
        if isinstance(found, EnvFile):
            return found.value(key)
        raise found


async def gather_env_sources(
    objects: PodObjects, pod: Pod, container: Container, volumes: Mapping[str, MountedVolume]
) -> EnvSources:
    """Have all that a container's `env` and `envFrom` refer to; failures are kept for whoever looks."""

    async def config_map(name: str) -> Mapping[str, str]:
        return (await objects.config_map(pod, name)).data

    async def secret(name: str) -> Mapping[str, bytes]:
        return (await objects.secret(pod, name)).data

    config_maps, secrets = set(_config_maps(container)), set(_secrets(container))
    wanted = _file_keys(container, volumes)
    if not config_maps and not secrets and not wanted:
        return EnvSources()
    async with asyncio.TaskGroup() as tasks:
        named = {name: tasks.create_task(_tried(config_map, name)) for name in sorted(config_maps)}
        hidden = {name: tasks.create_task(_tried(secret, name)) for name in sorted(secrets)}
        files = tasks.create_task(_parsed_files(wanted, volumes))
    return EnvSources(
        {name: task.result() for name, task in named.items()},
        {name: task.result() for name, task in hidden.items()},
        files.result(),
    )


def _config_maps(container: Container) -> Iterator[str]:
    for bulk in container.env_from:
        if bulk.config_map_ref is not None:
            yield bulk.config_map_ref.name
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.config_map_key_ref is not None:
            yield variable.value_from.config_map_key_ref.name


def _secrets(container: Container) -> Iterator[str]:
    for bulk in container.env_from:
        if bulk.secret_ref is not None:
            yield bulk.secret_ref.name
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
            yield variable.value_from.secret_key_ref.name


def _file_keys(container: Container, volumes: Mapping[str, MountedVolume]) -> dict[tuple[str, str], set[str]]:
    """Return the variables that a container takes from each file, by the volume's name and the path in it."""
    found: dict[tuple[str, str], set[str]] = {}
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.file_key_ref is not None:
            ref = variable.value_from.file_key_ref
            if ref.volume_name in volumes:
                found.setdefault((ref.volume_name, ref.path), set()).add(ref.key)
    return found


async def _parsed_files(
    wanted: Mapping[tuple[str, str], Collection[str]], volumes: Mapping[str, MountedVolume]
) -> dict[tuple[str, str], EnvFile | OSError | ValueError]:
    # A thread of its own, because a volume's file server may never respond.
    return await in_own_thread(lambda: _parse_files(wanted, volumes), name="env files") if wanted else {}


def _parse_files(
    wanted: Mapping[tuple[str, str], Collection[str]], volumes: Mapping[str, MountedVolume]
) -> dict[tuple[str, str], EnvFile | OSError | ValueError]:
    """Parse each file once. Blocks; the files of one container together are bounded."""
    found: dict[tuple[str, str], EnvFile | OSError | ValueError] = {}
    left = MAX_FILES_BYTES
    for (name, path), keys in wanted.items():
        try:
            if left <= 0:
                raise ValueError(f"the container's environment files have {MAX_FILES_BYTES} bytes or more")
            data = read_inside(Path(volumes[name].path), path)
            left -= len(data)
            with _PARSING:
                found[name, path] = parse_env_file(data, keys)
        except (OSError, ValueError) as err:
            found[name, path] = err
    return found


async def _tried(ask: Callable[[str], Awaitable[V]], name: str) -> V | ObjectError:
    try:
        return await ask(name)
    except ObjectError as err:
        return err


def _given(found: V | ObjectError) -> V:
    if isinstance(found, ObjectMissing):
        raise MissingSource(str(found)) from found
    if isinstance(found, ObjectError):
        raise ConfigProblem(str(found)) from found
    return found
