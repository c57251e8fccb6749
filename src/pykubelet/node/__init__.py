"""The Node object: its registration, status and lease. Start reading at `reporter.py`.

- `reporter.py`: registers the node and runs the loops below; entry point of the package.
- `registration.py`: creates or reconciles the Node object; startup latency metrics.
- `status_loop.py`: patches the node status; records node events.
- `status_inputs.py`: collects the inputs of the status (`NodeSources`); sends the pod CIDR to the runtime.
- `status.py`: computes the desired status, capacity, images and features, and the patch.
- `conditions.py`: computes the node conditions; caches the health of the runtime.
- `addresses.py`: node addresses, and host IPs for the status of pods.
- `lease.py`: renews the Lease in `kube-node-lease`.
- `informer.py`: watches the node's own Node object.
- `settings.py`: node settings from flags and configuration.
"""
