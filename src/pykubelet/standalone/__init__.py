"""Private container runtime of `pykubelet up`: its files, its supervision and its removal.

    instance = Instance.at(Path("/var/lib/pykubelet"))
    async with PrivateRuntime(instance) as runtime:
        ...                                  # a kubelet that uses runtime.endpoint
    leftovers = await down(instance, print)

- `instance`: paths and names that follow from the data directory, and the errors of this package.
- `data_dir`: ownership marker, lock and state of a data directory, and the registry of all of the host.
- `requirements`: required executables and features of the host.
- `containerd_config`: configuration of containerd and of the pod network, and the choices of the first start.
- `seed_images`: images that need no registry.
- `daemon`: one containerd process; `runtime`: its supervision, and the iptables rule that protects loopback.
- `teardown`: search for and removal of everything that belongs to a data directory.
- `__main__`: a private runtime without a kubelet.

Nothing is imported here, so that a module that needs only a path does not load gRPC.
"""
