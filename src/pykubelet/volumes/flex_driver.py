"""Talking to a FlexVolume driver: a program of the node's administrator, called once per question.

It gets a command and its arguments, and answers with a JSON object. Commands that it does not know it
answers with `Not supported`; they are done in the usual way instead, and not asked for again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pykubelet.volumes.errors import BadSource, KindError
from pykubelet.volumes.folders import plain
from pykubelet.volumes.mount_helper import HelperError, run_helper

SUCCESS = "Success"
NOT_SUPPORTED = "Not supported"


class DriverError(KindError):
    """A driver did not do what it was asked; the text has its own words."""


class NotSupportedError(DriverError):
    """The driver leaves this to the agent."""


class Capabilities(msgspec.Struct, frozen=True):
    """What a driver can do; what it does not mention is as here."""

    attach: bool = True
    selinuxrelabel: bool = True
    fsgroup: bool = True


class Answer(msgspec.Struct, frozen=True):
    """What a driver answers."""

    status: str = ""
    message: str = ""
    device: str = ""
    capabilities: Capabilities | None = None


def escaped(driver: str) -> str:
    """Give the name of a driver as a folder's: `vendor/driver` is `vendor~driver`; raises BadSource."""
    name = driver.replace("/", "~")
    try:
        if name.startswith(".") or name.endswith("~"):
            raise ValueError("there is no program of this name")
        return plain(name)
    except ValueError:
        raise BadSource(f"{driver!r} cannot be the name of a FlexVolume driver") from None


def read_answer(command: str, said: str) -> Answer:
    """Give what a driver answered; raises DriverError, of which NotSupportedError.

    Keys are taken in upper and lower case, because drivers write them in both.
    """
    try:
        answer = msgspec.convert(_lower(msgspec.json.decode(said)), Answer)
    except msgspec.MsgspecError as err:
        words = " ".join(said.split())[:200]
        raise DriverError(
            f"{command} command failed, the driver's answer is unreadable: {err}: {words}"
        ) from err
    if answer.status == NOT_SUPPORTED:
        raise NotSupportedError(f"{command} command failed, status: {NOT_SUPPORTED}")
    if answer.status != SUCCESS:
        reason = " ".join(answer.message.split())
        raise DriverError(f"{command} command failed, status: {answer.status}, reason: {reason}")
    return answer


class FlexDriver:
    """One driver; what is known of it holds as long as its program is the same."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take the folder of all drivers and the driver's name, `vendor/driver`; raises BadSource."""
        self.name = name
        self.program = folder / escaped(name) / name.rpartition("/")[2]
        self._seen: tuple[int, ...] = ()
        self._capabilities = Capabilities()
        self._unsupported: set[str] = set()

    async def capabilities(self) -> Capabilities:
        """Give what it can do; it is asked when it is new (`init`). Raises KindError."""
        try:
            facts = self.program.stat()
        except OSError:
            raise BadSource(
                f"no volume plugin matched: the FlexVolume driver {self.name} is not installed "
                f"at {self.program}"
            ) from None
        seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if seen != self._seen:
            self._unsupported.clear()
            self._capabilities = (await self.call("init")).capabilities or Capabilities()
            self._seen = seen
        return self._capabilities

    async def call(self, command: str, *arguments: str) -> Answer:
        """Ask it to do something; raises NotSupportedError, DriverError and HelperError.

        Options, which are JSON and may be secret, are told to nobody else.
        """
        if command in self._unsupported:
            raise NotSupportedError(NOT_SUPPORTED)
        failure: HelperError | None = None
        try:
            hidden = [argument for argument in arguments if argument.startswith("{")]
            said = await run_helper(str(self.program), command, *arguments, hidden=hidden)
        except HelperError as err:
            if err.status is None or not err.output.lstrip().startswith("{"):
                raise
            failure, said = err, err.output
        try:
            answer = read_answer(command, said)
        except NotSupportedError:
            self._unsupported.add(command)
            raise
        if failure is not None:
            raise failure
        return answer


def _lower(value: Any) -> Any:
    return {key.lower(): _lower(inner) for key, inner in value.items()} if isinstance(value, dict) else value
