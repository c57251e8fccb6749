"""`pykubelet login` and `logout` with a real registry that needs a password."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from pykubelet.standalone.instance import Instance
from tests.support.cli_node import PYKUBELET, Ran, environment
from tests.support.image_registry import PASSWORD, USER, running_registry
from tests.support.images_cli import images
from tests.support.runtime import RunningRuntime


async def registry_command(instance: Instance, *arguments: str, stdin: str = "") -> Ran:
    """Run `pykubelet login` or `logout`."""
    command = [PYKUBELET, *arguments, "--data-dir", str(instance.data_dir)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment()
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    assert PASSWORD not in out.decode() + err.decode()
    return Ran(process.returncode, out.decode(), err.decode())


@pytest.mark.machine
async def test_login_protected_registry_pulls_succeed_until_logout(
    runtime: RunningRuntime, tmp_path: Path
) -> None:
    """Verify that stored credentials work for the next pull, and that wrong ones are not stored."""
    instance = runtime.instance
    config = instance.kubelet_root / "config.json"
    with running_registry(tmp_path, protected=True) as registry:
        registry.push("secret/app", "1")
        login = ("login", registry.host, "-u", USER, "--password-stdin")
        ran = await registry_command(instance, *login, stdin="wrong")
        assert (ran.code, config.exists()) == (1, False)
        assert f"{registry.host} rejected the credentials of user 'user'" in ran.err
        image = f"{registry.host}/secret/app:1"
        assert (await images(instance, "pull", "-q", image)).code == 1

        ran = await registry_command(instance, *login, stdin=f"{PASSWORD}\n")
        assert (ran.code, ran.out) == (0, f"Logged in to {registry.host}: stored in {config}\n")
        ran = await images(instance, "pull", "-q", image)
        assert ran.code == 0, ran
        assert (await images(instance, "rm", image)).code == 0
        assert (await registry_command(instance, "logout", registry.host)).code == 0
        assert not config.exists()
        assert (await images(instance, "pull", "-q", image)).code == 1
        ran = await registry_command(instance, "logout", registry.host)
        assert (ran.code, ran.err.count("\n")) == (1, 1)
