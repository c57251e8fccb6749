"""Checkpoints of the allocated and the actuated resources: upstream's files, written rarely."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.agent.host_setup import StartupError, read_allocation_state
from pykubelet.api.pod import ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.cm import resize as resize_module
from pykubelet.cm.resize import (
    ACTUATED,
    ALLOCATED,
    WRITE_SECONDS,
    PodResources,
    ResourceCheckpoint,
    decode,
    encode,
    open_allocation_state,
)
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.util.files import write_atomically
from tests.support.pod_resources import amounts

GOLDEN = (
    '{"entries":{"a":{"ContainerResources":{"main":{"limits":{"cpu":"500m","memory":"64Mi"},'
    '"requests":{"cpu":"100m","memory":"32Mi"}}},"PodLevelResources":null},'
    '"b":{"ContainerResources":{"main":{}},"PodLevelResources":null}}}'
)
"""What the reference was recorded to write, with other uids."""


def requirements(**values: str) -> ResourceRequirements:
    return ResourceRequirements(requests=amounts(**values))


A = PodResources(
    {
        "main": ResourceRequirements(
            limits=amounts(memory="64Mi", cpu="500m"), requests=amounts(cpu="100m", memory="32Mi")
        )
    }
)
B = PodResources({"main": ResourceRequirements()})


class TestFormat:
    def test_encode_equals_upstream(self) -> None:
        assert json.loads(encode({"b": B, "a": A}))["data"] == GOLDEN

    def test_decode_upstream_checksum_accepted(self) -> None:
        # Made with k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum of v1.36.
        content = b'{"data":"{\\"entries\\":{\\"a\\":{}}}","checksum":1989264566}'
        assert decode(content) == {"a": PodResources()}

    def test_encode_pod_level_resources_written(self) -> None:
        whole = PodResources({}, requirements(cpu="1"))
        assert '"PodLevelResources":{"requests":{"cpu":"1"}}' in json.loads(encode({"a": whole}))["data"]

    @given(
        st.dictionaries(
            st.text("0123456789abcdef-", min_size=1, max_size=36),
            st.builds(
                PodResources,
                st.dictionaries(
                    st.text("abc-0", min_size=1, max_size=8),
                    st.builds(
                        ResourceRequirements,
                        limits=st.dictionaries(
                            st.sampled_from(["cpu", "memory"]), st.integers(1, 2**40).map(Quantity.from_units)
                        ),
                    ),
                    max_size=3,
                ),
                st.none() | st.just(requirements(memory="1Gi")),
            ),
            max_size=4,
        )
    )
    def test_encode_decode_roundtrips(self, entries: dict[str, PodResources]) -> None:
        assert decode(encode(entries)) == entries

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "not what an agent writes"),
            (b"{}", "not what an agent writes"),
            (b'{"data":"{","checksum":1}', "not what an agent writes"),
            (encode({"a": A}).replace(b"500m", b"501m"), "damaged or was edited"),
            (encode({"a": A})[:-5], "not what an agent writes"),
            (b"\xff\xfe", "not what an agent writes"),
        ],
    )
    def test_open_allocation_state_damaged_file_error_names_path_and_remedy(
        self, tmp_path: Path, content: bytes, problem: str
    ) -> None:
        (tmp_path / ACTUATED).write_bytes(content)
        with pytest.raises(PolicyError, match=problem):
            open_allocation_state(tmp_path)
        with pytest.raises(StartupError) as caught:
            read_allocation_state(tmp_path)
        assert str(tmp_path / ACTUATED) in str(caught.value)
        assert "delete that file" in str(caught.value)


class TestResourceCheckpoint:
    def test_open_allocation_state_missing_file_is_empty_and_writes_nothing(self, tmp_path: Path) -> None:
        state = open_allocation_state(tmp_path)
        assert state.allocated.get("a") is None
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.looptime
    async def test_write_behind_many_puts_written_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = []
        monkeypatch.setattr(resize_module, "write_atomically", lambda file, *_: written.append(file.name))
        state = open_allocation_state(tmp_path)
        task = asyncio.create_task(state.write_behind())
        for number in range(40):
            state.allocated.put(f"u{number}", A)
            await asyncio.sleep(WRITE_SECONDS / 80)
        assert written == []
        await asyncio.sleep(WRITE_SECONDS)
        assert written == [ALLOCATED]
        state.allocated.put("u1", A)  # nothing new
        await asyncio.sleep(10 * WRITE_SECONDS)
        assert written == [ALLOCATED]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert written == [ALLOCATED]

    @pytest.mark.looptime
    async def test_write_behind_cancelled_writes_pending_changes(self, tmp_path: Path) -> None:
        state = open_allocation_state(tmp_path)
        task = asyncio.create_task(state.write_behind())
        await asyncio.sleep(0)
        state.actuated.put("a", A)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert open_allocation_state(tmp_path).actuated.get("a") == A
        assert (tmp_path / ACTUATED).stat().st_mode & 0o777 == 0o600

    def test_put_durable_returns_after_write_to_disk(self, tmp_path: Path) -> None:
        checkpoint = open_allocation_state(tmp_path).allocated
        checkpoint.put("b", B)
        checkpoint.put_durable("a", A)
        again = open_allocation_state(tmp_path).allocated
        assert (again.get("a"), again.get("b")) == (A, B)

    def test_put_durable_write_fails_restores_previous_entry(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = open_allocation_state(tmp_path).allocated
        checkpoint.put("a", B)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(resize_module, "write_atomically", full)
        for uid, before in (("a", B), ("new", None)):
            with pytest.raises(OSError, match="No space"):
                checkpoint.put_durable(uid, A)
            assert checkpoint.get(uid) == before
            assert checkpoint.changed.is_set()  # what others had put before is still to be written
        checkpoint.close()  # says so, and goes on

    @pytest.mark.looptime
    async def test_write_behind_disk_full_is_retried(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room = False

        def maybe(file: Path, content: bytes, mode: int) -> None:
            if not room:
                raise OSError(28, "No space left on device")
            write_atomically(file, content, mode)

        monkeypatch.setattr(resize_module, "write_atomically", maybe)
        checkpoint = ResourceCheckpoint(tmp_path / ALLOCATED)
        task = asyncio.create_task(checkpoint.write_behind())
        checkpoint.put("a", A)
        await asyncio.sleep(2 * WRITE_SECONDS)
        assert not (tmp_path / ALLOCATED).exists()
        room = True
        await asyncio.sleep(resize_module.RETRY_SECONDS + 2 * WRITE_SECONDS)
        assert decode((tmp_path / ALLOCATED).read_bytes()) == {"a": A}
        task.cancel()

    def test_save_old_version_does_not_replace_newer(self, tmp_path: Path) -> None:
        checkpoint = ResourceCheckpoint(tmp_path / ALLOCATED)
        checkpoint.put("a", B)
        old = checkpoint._version()
        checkpoint.put_durable("a", A)
        checkpoint._save(*old)
        assert decode((tmp_path / ALLOCATED).read_bytes()) == {"a": A}

    def test_retain_removed_pods_absent_from_next_write(self, tmp_path: Path) -> None:
        checkpoint = open_allocation_state(tmp_path).allocated
        checkpoint.put_durable("a", A)
        checkpoint.put_durable("b", B)
        checkpoint.put("c", B)
        checkpoint.forget("a")
        checkpoint.retain({"b"})
        assert len(checkpoint) == 1
        checkpoint.write()
        assert re.findall('"[abc]"', json.loads((tmp_path / ALLOCATED).read_text())["data"]) == ['"b"']
