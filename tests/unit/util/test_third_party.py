"""Calls of third-party functions and their limits."""

import asyncio
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from pykubelet.util.third_party import (
    MESSAGE_LIMIT,
    BoundedFunction,
    CallFailed,
    TooManyCalls,
    load_entry_points,
    require_function,
)


async def test_call_returns_result_of_other_thread() -> None:
    function = BoundedFunction(lambda number: (number, threading.current_thread().name), "mine", 1)
    assert await function.call(30, 5) == (5, "mine")
    assert function.running == 0


async def test_call_raising_function_raises_call_failed() -> None:
    def fail() -> None:
        raise LookupError("broken")

    function = BoundedFunction(fail, "mine", 1)
    with pytest.raises(CallFailed, match=r"^LookupError: broken$"):
        await function.call(30)
    assert function.running == 0


async def test_call_function_raising_timeout_error_is_not_own_timeout() -> None:
    def fail() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(CallFailed, match="TimeoutError: of a socket"):
        await BoundedFunction(fail, "mine", 1).call(30)


async def test_call_hanging_function_times_out_and_counts_until_it_returns() -> None:
    release = threading.Event()
    function = BoundedFunction(release.wait, "mine", 2)
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await function.call(0.01)
        assert function.running == 2
        with pytest.raises(TooManyCalls, match="mine: 2 calls have not returned"):
            await function.call(30)
    finally:
        release.set()
    async with asyncio.timeout(30):
        while function.running:
            await asyncio.sleep(0.001)
    assert await function.call(30)


async def test_call_blocked_function_leaves_event_loop_free() -> None:
    release = threading.Event()
    function = BoundedFunction(release.wait, "mine", 1)
    call = asyncio.ensure_future(function.call(30))
    await asyncio.sleep(0)
    release.set()  # runs only if the loop is free
    assert await call


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("again")


@pytest.mark.parametrize(
    ("err", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (StopIteration("end"), "StopIteration: end"),
        (Unprintable(), "Unprintable: its text cannot be formatted"),
        (ValueError("x" * 5000), "ValueError: " + "x" * (MESSAGE_LIMIT - 12)),
    ],
    ids=["exit", "interrupt", "stop", "unprintable", "long"],
)
async def test_call_function_raising_anything_raises_call_failed(err: BaseException, text: str) -> None:
    def fail() -> None:
        raise err

    with pytest.raises(CallFailed) as caught:
        await BoundedFunction(fail, "mine", 1).call(30)
    assert str(caught.value) == text
    assert caught.value.type_name == type(err).__name__


@dataclass
class Entry:
    """An entry point whose import calls a function."""

    name: str
    load: Any
    value: str = "package:function"


def function() -> int:
    return 5


def test_load_entry_points_broken_ones_are_logged_and_yielded(caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        Entry("d", lambda: sys.exit("bye")),
        Entry("b", lambda: 5),
        Entry("c", lambda: function),
        Entry("a", lambda: __import__("no_such_module")),
    ]
    found = list(load_entry_points("group", "handler", entries, require_function))
    assert [(one.name, one.result) for one in found] == [
        ("a", None),
        ("b", None),
        ("c", function),
        ("d", None),
    ]
    assert [str(one.err) for one in found if one.err] == [
        "ModuleNotFoundError: No module named 'no_such_module'",
        "TypeError: int is not a function",
        "SystemExit: bye",
    ]
    assert caplog.text.count("Failed to load handler") == 3


def test_load_entry_points_hanging_import_times_out(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    try:
        (found,) = load_entry_points(
            "group", "handler", [Entry("a", release.wait)], require_function, timeout=0.01
        )
    finally:
        release.set()
    assert found.result is None
    assert str(found.err) == "it was not loaded within 0.01 s"
    assert "Failed to load handler" in caplog.text
