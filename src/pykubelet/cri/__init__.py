"""Client of the container runtime interface (CRI).

    async with await connect("unix:///run/containerd/containerd.sock", timeout=two_minutes, metrics=m) as cri:
        sandbox = await cri.runtime.run_pod_sandbox(config)

- `runtime.proto`: CRI; `events*.proto`, `tasks.proto`: containerd's event and task services.
- `channel.py`: one connection; every call is measured and logged, and fails with a CriError.
- `client.py`: RuntimeService and ImageService as typed methods with deadlines, and response validation.
- `connect.py`: handshake with a runtime, and diagnosis of its socket.
- `containerd.py`: containerd's event stream, for runtimes without CRI container events, and task deletion.

Nothing is imported here, so that each importer loads only what it needs.

pykubelet does not use grpcio, but other code in the process may load it. It reads its settings from the
environment when it is first loaded, so they are set here; a value set by the operator has precedence.
"""

import os

# The kubelet starts many processes; fork handlers would stop grpcio's threads each time, and no forked
# child uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Failures are reported as errors of calls; the library's own lines would break the log format.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
