"""Local Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

It serves `pykubelet dev cluster up` and the tests with the same setup: TLS everywhere, Node and RBAC
authorization, service accounts, bootstrap tokens, certificate signing; nothing is relaxed compared with a
real cluster. The kubelet does not import this package.

- `lifecycle`: `up`, `down` and `status` of a cluster in a directory.
- `cluster`: command lines, processes and readiness of a control plane.
- `layout`: files and settings of a control plane, and the errors of this package.
- `identities`: certificates, keys and kubeconfigs.
- `admin_client`: API client of the administrator, and the bootstrap objects of a new cluster.
- `binaries`: lookup and build of the executables.
- `reference_kubelet`: cleanup after an upstream kubelet that tests run for comparison.
"""
