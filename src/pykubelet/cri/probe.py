"""Why a socket cannot be used, found out before gRPC hides the reason.

gRPC reports every failure to connect as "unavailable". A person needs to know which it is: no file,
not a socket, no permission, nobody listening, silence, or a program that speaks something else. So
the socket is tried by hand once, at the start; the first frame that an HTTP/2 server must send is
proof enough of gRPC for a good message.
"""

import asyncio
import stat
import struct
from pathlib import Path

from pykubelet.cri.endpoint import Endpoint
from pykubelet.cri.errors import ConnectError

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = struct.Struct(">BHBBL")  # length (8 + 16 bits), type, flags, stream
_SETTINGS = 4
_EMPTY_SETTINGS = _FRAME_HEADER.pack(0, 0, _SETTINGS, 0, 0)

_REMEDY = "start the container runtime, or set --container-runtime-endpoint to its socket"


async def probe(endpoint: Endpoint) -> None:
    """Return when something that speaks HTTP/2 listens at the endpoint.

    Raises ConnectError, one line with the cause and a remedy. Silence is waited for: the caller
    bounds it, and `silent` has the words.
    """
    try:
        _check_file(endpoint)
        await _check_speech(endpoint)
    except FileNotFoundError:
        raise ConnectError(f"no socket at {endpoint}: the file does not exist; {_REMEDY}") from None
    except ConnectionRefusedError:
        raise ConnectError(
            f"nothing listens at {endpoint}: the socket was left by a runtime that ended; {_REMEDY}"
        ) from None
    except PermissionError:
        raise ConnectError(
            f"no permission to connect to {endpoint}; run as root, or as a user who may use the socket",
            "PermissionDenied",
        ) from None
    except OSError as err:
        reason = err.strerror or type(err).__name__
        raise ConnectError(f"cannot connect to {endpoint}: {reason}; {_REMEDY}") from None


def silent(endpoint: Endpoint, seconds: float) -> ConnectError:
    """Give the error for a program that accepts connections and then says nothing."""
    return ConnectError(
        f"{endpoint} accepts connections but answered nothing within {seconds:g}s; "
        "see whether the container runtime hangs (its log says more), and restart it",
        "DeadlineExceeded",
    )


def _check_file(endpoint: Endpoint) -> None:
    mode = Path(endpoint.path).stat().st_mode
    if not stat.S_ISSOCK(mode):
        kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ConnectError(
            f"{endpoint} is {kind}, not a socket; set --container-runtime-endpoint to the runtime's socket",
            "FailedPrecondition",
        )


async def _check_speech(endpoint: Endpoint) -> None:
    reader, writer = await asyncio.open_unix_connection(endpoint.path)
    try:
        writer.write(_PREFACE + _EMPTY_SETTINGS)
        try:
            header = await reader.readexactly(_FRAME_HEADER.size)
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            raise _not_grpc(endpoint) from None
        _, _, kind, _, stream = _FRAME_HEADER.unpack(header)
        if kind != _SETTINGS or stream != 0:
            raise _not_grpc(endpoint)
    finally:
        writer.close()


def _not_grpc(endpoint: Endpoint) -> ConnectError:
    return ConnectError(
        f"the program at {endpoint} does not speak gRPC; "
        "set --container-runtime-endpoint to a container runtime's socket",
        "FailedPrecondition",
    )
