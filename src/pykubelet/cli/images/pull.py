"""`pykubelet images pull`: pulls an image as the kubelet does for a pod without pull secrets.

The runtime pulls; each of the node's credentials for the repository is tried. An interrupted pull is
cancelled in the runtime, which keeps what it has received for the next attempt.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pykubelet.cli.images.access import NodeImages, run_on_images
from pykubelet.cli.images.progress import Display, display
from pykubelet.cli.options import NodeSelection
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd_store import ContainerdStore
from pykubelet.images.containerd_progress import ContainerdProgress
from pykubelet.images.credentials import Credentials, Keyring, NodeCredentials
from pykubelet.images.image_reference import ImageName, parse_image_name
from pykubelet.images.pull_tracker import PullTracker
from pykubelet.images.puller import PullFailed, failure_text, join_failures
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope
from pykubelet.util.text import format_size

PROGRAM = "pykubelet images pull"
_POLL_SECONDS = 0.3
_REFRESH_SECONDS = 0.1


def run_pull(selection: NodeSelection, image: str, *, quiet: bool) -> int:
    """Pull the image; return the exit code."""

    async def work(images: NodeImages) -> int:
        name = parse_image_name(image)
        credentials = await asyncio.to_thread(node_credentials, images.node.root_dir, name)
        try:
            with display(quiet=quiet) as shown:
                ref = await pull_with_progress(images.cri, name, credentials, shown)
        except asyncio.CancelledError:
            print(f"{PROGRAM}: stopped; the next pull continues with what was received", file=sys.stderr)
            raise
        response = await images.cri.images.image_status(pb.ImageSpec(image=name.for_runtime))
        size = f", {format_size(response.image.size)}" if response.HasField("image") else ""
        print(f"Pulled {name.for_runtime} ({ref}{size})")
        return 0

    return run_on_images(PROGRAM, selection, work)


def node_credentials(root_dir: Path, name: ImageName) -> list[Credentials]:
    """Return the node's credentials for a repository, the best first."""
    home = None
    with suppress(RuntimeError):
        home = Path.home()
    found = NodeCredentials(root_dir, root_dir, home).read()
    return Keyring(found).lookup(name.repository)


async def pull_with_progress(
    cri: RuntimeConnection, name: ImageName, credentials: Sequence[Credentials], shown: Display
) -> str:
    """Pull an image, and return the runtime's reference. Raises PullFailed."""
    is_containerd = cri.version.runtime_name == "containerd"
    source = ContainerdProgress(ContainerdStore(cri.image_channel)) if is_containerd else None
    async with TaskScope() as tasks:
        tracker = PullTracker(source, tasks, interval=_POLL_SECONDS)
        with tracker.track(name.original):
            tasks.start(_show(tracker, name.original, shown), name="progress")
            result = await _try_each(cri, name, credentials)
    # Raised here: the task scope would wrap it.
    if isinstance(result, PullFailed):
        raise result
    return result


async def _try_each(
    cri: RuntimeConnection, name: ImageName, credentials: Sequence[Credentials]
) -> str | PullFailed:
    failures, logins = [], [login.for_runtime() for login in credentials]
    for auth in logins or (None,):
        try:
            return await cri.images.pull_image(pb.ImageSpec(image=name.for_runtime), auth)
        except CriError as err:
            failures.append(failure_text(err))
    return PullFailed(f"cannot pull {name.for_runtime}: {join_failures(failures)}")


async def _show(tracker: PullTracker, image: str, shown: Display) -> None:
    """Show the progress until cancelled."""
    while True:
        for pull in tracker.pulls():
            layers = f" ({pull.done_layers} of {pull.total_layers} layers)" if pull.total_layers else ""
            is_received = pull.total_bytes is not None and pull.done_bytes == pull.total_bytes
            step = f"Unpacking {image}" if is_received else f"Pulling {image}"
            shown.update(f"{step}{layers}", pull.done_bytes, pull.total_bytes)
        await asyncio.sleep(_REFRESH_SECONDS)
