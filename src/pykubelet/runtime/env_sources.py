"""Gathers what a container's variables come from: configMaps, secrets and files in the pod's volumes.

A request for a container is made without asking anyone (`container_config.py`), so what it needs is
had before, all at the same time. What cannot be had is a problem only when it is looked up: a
variable that does not need it, or an optional one, goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pykubelet.api.pod import Container, Pod
from pykubelet.pods.objects import ObjectError, ObjectMissing, PodObjects
from pykubelet.runtime.problems import ConfigProblem, MissingSource
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.text_inside import read_text_inside

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class EnvSources:
    """What was gathered: contents by name, or why there are none."""

    config_maps: Mapping[str, Mapping[str, str] | ObjectError] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, bytes] | ObjectError] = field(default_factory=dict)
    files: Mapping[tuple[str, str], str | OSError | ValueError] = field(default_factory=dict)
    """By the volume's name and the path in it."""

    def config_map(self, name: str) -> Mapping[str, str]:
        """Look up a configMap; raises ConfigProblem, MissingSource when there is none."""
        return _given(self.config_maps[name])

    def secret(self, name: str) -> Mapping[str, bytes]:
        """Look up a secret; raises ConfigProblem, MissingSource when there is none."""
        return _given(self.secrets[name])

    def file(self, volume: str, path: str) -> str:
        """Look up the text of a file; raises OSError and ValueError."""
        found = self.files[volume, path]
        if isinstance(found, str):
            return found
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
    places = {(name, path) for name, path in _files(container) if name in volumes}
    if not config_maps and not secrets and not places:
        return EnvSources()
    async with asyncio.TaskGroup() as tasks:
        named = {name: tasks.create_task(_tried(config_map, name)) for name in sorted(config_maps)}
        hidden = {name: tasks.create_task(_tried(secret, name)) for name in sorted(secrets)}
        texts = {
            (name, path): tasks.create_task(asyncio.to_thread(_read, Path(volumes[name].path), path))
            for name, path in sorted(places)
        }
    return EnvSources(
        {name: task.result() for name, task in named.items()},
        {name: task.result() for name, task in hidden.items()},
        {place: task.result() for place, task in texts.items()},
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


def _files(container: Container) -> Iterator[tuple[str, str]]:
    for variable in container.env:
        if variable.value_from is not None and variable.value_from.file_key_ref is not None:
            ref = variable.value_from.file_key_ref
            yield ref.volume_name, ref.path


def _read(volume: Path, path: str) -> str | OSError | ValueError:
    try:
        return read_text_inside(volume, path)
    except (OSError, ValueError) as err:
        return err


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
