"""Lock, state file and registry of standalone instances."""

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.standalone.data_dir import (
    LockOwner,
    State,
    claim,
    closed_directory,
    hold_lock,
    load_state,
    lock_owner,
    preexisting,
    save_state,
)
from pykubelet.standalone.instance import AlreadyRunning, DirectoryError, EmbeddedError, Instance
from pykubelet.standalone.instance_registry import open_registry


@pytest.fixture
def instance(data_dir: Path) -> Iterator[Instance]:
    found = Instance.at(data_dir)
    claim(found)
    yield found
    # The states of these tests are inventions; `down` must not believe them.
    found.state.unlink(missing_ok=True)


def a_state(**changes: object) -> State:
    values = {
        "boot_id": "b",
        "subnet": "10.85.0.0/24",
        "snapshotter": "native",
        "found_paths": [],
        "found_chains": [],
    }
    return State(**{**values, **changes})  # type: ignore[arg-type]  # the tests' own shorthand


def test_hold_lock_already_held_raises_with_owner_pid(instance: Instance) -> None:
    assert lock_owner(instance) is None
    with hold_lock(instance, "up"):
        assert lock_owner(instance) == LockOwner(os.getpid(), "up")
        with pytest.raises(AlreadyRunning, match=f"already running with pid {os.getpid()} on") as caught:
            with hold_lock(instance, "up"):
                pass
        assert caught.value.pid == os.getpid()
    assert lock_owner(instance) is None
    with hold_lock(instance, "down"), pytest.raises(AlreadyRunning, match="is being removed with pid"):
        with hold_lock(instance, "up"):
            pass


def _hold_until(path: Path, held: Event, release: Event) -> None:
    with hold_lock(Instance.at(path), "up"):
        held.set()
        release.wait(120)
        os._exit(9)  # as if killed


def test_hold_lock_owner_killed_lock_released(instance: Instance) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=_hold_until, args=(instance.data_dir, held, release))
    process.start()
    try:
        assert held.wait(60)
        assert lock_owner(instance) == LockOwner(process.pid, "up")
    finally:
        release.set()
        process.join()
    with hold_lock(instance, "up"):
        pass


def test_hold_lock_owner_not_recorded_raises_without_pid(instance: Instance) -> None:
    with hold_lock(instance, "up"):
        instance.lock.write_text("")
        assert lock_owner(instance) == LockOwner(None, "")
        with pytest.raises(AlreadyRunning, match="already running on"):
            with hold_lock(instance, "up"):
                pass


def test_hold_lock_unopenable_file_raises_directory_error(instance: Instance) -> None:
    instance.lock.mkdir()
    with pytest.raises(DirectoryError, match="lock cannot be opened: Is a directory"):
        with hold_lock(instance, "up"):
            pass
    assert lock_owner(instance) is None
    instance.lock.rmdir()


def test_save_state_load_state_roundtrip(instance: Instance) -> None:
    assert load_state(instance) is None
    kept = a_state(seeds={"image": "source"}, found_paths=["/run/containerd"])
    save_state(instance, kept)
    assert load_state(instance) == kept
    assert instance.state.read_text().count("\n") > 5, "people can read it"


BAD_SUBNET = '{"boot_id":"","subnet":"x","snapshotter":"","found_paths":[],"found_chains":[]}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot_id": 1}', "\xff", '{"unknown": 1}', BAD_SUBNET])
def test_load_state_corrupted_file_error_has_remedy(instance: Instance, text: str) -> None:
    instance.state.write_text(text, encoding="latin-1")
    with pytest.raises(
        EmbeddedError, match=r"state\.json is damaged .*: run 'pykubelet down --data-dir"
    ) as caught:
        load_state(instance)
    assert "\n" not in str(caught.value)


THINGS = st.frozensets(st.sampled_from("abcdef"))


@given(THINGS, st.lists(st.frozensets(st.sampled_from("abcdef")), max_size=4))
def test_preexisting_several_instances_yield_same_initial_set(
    before: frozenset[str], made: list[frozenset[str]]
) -> None:
    """Each of several makes things in turn; each must remember exactly what was there before them all."""
    present = set(before)
    answers: list[list[str]] = []
    for things in made:
        answers.append(preexisting(present, answers))
        present |= things
    assert all(answer == sorted(before) for answer in answers)


async def test_registry_register_and_unregister_instances(instance: Instance, tmp_path: Path) -> None:
    directory = tmp_path / "registry"
    other = Instance.at(instance.data_dir.parent / "other")
    async with open_registry(directory) as registry:
        assert registry.other_states(instance) == []
        registry.register(instance)
        registry.register(instance)
    save_state(instance, a_state())
    async with open_registry(directory) as registry:
        assert registry.other_states(instance) == []
        assert registry.other_states(other) == [a_state()]
        registry.unregister(instance)
        registry.unregister(instance)
        assert registry.other_states(other) == []
    assert not directory.exists(), "an empty registry vanishes"


async def test_registry_stale_entries_removed(instance: Instance, tmp_path: Path) -> None:
    directory = tmp_path / "registry"
    directory.mkdir()
    (directory / "pykubelet-gone").symlink_to("/srv/gone")
    (directory / "pykubelet-evil").symlink_to(instance.data_dir)
    (directory / "file").touch()
    async with open_registry(directory) as registry:
        assert registry.other_states(instance) == []
    assert not directory.exists()


async def test_open_registry_concurrent_use_is_serialized(tmp_path: Path) -> None:
    directory = tmp_path / "registry"
    inside = 0

    async def visit() -> None:
        nonlocal inside
        async with open_registry(directory):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.005)
            inside -= 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(visit())
    assert not directory.exists()


async def test_open_registry_unusable_path_raises_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match="cannot be used"):
        async with open_registry(tmp_path / "file"):
            pass


def test_closed_directory_private_parent_named_outermost_first() -> None:
    # pytest's own temporary directories are private.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        top = Path(name)
        assert closed_directory(top) == top
        top.chmod(0o711)
        inner = top / "a" / "b"
        inner.mkdir(parents=True, mode=0o755)
        assert closed_directory(inner) is None
        for closed in (inner, top / "a", top):
            closed.chmod(0o700)
            assert closed_directory(inner) == closed
        top.chmod(0o711)
        assert closed_directory(top / "absent") == top / "absent"
