"""Every handler of `ProbeHandler` is accepted, dispatched and described."""

import typing

import msgspec
import pytest

from pykubelet.api.pod import PROBE_HANDLERS, Probe, ProbeAction, ProbeHandler, probe_handler
from pykubelet.cli.pods.describe import probe_text
from pykubelet.probes.runner import Checker, ExecSlots
from tests.support.probes import target
from tests.unit.podconfig.validating import of_container

DESCRIBED = {
    "exec": "exec [] delay=",
    "httpGet": "http-get http://:1/ delay=",
    "tcpSocket": "tcp-socket :1 delay=",
    "grpc": "grpc :1 delay=",
}
PROBED = "spec.containers[0].livenessProbe"


def probe_with(*names: str) -> Probe:
    """Return a probe with these handlers, whose required fields have some value."""
    kinds = typing.get_type_hints(ProbeHandler)
    handlers = {name: typing.get_args(kinds[name])[0] for name in names}
    required = {"port": 1}
    values = {
        name: kind(
            **{field.name: required[field.name] for field in msgspec.structs.fields(kind) if field.required}
        )
        for name, kind in handlers.items()
    }
    return Probe(**values)


def test_probe_action_types_are_those_of_the_handlers() -> None:
    kinds = {typing.get_args(kind)[0] for kind in typing.get_type_hints(ProbeHandler).values()}
    assert set(typing.get_args(ProbeAction)) == kinds


@pytest.mark.parametrize(("name", "field"), PROBE_HANDLERS.items())
async def test_probe_each_handler_found_accepted_dispatched_and_described(name: str, field: str) -> None:
    probe = probe_with(name)
    assert probe_handler(probe) == (name, getattr(probe, name))
    value = {"command": ["true"]} if field == "exec" else {"port": 80}
    assert of_container(livenessProbe={field: value}) == []
    assert probe_text(probe).startswith(DESCRIBED[field])

    async def no_command(container_id: str, command: list[str], timeout: int) -> tuple[int, bytes]:
        return 0, b""

    outcome = await Checker(no_command, ExecSlots(1)).check(probe, target())
    assert "missing probe handler" not in outcome.output
    assert outcome.result == ("success" if field == "exec" else "failure")


def test_probe_without_or_with_two_handlers_rejected() -> None:
    assert probe_handler(Probe()) is None
    assert probe_text(Probe()).startswith("nothing delay=")
    assert of_container(livenessProbe={"periodSeconds": 1}) == [PROBED]
    two = {"tcpSocket": {"port": 80}, "grpc": {"port": 80}}
    assert of_container(livenessProbe=two) == [PROBED]
