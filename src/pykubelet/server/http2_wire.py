"""How `h2` is made to speak HTTP/2 here: what clients are told, and what it should leave to us."""

from __future__ import annotations

import struct

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings

from pykubelet.server.http2_frames import DATA, GOAWAY, LONGEST_FRAME

MOST_STREAMS = 250
"""Of one connection; the reference's number."""
MOST_FIELD_BYTES = 64 * 1024
"""Of all fields of a request: decoding them is slow, and strangers may send them, too."""
WINDOW = 64 * 1024 - 1
"""How much of a body may come before somebody takes it."""


class Wire(H2Connection):
    """The protocol, without the bytes' way there and back."""

    # What is remembered of streams that have ended is for frames that crossed their end.
    MAX_CLOSED_STREAMS = 1000

    @property
    def open_inbound_streams(self) -> int:
        """None: a stream too many is refused by the connection, where h2 would end all of them."""
        # Asking is what makes it forget those that have ended.
        _ = super().open_inbound_streams
        return 0

    def room(self, number: int) -> int:
        """How many bytes may be sent on a stream now; not more than 0 when none may."""
        return min(self.outbound_flow_control_window, self.streams[number].outbound_flow_control_window)

    def more(self, number: int, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Give what to send, in order, for data of a stream that is neither its last nor too much.

        Nearly all that is sent is this, and h2's own way, which would be right for the last, too, takes
        half of the time that a long answer takes.
        """
        size = len(data)
        self.outbound_flow_control_window -= size
        self.streams[number].outbound_flow_control_window -= size
        return [self.data_to_send(), struct.pack(">IBI", size << 8 | DATA, 0, number), data]


def make_wire() -> Wire:
    """Make the protocol of a connection that begins."""
    settings = H2Configuration(
        client_side=False,
        header_encoding=None,
        # Fields are checked by `request_head`: a bad request should not end all others on the connection.
        validate_inbound_headers=False,
        normalize_inbound_headers=False,
        # ... and those of answers are made by `answer_head`.
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    wire = Wire(settings)
    wire.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
            SettingCodes.MAX_FRAME_SIZE: LONGEST_FRAME,
            SettingCodes.MAX_HEADER_LIST_SIZE: MOST_FIELD_BYTES,
        },
    )
    wire.decoder.max_header_list_size = MOST_FIELD_BYTES
    return wire


def goodbye(last: int) -> bytes:
    """A GOAWAY that lets what has begun go on; after one of h2's own nothing could be sent."""
    return struct.pack(">IBIII", 8 << 8 | GOAWAY, 0, 0, last, ErrorCodes.NO_ERROR)
