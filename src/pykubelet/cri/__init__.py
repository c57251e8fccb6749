"""The container runtime interface: its protocol and an async client that names what failed.

    async with await connect("unix:///run/containerd/containerd.sock", timeout=two_minutes, metrics=m) as cri:
        sandbox = await cri.runtime.run_pod_sandbox(config)

- `runtime.proto`: the messages; `events*.proto`: containerd's own event service.
- `endpoint.py`: what a runtime's address may look like.
- `probe.py`: why a socket cannot be used, before gRPC hides the reason.
- `channel.py`: one connection; every call measured, logged, and its failure named.
- `runtime.py`, `stats.py`, `images.py`: the services as typed methods with their deadlines (`service.py`).
- `checks.py`: answers that no runtime should give.
- `containerd.py`: containerd's own event stream, for runtimes without container events.
- `connect.py`: the handshake that makes all of these.

Nothing is imported here: reading an endpoint must not cost the memory of gRPC.

The gRPC library reads its settings from the environment when it is first loaded, so they are set
here, which runs before any module of this room; a value that the operator gave wins.
"""

import os

# The agent starts many programs; fork handlers would stop gRPC's threads each time, and we never
# use gRPC in a forked child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Failures reach us as errors of calls; the library's own lines would break the log's format.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
