"""Log configuration: handlers, format and verbosity; applied once at start-up, after validation."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from pykubelet.logs.buffered import BufferedStream
from pykubelet.logs.formats import JSONFormatter, TextFormatter
from pykubelet.logs.logger import ROOT, level_for, set_vmodule


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Logging options of the flags and the configuration file."""

    format: str = "text"
    verbosity: int = 0
    vmodule: list[tuple[str, int]] = field(default_factory=list)
    split_stream: bool = False
    """Info messages to standard output, errors to standard error."""
    info_buffer_bytes: int = 0
    """Size of the buffer of info messages with `split_stream`; 0 is none."""
    flush_seconds: float = 5.0
    """Longest time that buffered messages are held."""
    to_stderr: bool = True
    also_to_stderr: bool = False
    stderr_threshold: int = logging.ERROR
    file: str = ""
    directory: str = ""
    file_max_megabytes: int = 1800
    headers: bool = True
    directory_header: bool = False


class BoundedFile(logging.Handler):
    """A log file that is truncated when it reaches its limit, as klog's `--log-file` is."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__()
        self.path = path.absolute()
        self._limit = limit_bytes
        self.failure: OSError | None = None
        # File names in messages need not be valid UTF-8.
        self._stream = path.open("a", encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        try:
            if self._limit and self._stream.tell() > self._limit:
                self._stream.truncate(0)
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()
        except OSError as err:
            # A full disk must not stop the kubelet: the `log` health check reports it instead.
            self.failure = err
        else:
            self.failure = None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._stream.close()
        super().close()


def configure(options: LogOptions) -> None:
    """Apply the options to every logger of this package.

    Raises OSError when a log file cannot be opened.
    """
    root = logging.getLogger(ROOT)
    handlers = _handlers(options)
    formatter: logging.Formatter = (
        JSONFormatter()
        if options.format == "json"
        else TextFormatter(headers=options.headers, directories=options.directory_header)
    )
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.propagate = False
    root.setLevel(level_for(options.verbosity))
    set_vmodule(options.vmodule)


def set_levels(verbosity: int, vmodule: list[tuple[str, int]]) -> None:
    """Change `-v` and `--vmodule` at runtime; the output and its format stay."""
    set_verbosity(verbosity)
    set_vmodule(vmodule)


def set_verbosity(verbosity: int) -> None:
    """Change `-v` at runtime (the debug flags handler does)."""
    logging.getLogger(ROOT).setLevel(level_for(verbosity))


def log_file() -> Path | None:
    """Return the file that this process logs to, if any."""
    files = (handler for handler in logging.getLogger(ROOT).handlers if isinstance(handler, BoundedFile))
    return next((file.path for file in files), None)


def log_health() -> str | None:
    """Return the reason why log lines are being lost, or None: the `log` health check."""
    for handler in logging.getLogger(ROOT).handlers:
        if isinstance(handler, BoundedFile) and handler.failure:
            return f"cannot write the log file: {handler.failure}"
        if isinstance(handler, BufferedStream) and handler.failure:
            return f"cannot write the log: {handler.failure}"
        stream = getattr(handler, "stream", None)
        if stream is not None and stream.closed:
            return "the log stream is closed"
    return None


def _handlers(options: LogOptions) -> list[logging.Handler]:
    handlers: list[logging.Handler] = []
    path = _file(options)
    errors = logging.StreamHandler(sys.stderr)
    if path is not None:
        handlers.append(BoundedFile(path, options.file_max_megabytes * 1024 * 1024))
        if not options.also_to_stderr:
            errors.setLevel(options.stderr_threshold)
    elif options.split_stream:
        errors.setLevel(logging.ERROR)
        handlers.append(_information(options))
    return [*handlers, errors]


def _information(options: LogOptions) -> logging.Handler:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error: a file name that is not valid UTF-8 must not cost a line, or a whole buffer.
        sys.stdout.reconfigure(errors="backslashreplace")
    if options.info_buffer_bytes > 0:
        # Before the handler of errors, which it has to precede on the terminal as in time.
        return BufferedStream(sys.stdout, options.info_buffer_bytes, options.flush_seconds)
    information = logging.StreamHandler(sys.stdout)
    information.addFilter(lambda record: record.levelno < logging.ERROR)
    return information


def _file(options: LogOptions) -> Path | None:
    if options.to_stderr:
        return None
    if options.file:
        return Path(options.file)
    if options.directory:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return Path(options.directory) / f"kubelet.{stamp}.log"
    return None


def configure_early() -> None:
    """Install a default configuration before the configuration is known, unless there is one."""
    if not logging.getLogger(ROOT).handlers:
        configure(LogOptions())
