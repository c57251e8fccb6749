"""The serving side of a plugin that misbehaves as `behaviour.json` specifies, which is read at each call:

    {"hang": ["Call"], "late": {"Call": 0.5}, "die": ["Call"], "fail": {"Call": ["INTERNAL", "no"]}}

Whatever it is asked is a line of `calls.jsonl` before anything else happens.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


class Scripted:
    """Serves each call by its method of the same name, or misbehaves as configured."""

    def __init__(self, folder: Path, **mark: str) -> None:
        """Take where its files are; `mark` is noted with each call."""
        self.folder = folder
        self._mark = mark

    def behaviour(self) -> dict[str, Any]:
        """How to misbehave now."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "behaviour.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    async def reply(self, name: str, request: Message, context: Any) -> Message:
        """Do what was asked."""
        answer: Message = getattr(self, name)(request)
        return answer

    async def answer(self, name: str, request: Message, context: Any) -> Message:
        """Note a call, misbehave, and reply."""
        behaviour = self.behaviour()
        said = MessageToDict(request, preserving_proto_field_name=True)
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"call": name, **self._mark, "request": said}) + "\n")
        if name in behaviour.get("die", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if name in behaviour.get("hang", ()):
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(behaviour.get("late", {}).get(name, 0))
        if name in behaviour.get("fail", {}):
            code, text = behaviour["fail"][name]
            await context.abort(grpc.StatusCode[code], text)
        return await self.reply(name, request, context)

    def handlers(self, service: ServiceDescriptor, name: str = "") -> Any:
        """The methods of a service, as gRPC wants them; perhaps under another name."""

        def handler(method: MethodDescriptor) -> Any:
            types = {
                "request_deserializer": GetMessageClass(method.input_type).FromString,
                "response_serializer": lambda message: message.SerializeToString(),
            }
            if method.server_streaming:
                return grpc.unary_stream_rpc_method_handler(getattr(self, method.name), **types)

            async def serve(request: Message, context: Any) -> Message:
                return await self.answer(method.name, request, context)

            return grpc.unary_unary_rpc_method_handler(serve, **types)

        return grpc.method_handlers_generic_handler(
            name or service.full_name, {method.name: handler(method) for method in service.methods}
        )
