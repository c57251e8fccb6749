"""Structured logging calls on top of the standard library's loggers.

One logger per module. Verbosity is expressed in the standard library's own levels (`-v=4` is
level 20-4), so that a call that is not wanted costs one comparison, `--vmodule` is one level on
one logger, and anything that speaks plain `logging` fits in.
"""

from __future__ import annotations

import fnmatch
import logging
from typing import Any

ROOT = "pykubelet"
INFO = logging.INFO
MAX_VERBOSITY = INFO - 1


def level_for(verbosity: int) -> int:
    """Give the standard level that stands for klog's verbosity."""
    return INFO - min(max(verbosity, 0), MAX_VERBOSITY)


class Log:
    """A module's logger, perhaps with keys that every line carries (`bind`)."""

    __slots__ = ("_keys", "_level", "_logger")

    def __init__(self, logger: logging.Logger, keys: dict[str, Any] | None = None, level: int = INFO) -> None:
        self._logger = logger
        self._keys = keys or {}
        self._level = level

    def bind(self, **keys: Any) -> Log:
        """Return a logger whose lines all carry these keys."""
        return Log(self._logger, {**self._keys, **keys}, self._level)

    def v(self, verbosity: int) -> Log:
        """Return a logger that speaks only at this verbosity or above."""
        return Log(self._logger, self._keys, level_for(verbosity))

    def __bool__(self) -> bool:
        """Whether an `info` here would be written: guards costly arguments."""
        return self._logger.isEnabledFor(self._level)

    def info(self, message: str, /, **keys: Any) -> None:
        """Say something that is as it should be."""
        self._write(self._level, message, keys)

    def warning(self, message: str, /, **keys: Any) -> None:
        """Say something that someone should look at."""
        self._write(logging.WARNING, message, keys)

    def error(self, err: BaseException | str | None, message: str, /, **keys: Any) -> None:
        """Say what failed; `err` is the cause."""
        self._write(logging.ERROR, message, {"err": err, **keys} if err is not None else keys)

    def exception(self, err: BaseException, message: str, /, **keys: Any) -> None:
        """Say what failed unexpectedly, with the traceback: a bug, not a condition."""
        self._write(logging.ERROR, message, {"err": err, **keys}, err)

    def _write(
        self, level: int, message: str, keys: dict[str, Any], trace: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            merged = {**self._keys, **keys} if self._keys else keys
            self._logger.log(level, message, exc_info=trace, extra={"klog_keys": merged}, stacklevel=3)


def get_logger(name: str) -> Log:
    """Give the logger of a module: `log = get_logger(__name__)`."""
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(_own_level(name))
    return Log(logger)


def set_vmodule(patterns: list[tuple[str, int]]) -> None:
    """Give the modules that a pattern matches their own verbosity, also those loaded later.

    A pattern without a slash is compared with the file's name without `.py`, one with a slash
    with its path below the package (`sync/loop`). The first match counts.
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
