"""The API server: kubeconfig, TLS, REST, watches, events, leases."""
