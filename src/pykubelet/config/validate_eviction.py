"""Eviction thresholds: signals, amounts, grace periods, what to reclaim."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pykubelet.api.duration import Duration
from pykubelet.api.quantity import Quantity
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_rules import Gates, between, check

SIGNALS = (
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
    "allocatableMemory.available",
)
IGNORED_THRESHOLDS = ("0%", "100%")
"""Thresholds that switch a signal off."""

_PERCENTAGE = re.compile(r"[+-]?(?:[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})%", re.ASCII)


def problems(config: KubeletConfiguration, _gates: Gates) -> Iterator[Problem]:
    """Check all fields about eviction."""
    yield from check([between("eviction_pressure_transition_period", Duration(0))], config)
    yield from _signals("evictionHard", config.eviction_hard, _threshold)
    yield from _signals("evictionSoft", config.eviction_soft, _threshold)
    yield from _signals("evictionSoftGracePeriod", config.eviction_soft_grace_period, _grace_period)
    yield from _signals("evictionMinimumReclaim", config.eviction_minimum_reclaim, _reclaim)
    for signal, threshold in config.eviction_soft.items():
        given = signal in config.eviction_soft_grace_period
        if signal in SIGNALS and threshold not in IGNORED_THRESHOLDS and not given:
            message = f"needs a grace period: set evictionSoftGracePeriod[{signal}]"
            yield Problem(key_path("evictionSoft", signal), message)


def _signals(field: str, entries: dict[str, str], read: Callable[[str], None]) -> Iterator[Problem]:
    for signal, text in entries.items():
        path = key_path(field, signal)
        if signal not in SIGNALS:
            yield Problem(path, f"there is no such signal: use one of {', '.join(SIGNALS)}")
            continue
        try:
            read(text)
        except ValueError as err:
            yield Problem(path, str(err))


def _threshold(text: str) -> None:
    if text.endswith("%"):
        if not 0 <= _percentage(text) <= 100:
            raise ValueError(f"must be between 0% and 100%, not {quoted(text)}")
    elif Quantity.parse(text).nanos <= 0:
        raise ValueError(f"must be more than zero, not {quoted(text)}")


def _reclaim(text: str) -> None:
    if text.endswith("%"):
        if _percentage(text) <= 0:
            raise ValueError(f"must be more than 0%, not {quoted(text)}")
    elif Quantity.parse(text).nanos < 0:
        raise ValueError(f"must not be negative, as {quoted(text)} is")


def _grace_period(text: str) -> None:
    if Duration.parse(text) < 0:
        raise ValueError(f"must not be negative, as {quoted(text)} is")


def _percentage(text: str) -> float:
    if not _PERCENTAGE.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a percentage: write a number and %, such as 10%")
    return float(text.removesuffix("%"))
