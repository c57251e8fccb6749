"""Structured logging calls on top of the standard library's loggers.

One logger per module. Verbosity is mapped to the standard library's levels (`-v=4` is level 20-4), so that a
disabled call costs one comparison, `--vmodule` is the level of one logger, and plain `logging` calls work.
"""

from __future__ import annotations

import fnmatch
import logging
from typing import Any

ROOT = "pykubelet"
INFO = logging.INFO
MAX_VERBOSITY = INFO - 1


def level_for(verbosity: int) -> int:
    """Return the standard library's level for a klog verbosity."""
    return INFO - min(max(verbosity, 0), MAX_VERBOSITY)


class Log:
    """A module's logger, with optional keys that every line has (`bind`)."""

    __slots__ = ("_keys", "_level", "_logger")

    def __init__(self, logger: logging.Logger, keys: dict[str, Any] | None = None, level: int = INFO) -> None:
        self._logger = logger
        self._keys = keys or {}
        self._level = level

    def bind(self, **keys: Any) -> Log:
        """Return a logger whose lines all have these keys."""
        return Log(self._logger, {**self._keys, **keys}, self._level)

    def v(self, verbosity: int) -> Log:
        """Return a logger that is enabled at this verbosity or above."""
        return Log(self._logger, self._keys, level_for(verbosity))

    def __bool__(self) -> bool:
        """Return whether `info` would write a line: guards expensive arguments."""
        return self._logger.isEnabledFor(self._level)

    def info(self, message: str, /, **keys: Any) -> None:
        """Log an expected event."""
        self._write(self._level, message, keys)

    def warning(self, message: str, /, **keys: Any) -> None:
        """Log a condition that an operator should look at."""
        self._write(logging.WARNING, message, keys)

    def error(self, err: BaseException | str | None, message: str, /, **keys: Any) -> None:
        """Log a failure; `err` is the cause."""
        self._write(logging.ERROR, message, {"err": err, **keys} if err is not None else keys)

    def exception(self, err: BaseException, message: str, /, **keys: Any) -> None:
        """Log an unexpected failure with its traceback: a bug, not a condition."""
        self._write(logging.ERROR, message, {"err": err, **keys}, err)

    def _write(
        self, level: int, message: str, keys: dict[str, Any], trace: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            merged = {**self._keys, **keys} if self._keys else keys
            self._logger.log(level, message, exc_info=trace, extra={"klog_keys": merged}, stacklevel=3)


def get_logger(name: str) -> Log:
    """Return the logger of a module: `log = get_logger(__name__)`."""
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(_own_level(name))
    return Log(logger)


def set_vmodule(patterns: list[tuple[str, int]]) -> None:
    """Set the verbosity of the modules that match a pattern, also of those loaded later.

    A pattern without a slash is compared with the file's name without `.py`, one with a slash with its path
    below the package (`podworkers/loop`). The first match counts.
    """
    _vmodule[:] = patterns
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(ROOT + "."):
            logging.getLogger(name).setLevel(_own_level(name))


_vmodule: list[tuple[str, int]] = []


def _own_level(name: str) -> int:
    path = name.removeprefix(ROOT + ".").replace(".", "/")
    base = path.rsplit("/", 1)[-1]
    for pattern, verbosity in _vmodule:
        if fnmatch.fnmatchcase(path if "/" in pattern else base, pattern):
            return level_for(verbosity)
    return logging.NOTSET
