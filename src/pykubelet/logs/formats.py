"""Formatters of log lines: klog's text format and the JSON format."""

import json
import logging
import time
import traceback
from typing import Any

from pykubelet.logs.logger import INFO
from pykubelet.logs.mask import mask_text, mask_value, plain

_LETTER = {logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}


def _severity(record: logging.LogRecord) -> str:
    return _LETTER.get(record.levelno, "I")


def _keys(record: logging.LogRecord) -> dict[str, Any]:
    """Return the masked keys: all values are strings, numbers, or lists and maps of them."""
    keys = getattr(record, "klog_keys", None) or {}
    return {name: mask_value(name, value) for name, value in keys.items()}


def _with_directory(record: logging.LogRecord) -> str:
    return "/".join(record.pathname.split("/")[-2:])


def _trace(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    return mask_text("".join(traceback.format_exception(record.exc_info[1])))


class TextFormatter(logging.Formatter):
    """`I1207 07:27:35.643307   23137 server.py:64] "message" key="value"`."""

    def __init__(self, *, headers: bool = True, directories: bool = False) -> None:
        super().__init__()
        self._headers = headers
        self._directories = directories

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line end."""
        structured = hasattr(record, "klog_keys")
        message = mask_text(record.getMessage())
        parts = [json.dumps(message, ensure_ascii=False) if structured else message]
        parts += [f"{name}={_text_value(value)}" for name, value in _keys(record).items()]
        line = " ".join(parts)
        if self._headers:
            line = f"{self._header(record)} {line}"
        trace = _trace(record)
        return f"{line}\n{trace.rstrip()}" if trace else line

    def _header(self, record: logging.LogRecord) -> str:
        moment = time.localtime(record.created)
        micros = int(record.created % 1 * 1_000_000)
        name = _with_directory(record) if self._directories else record.filename
        stamp = time.strftime("%m%d %H:%M:%S", moment)
        pid = record.process or 0
        return f"{_severity(record)}{stamp}.{micros:06d} {pid:7d} {name}:{record.lineno}]"


def _text_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nil"
    if isinstance(value, int | float) and type(value) in (int, float):
        return str(value)
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = plain(value)
    if "\n" in text:
        # klog's format of multi-line values: an indented block
        return "<\n\t" + text.rstrip("\n").replace("\n", "\n\t") + "\n >"
    return json.dumps(text, ensure_ascii=False)


class JSONFormatter(logging.Formatter):
    """One JSON object per line: ts in milliseconds, caller, msg, v (or err), then the keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line end."""
        document: dict[str, Any] = {
            "ts": round(record.created * 1000, 6),
            "caller": f"{_with_directory(record)}:{record.lineno}",
            "msg": mask_text(record.getMessage()),
        }
        if record.levelno <= INFO:
            document["v"] = INFO - record.levelno
        document.update(_keys(record))
        trace = _trace(record)
        if trace:
            document["stacktrace"] = trace
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
