"""gRPC probe: a call of the standard health service (`grpc.health.v1.Health/Check`), without TLS.

Request and response have one field each, so they are encoded by hand: a generated module would be larger.
Each probe opens a new connection, because the probe also tests whether the server accepts one.
"""

from __future__ import annotations

import asyncio

from pykubelet.api.pod import GRPCAction
from pykubelet.probes.types import ProbeResult, Target, join_host_port, resolve_host, resolve_port
from pykubelet.transport.grpc_connection import Connection, Status

CHECK_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = 1
_NAMES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_RESPONSE_LIMIT = 4096
_HEADER_LIMIT = 4096
_MAX_HEADER_BLOCKS = 4
"""Header blocks per connection (headers, trailers, informational); a pod may send hostile ones."""


async def grpc_check(action: GRPCAction, target: Target, timeout: float, agent: str) -> ProbeResult:
    """Call the health service; any status but SERVING is a failure. Raises BadTarget."""
    host, port = resolve_host("", target), resolve_port(action.port, target.container)
    address = join_host_port(host, port)
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    try:
        async with asyncio.timeout_at(end):
            _, connection = await loop.create_connection(
                lambda: Connection(address, _RESPONSE_LIMIT, _HEADER_LIMIT, _MAX_HEADER_BLOCKS), host, port
            )
    except TimeoutError:
        return ProbeResult("failure", _not_within(address, timeout))
    except OSError as err:
        return ProbeResult(
            "failure", f'error: failed to connect service at "{address}": {err.strerror or err}'
        )
    try:
        if not await connection.wait_settings(end - loop.time()):
            return ProbeResult("failure", _not_within(address, timeout))
        call = connection.call(
            CHECK_METHOD, encode_request(action.service or ""), [("user-agent", agent)], end - loop.time()
        )
        response = await call.wait_response()
        if call.status is None or call.status.code != "OK":
            return ProbeResult("failure", _describe(call.status or Status("UNKNOWN"), timeout))
    finally:
        connection.close(Status("CANCELLED"))
    try:
        status = decode_status(response or b"")
    except ValueError as err:
        return ProbeResult("failure", f"error: health rpc probe failed: {err}")
    if status != _SERVING:
        name = _NAMES.get(status, str(status))
        return ProbeResult("failure", f'service unhealthy (responded with "{name}")')
    return ProbeResult("success", "service healthy")


def encode_request(service: str) -> bytes:
    """Encode a HealthCheckRequest: the service name is field 1."""
    name = service.encode()
    return b"\x0a" + _varint(len(name)) + name if name else b""


def decode_status(message: bytes) -> int:
    """Decode the status of a HealthCheckResponse, field 1; absent means 0. Unknown fields are skipped.

    Raises ValueError for bytes that are not a valid message.
    """
    status = at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        match tag & 7:
            case 0:
                value, at = _read_varint(message, at)
                if tag >> 3 == 1:
                    status = value
            case 1:
                at += 8
            case 2:
                length, at = _read_varint(message, at)
                at += length
            case 5:
                at += 4
            case _:
                raise ValueError("the answer is not a health check's")
    if at != len(message):
        raise ValueError("the answer is cut short")
    return status


def _not_within(address: str, timeout: float) -> str:
    within = f'timeout: failed to connect service "{address}" within {timeout:g}s'
    return within + ": context deadline exceeded"


def _describe(status: Status, timeout: float) -> str:
    match status.code:
        case "UNIMPLEMENTED":
            return (
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): "
                + status.message
            )
        case "DEADLINE_EXCEEDED":
            return f"timeout: health rpc did not complete within {timeout:g}s"
        case code:
            text = f"rpc error: code = {_code_name(code)} desc = {status.message}"
            return f"error: health rpc probe failed: {text}"


def _code_name(name: str) -> str:
    # Upstream's events contain `NotFound` for `NOT_FOUND`.
    return "Canceled" if name == "CANCELLED" else name.title().replace("_", "")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
    raise ValueError("the answer is cut short")
