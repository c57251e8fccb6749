"""The Node object: its registration, status and lease; node shutdown. Start reading at `reporter.py`.

- `reporter.py`: registers the node and runs the loops below; entry point of the package.
- `registration.py`: creates or reconciles the Node object; startup latency metrics.
- `status_loop.py`: patches the node status; records node events.
- `status_inputs.py`: collects the inputs of the status (`NodeSources`); sends the pod CIDR to the runtime.
- `status.py`: computes the desired status, capacity, images and features, and the patch.
- `conditions.py`: computes the node conditions; caches the health of the runtime.
- `addresses.py`: node addresses, and host IPs for the status of pods.
- `lease.py`: renews the Lease in `kube-node-lease`.
- `informer.py`: watches the node's own Node object.
- `shutdown_manager.py`: logind's inhibitor and the drain before a node shutdown.
- `shutdown_drain.py`: termination of all pods in groups.
- `shutdown_groups.py`: groups, periods and statuses of a node shutdown, pure.
- `shutdown_state.py`: shutdown flag, state file and final statuses on disk; rejection of pods.
- `settings.py`: node settings from flags and configuration.
"""
