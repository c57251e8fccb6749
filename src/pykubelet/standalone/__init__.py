"""The private container runtime that `pykubelet up` owns: its files, its supervision and its removal.

    instance = Instance.at(Path("/var/lib/pykubelet"))
    async with PrivateRuntime(instance) as runtime:
        ...                                  # an agent that uses runtime.endpoint
    leftovers = await down(instance, print)

- `instance.py`: the one data directory, and every path and name that follows from it.
- `claim.py`: making the directory ours, and never touching one that is not.
- `lock.py`: one agent (or one `down`) per directory.
- `needs.py`: the programs and what this machine can do.
- `state.py`, `registry.py`: what was there before us; who else of us is on this machine.
- `prepare.py`: the choices of the first start, and what is written at every start.
- `containerd_config.py`, `pod_network.py`: the two configurations.
- `oci.py`, `seed_images.py`: the images that need no registry.
- `daemon.py`: one containerd process; `runtime.py`: keeping one alive.
- `leftovers.py`, `teardown.py`: what is there of ours, and taking it all away.

Nothing is imported here: asking for a path must not cost the memory of gRPC.
"""
