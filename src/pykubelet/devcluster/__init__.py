"""A real control plane on this machine: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

For people (`pykubelet dev cluster up`) and for the tests, and the same for both: TLS everywhere,
Node and RBAC authorization, service accounts, bootstrap tokens, certificate signing; nothing relaxed
that a real cluster has. Nothing in the agent imports it.
"""
