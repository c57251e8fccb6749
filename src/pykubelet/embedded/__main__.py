"""A private runtime without an agent: `python -m pykubelet.embedded DIRECTORY`.

For tests, and for people who want to look at containerd alone. Says `ready` on standard output with
the names that a caller needs, then keeps the runtime alive until SIGTERM or SIGINT.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop

from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.runtime import PrivateRuntime
from pykubelet.logs.setup import configure_early


async def serve(directory: Path) -> None:
    """Run until a signal comes."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with PrivateRuntime(Instance.at(directory)) as runtime:
        names = {"endpoint": runtime.endpoint, "pause": runtime.pause_image, "busybox": runtime.busybox_image}
        print("ready", json.dumps(names), flush=True)
        await stop.wait()


def main() -> int:
    """Entry point; returns the exit code."""
    configure_early()
    if len(sys.argv) != 2:
        print("usage: python -m pykubelet.embedded DIRECTORY", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(Path(sys.argv[1])))
    except EmbeddedError as err:
        print(f"pykubelet: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
