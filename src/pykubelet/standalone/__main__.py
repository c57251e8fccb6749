"""Private runtime without a kubelet: `python -m pykubelet.standalone DIRECTORY [CGROUP-DRIVER]`.

For tests and for debugging of containerd alone. Prints `ready` and the endpoint and image names as JSON on
standard output, then keeps the runtime running until SIGTERM or SIGINT. The default cgroup driver is
`cgroupfs`.
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
    """Run the private runtime until SIGTERM or SIGINT."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with PrivateRuntime(Instance.at(directory), cgroup_driver=cgroup_driver) as runtime:
        names = {"endpoint": runtime.endpoint, "pause": runtime.pause_image, "busybox": runtime.busybox_image}
        print("ready", json.dumps(names), flush=True)
        await stop.wait()


def main() -> int:
    """Run the command line; return the exit code."""
    configure_early()
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["cgroupfs"], ["systemd"]):
        print("usage: python -m pykubelet.standalone DIRECTORY [cgroupfs|systemd]", file=sys.stderr)
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
