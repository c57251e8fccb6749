"""A private runtime without an agent: `python -m pykubelet.embedded DIRECTORY [CGROUP-DRIVER]`.

For tests, and for people who want to look at containerd alone. Says `ready` on standard output with
the names that a caller needs, then keeps the runtime alive until SIGTERM or SIGINT. The cgroup driver
is `cgroupfs`, unless `systemd` is asked for.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop

from pykubelet.logs.setup import configure_early
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.runtime import PrivateRuntime


async def serve(directory: Path, cgroup_driver: str) -> None:
    """Run until a signal comes."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with PrivateRuntime(Instance.at(directory), cgroup_driver=cgroup_driver) as runtime:
        names = {"endpoint": runtime.endpoint, "pause": runtime.pause_image, "busybox": runtime.busybox_image}
        print("ready", json.dumps(names), flush=True)
        await stop.wait()


def main() -> int:
    """Entry point; returns the exit code."""
    configure_early()
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["cgroupfs"], ["systemd"]):
        print("usage: python -m pykubelet.embedded DIRECTORY [cgroupfs|systemd]", file=sys.stderr)
        return 1
    directory, driver = [*sys.argv[1:], "cgroupfs"][:2]
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(Path(directory), driver))
    except EmbeddedError as err:
        print(f"pykubelet: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
