"""A client that speaks HTTP/2 as well or as badly as a test wants."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    InformationalResponseReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame

from pykubelet.server.connections import single_error_scope

PATIENCE_SECONDS = 30


@dataclass
class Answer:
    """What came on a stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    interim: list[str] = field(default_factory=list)
    ended: bool = False
    reset: ErrorCodes | int | None = None

    @property
    def done(self) -> bool:
        return self.ended or self.reset is not None

    @property
    def text(self) -> str:
        return self.body.decode()


class Client:
    """One connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, window: int, takes: bool
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.goodbye: ErrorCodes | int | None = None
        self.closed = False
        """Whether the server has hung up."""
        self.takes = takes
        """Whether what comes is acknowledged, so that more comes."""
        self._reader, self._writer = reader, writer
        # A test says exactly what is sent, also when it is wrong.
        self.wire = H2Connection(
            H2Configuration(
                header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self._news = asyncio.Condition()
        self.wire.local_settings = Settings(True, {SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.wire.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self._writer.write(self.wire.data_to_send())

    def raw(self, *parts: Frame | bytes) -> None:
        """Send frames that this side then knows nothing of."""
        self._writer.writelines(part.serialize() if isinstance(part, Frame) else part for part in parts)

    def begin(
        self,
        path: str,
        method: str = "GET",
        headers: Iterable[tuple[str, str]] = (),
        *,
        body: bool = False,
        pseudo: Iterable[tuple[str, str]] | None = None,
    ) -> int:
        """Send a request, up to its `body` if it has one, and give the stream."""
        number = self.wire.get_next_available_stream_id()
        if pseudo is None:
            pseudo = [(":method", method), (":scheme", "https"), (":authority", "node"), (":path", path)]
        self.wire.send_headers(number, [*pseudo, *headers], end_stream=not body)
        self.answers[number] = Answer()
        self.flush()
        return number

    async def send(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Send some of a body as the server takes it; what it does not want is left."""
        answer = self.answers[number]
        while data and not answer.done:
            room = min(self.wire.local_flow_control_window(number), self.wire.max_outbound_frame_size)
            if room > 0:
                self.wire.send_data(number, data[:room])
                data = data[room:]
                self.flush()
            else:
                await self.until(
                    lambda: answer.done or self.closed or self.wire.local_flow_control_window(number) > 0
                )
        if end and not answer.done:
            self.wire.end_stream(number)
            self.flush()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._news:
            await self._news.wait_for(condition)

    async def whole(self, number: int) -> Answer:
        """Wait for the end of a stream."""
        answer = self.answers[number]
        await self.until(lambda: answer.done or self.closed)
        return answer

    async def ask(self, path: str, method: str = "GET", body: bytes | None = None, **options: Any) -> Answer:
        """Make a request and give its answer."""
        number = self.begin(path, method, body=body is not None, **options)
        if body is not None:
            await self.send(number, body, end=True)
        return await self.whole(number)

    async def read(self) -> None:
        while data := await self._read():
            async with self._news:
                try:
                    for event in self.wire.receive_data(data):
                        self._take(event)
                except H2Error:
                    # A test that sends raw frames gets answers to what this side never asked.
                    pass
                self.flush()
                self._news.notify_all()
        async with self._news:
            self.closed = True
            self._news.notify_all()

    async def _read(self) -> bytes:
        """Give one frame; empty at the end."""
        try:
            head = await self._reader.readexactly(9)
            return head + await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            return b""

    def _take(self, event: Any) -> None:
        answer = self.answers.setdefault(getattr(event, "stream_id", 0) or 0, Answer())
        match event:
            case InformationalResponseReceived():
                answer.interim.append(_fields(event)[":status"])
            case ResponseReceived():
                answer.headers = _fields(event)
                answer.status = int(answer.headers.pop(":status"))
            case DataReceived():
                answer.body += event.data
                if self.takes and event.flow_controlled_length:
                    self.wire.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case StreamEnded():
                answer.ended = True
            case StreamReset():
                answer.reset = event.error_code
            case ConnectionTerminated():
                self.goodbye = event.error_code
                # What was asked for is still answered; h2 thinks that everything is over.
                self.wire.state_machine.state = ConnectionState.CLIENT_OPEN


def _fields(event: Any) -> dict[str, str]:
    return dict(event.headers)


@asynccontextmanager
async def http2_client(
    port: int, context: ssl.SSLContext, *, window: int = 65535, takes: bool = True
) -> AsyncIterator[Client]:
    """Connect; `window` is how much of each answer may come before something is acknowledged."""
    context.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context, limit=2**20)
    try:
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        async with single_error_scope() as scope:
            client = Client(reader, writer, window=window, takes=takes)
            scope.start(client.read(), name="http2-client")
            yield client
    finally:
        writer.close()
