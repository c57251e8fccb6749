"""Plugin manager: registration of node plugins through sockets, and gRPC calls to them.

Modules:

    registration.py  plugin watcher and registration (`/var/lib/kubelet/plugins_registry`)
    client.py        one gRPC call to a plugin
"""
