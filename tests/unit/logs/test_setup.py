import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykubelet.config.flags.kubelet_flags import log_options
from pykubelet.config.load import load
from pykubelet.logs import get_logger
from pykubelet.logs.logger import ROOT
from pykubelet.logs.setup import LogOptions, configure, log_health, set_verbosity


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger(ROOT)
    before = (root.handlers[:], root.level, root.propagate)
    root.handlers.clear()
    yield
    configure(LogOptions())
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


Streams = pytest.CaptureFixture[str]


def test_configure_verbosity_drops_higher_levels(capsys: Streams) -> None:
    log = get_logger("pykubelet.podworkers.loop")
    configure(LogOptions(verbosity=3))
    for verbosity in range(6):
        log.v(verbosity).info(f"level {verbosity}")
    said = capsys.readouterr()
    assert "level 3" in said.err
    assert "level 4" not in said.err
    assert bool(log.v(3))
    assert not log.v(4)
    set_verbosity(5)
    log.v(5).info("level 5")
    assert "level 5" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["loop", "lo*", "podworkers/loop", "podworkers/*"])
def test_configure_vmodule_raises_verbosity_of_matching_module(capsys: Streams, pattern: str) -> None:
    chosen, other = get_logger("pykubelet.podworkers.loop"), get_logger("pykubelet.node.lease")
    configure(LogOptions(vmodule=[(pattern, 4)]))
    chosen.v(4).info("chosen")
    other.v(4).info("other")
    configure(LogOptions())
    chosen.v(4).info("after")
    said = capsys.readouterr()
    assert "chosen" in said.err
    assert "other" not in said.err
    assert "after" not in said.err


def test_configure_vmodule_applies_to_module_loaded_later(capsys: Streams) -> None:
    configure(LogOptions(vmodule=[("latecomer", 4)]))
    get_logger("pykubelet.podworkers.latecomer").v(4).info("here")
    said = capsys.readouterr()
    assert "here" in said.err


def test_logger_bind_adds_keys_to_every_line(capsys: Streams) -> None:
    configure(LogOptions())
    log = get_logger("pykubelet.podworkers.workers").bind(pod="default/web", podUID="1")
    log.info("a")
    log.error("why", "b", container="main")
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.endswith('"a" pod="default/web" podUID="1"')
    assert second.endswith('"b" pod="default/web" podUID="1" err="why" container="main"')
    assert "test_setup.py:" in first


def test_configure_split_stream_separates_info_and_error(capsys: Streams) -> None:
    configure(LogOptions(format="json", split_stream=True))
    log = get_logger("pykubelet.x")
    log.info("fine")
    log.error(None, "broken")
    said = capsys.readouterr()
    assert "fine" in said.out
    assert "fine" not in said.err
    assert "broken" in said.err
    assert "broken" not in said.out


def test_configure_log_file_errors_also_go_to_stderr(capsys: Streams, tmp_path: Path) -> None:
    path = tmp_path / "kubelet.log"
    configure(LogOptions(to_stderr=False, file=str(path)))
    log = get_logger("pykubelet.x")
    log.info("fine")
    log.error(None, "broken")
    assert "fine" in path.read_text()
    assert "broken" in path.read_text()
    said = capsys.readouterr()
    assert "fine" not in said.err
    assert "broken" in said.err
    assert log_health() is None


def test_configure_log_file_surrogate_characters_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.log"
    configure(LogOptions(to_stderr=False, file=str(path)))
    get_logger("pykubelet.x").info("Found", file="caf\udce9")
    assert "caf\\udce9" in path.read_text()


def test_configure_log_file_max_size_truncates_file(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.log"
    configure(LogOptions(to_stderr=False, file=str(path), file_max_megabytes=1))
    log = get_logger("pykubelet.x")
    for _ in range(40):
        log.info("x" * 50_000)
    assert path.stat().st_size < 1_200_000


def test_log_health_disk_full_returns_error() -> None:
    configure(LogOptions(to_stderr=False, file="/dev/full"))
    get_logger("pykubelet.x").info("lost")
    assert "No space left" in (log_health() or "")


def test_configure_log_directory_creates_file(tmp_path: Path) -> None:
    configure(LogOptions(to_stderr=False, directory=str(tmp_path)))
    get_logger("pykubelet.x").info("fine")
    (made,) = tmp_path.iterdir()
    assert "fine" in made.read_text()


def buffered(size: int = 10_000, seconds: float = 3600.0) -> logging.Handler:
    configure(LogOptions(split_stream=True, info_buffer_bytes=size, flush_seconds=seconds))
    return logging.getLogger(ROOT).handlers[0]


def test_info_buffer_holds_lines_until_error_which_follows_them(capsys: Streams) -> None:
    buffered()
    log = get_logger("pykubelet.x")
    log.info("first")
    assert capsys.readouterr() == ("", "")
    log.error(None, "broken")
    said = capsys.readouterr()
    assert "first" in said.out
    assert "broken" in said.err
    assert "broken" not in said.out


def test_info_buffer_full_is_written(capsys: Streams) -> None:
    buffered(size=500)
    log = get_logger("pykubelet.x")
    said = ""
    for number in range(20):
        log.info("line", number=number)
        said = capsys.readouterr().out
        if said:
            break
    assert 2 <= len(said.splitlines()) <= 10
    log.info("long", text="x" * 1000)
    assert "x" * 1000 in capsys.readouterr().out


def test_info_buffer_flushed_periodically_and_when_closed(capsys: Streams) -> None:
    buffered(seconds=0.01)
    get_logger("pykubelet.x").info("soon")
    said, end = "", time.monotonic() + 20
    while "soon" not in said and time.monotonic() < end:
        said += capsys.readouterr().out
        time.sleep(0.01)
    assert "soon" in said
    handler = buffered()
    get_logger("pykubelet.x").info("last")
    assert "last" not in capsys.readouterr().out
    handler.close()
    assert "last" in capsys.readouterr().out


@pytest.mark.parametrize("size", [0, 10_000])
def test_split_stream_invalid_unicode_no_line_is_lost(capsys: Streams, size: int) -> None:
    handler = buffered(size)
    log = get_logger("pykubelet.x")
    log.info("before")
    log.info("Found file", path="\udcff.log")
    handler.flush()
    said = capsys.readouterr()
    assert "before" in said.out
    assert "\\udcff.log" in said.out
    assert (said.err, log_health()) == ("", None)


@pytest.mark.parametrize("end", ["", "raise ValueError('crash')", "sys.exit(3)"])
def test_info_buffer_process_ends_lines_are_written(end: str) -> None:
    code = (
        "import sys\nfrom pykubelet.logs import get_logger\n"
        "from pykubelet.logs.setup import LogOptions, configure\n"
        "configure(LogOptions(split_stream=True, info_buffer_bytes=10000, flush_seconds=3600.0))\n"
        f"get_logger('pykubelet.x').info('last words')\n{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "last words" in done.stdout
    assert (done.returncode == 0) == (not end)


def test_info_buffer_stream_fails_health_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        handler = buffered()
        get_logger("pykubelet.x").info("lost")
        handler.flush()
        assert "No space left" in (log_health() or "")
        monkeypatch.undo()
        configure(LogOptions())
        with contextlib.suppress(OSError):
            full.close()


@contextlib.contextmanager
def full_pipe_as_stdout() -> Iterator[int]:
    """Make standard output a pipe without space; yields the reading end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    stream = os.fdopen(writing, "w")
    try:
        with contextlib.redirect_stdout(stream):
            yield reading
    finally:
        # A blocked write fails then, so that the handler can be closed.
        os.close(reading)
        configure(LogOptions())
        with contextlib.suppress(OSError):
            stream.close()


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def read_until(descriptor: int, end: str) -> list[str]:
    """Return the lines of the pipe up to the one that ends so, without what had filled it."""
    text = ""
    while not text.endswith(f"{end}\n"):
        text += os.read(descriptor, 65536).decode()
    return text.lstrip(".").splitlines()


def wait_until_blocked(handler: logging.Handler) -> None:
    """Wait until the thread of the handler writes."""
    end = time.monotonic() + 20
    while handler._lines and time.monotonic() < end:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert not handler._lines  # type: ignore[attr-defined]


def test_info_buffer_slow_reader_does_not_block_while_buffer_has_capacity(capsys: Streams) -> None:
    with full_pipe_as_stdout() as reading:
        handler = buffered(size=50_000, seconds=0.01)
        log = get_logger("pykubelet.x")
        log.info("first")
        wait_until_blocked(handler)

        def work() -> None:
            for number in range(100):
                log.info("line", number=number)
                log.error(None, "broken")
            log.info("last")

        thread = started(work)
        thread.join(20)
        assert not thread.is_alive()
        assert capsys.readouterr().err.count("broken") == 100
        lines = read_until(reading, '"last"')
    assert '"first"' in lines[0]
    assert [line.split("number=")[1] for line in lines[1:-1]] == [str(number) for number in range(100)]


def test_info_buffer_full_with_slow_reader_blocks_until_lines_are_read() -> None:
    """Verify that the buffer is bounded, and that the lines in it and those being written count."""
    logged = list(range(20))
    with full_pipe_as_stdout() as reading:
        handler = buffered(size=2000)
        log = get_logger("pykubelet.x")
        log.info("first")
        for number in logged:
            log.info("line", number=number)
        log.error(None, "broken")
        wait_until_blocked(handler)

        def work() -> None:
            for number in range(20, 200):
                log.info("line", number=number)
                logged.append(number)
            log.info("last")
            handler.flush()

        thread = started(work)
        thread.join(0.5)
        assert thread.is_alive()
        assert 22 < len(logged) < 35
        lines = read_until(reading, '"last"')
        thread.join(20)
        assert not thread.is_alive()
    assert [line.split("number=")[1] for line in lines[1:-1]] == [str(number) for number in range(200)]


def test_log_options_buffer_and_flush_period_of_the_format(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "featureGates: {LoggingAlphaOptions: true}\n"
        "logging:\n  flushFrequency: 2000000000\n"
        "  options: {json: {infoBufferSize: 1Mi}, text: {infoBufferSize: 2k}}\n"
    )
    for form, size in (("json", 1024**2), ("text", 2000)):
        loaded = load([f"--config={file}", f"--logging-format={form}"])
        options = log_options(loaded.flags, loaded.config)
        assert (options.info_buffer_bytes, options.flush_seconds) == (size, 2.0)
