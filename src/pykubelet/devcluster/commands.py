"""The command lines of the four programs: those of kubeadm, on ports and in files of our own."""

from __future__ import annotations

from pykubelet.devcluster.identities import LOOPBACK
from pykubelet.devcluster.layout import ISSUER, POD_CIDR, SERVICE_CIDR, Component, Layout, Settings
from pykubelet.devcluster.programs import Programs

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
# What the control plane asks itself says nothing about nodes.
- level: None
  users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]
  verbs: [get, list, watch]
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
  verbs: [get, list, watch]
- level: Metadata
"""


def command(component: Component, programs: Programs, layout: Layout, settings: Settings) -> list[str]:
    """Give the command that starts a component."""
    match component:
        case Component.ETCD:
            return [str(programs.etcd), *_etcd(layout, settings)]
        case Component.APISERVER:
            return [str(programs.apiserver), *_apiserver(layout, settings)]
        case Component.CONTROLLER_MANAGER:
            return [str(programs.controller_manager), *_controller_manager(layout, settings)]
        case Component.SCHEDULER:
            return [str(programs.scheduler), *_scheduler(layout)]


def mark(component: Component, layout: Layout) -> str:
    """Give the argument by which a process is known to be this cluster's."""
    match component:
        case Component.ETCD:
            return f"--data-dir={layout.etcd_data}"
        case Component.APISERVER:
            return f"--tls-cert-file={layout.certificate('apiserver')}"
        case Component.CONTROLLER_MANAGER:
            return f"--kubeconfig={layout.kubeconfig('controller-manager')}"
        case Component.SCHEDULER:
            return f"--kubeconfig={layout.kubeconfig('scheduler')}"


def _etcd(layout: Layout, settings: Settings) -> list[str]:
    clients = f"https://{LOOPBACK}:{settings.etcd_port}"
    peers = f"https://{LOOPBACK}:{settings.etcd_peer_port}"
    pair, authority = _pair(layout, "etcd"), layout.certificate("etcd-ca")
    return [
        mark(Component.ETCD, layout),
        "--name=dev",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=dev={peers}",
        f"--cert-file={pair[0]}",
        f"--key-file={pair[1]}",
        "--client-cert-auth",
        f"--trusted-ca-file={authority}",
        f"--peer-cert-file={pair[0]}",
        f"--peer-key-file={pair[1]}",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={authority}",
        # One member has nobody to lose an election to; by default it would wait a second for one.
        "--heartbeat-interval=20",
        "--election-timeout=100",
        "--snapshot-count=10000",
        "--auto-compaction-retention=5m",
        "--logger=zap",
        "--log-level=warn",
    ]


def _apiserver(layout: Layout, settings: Settings) -> list[str]:
    etcd, kubelet, proxy = (
        _pair(layout, name)
        for name in ("apiserver-etcd-client", "apiserver-kubelet-client", "front-proxy-client")
    )
    serving = _pair(layout, "apiserver")
    verifying = [f"--kubelet-certificate-authority={layout.authority}"] if settings.verify_kubelets else []
    auditing = (
        [f"--audit-policy-file={layout.audit_policy}", f"--audit-log-path={layout.audit_log}"]
        if settings.audit
        else []
    )
    return [
        mark(Component.APISERVER, layout),
        f"--tls-private-key-file={serving[1]}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.port}",
        "--allow-privileged=true",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--enable-bootstrap-token-auth=true",
        f"--client-ca-file={layout.authority}",
        f"--etcd-servers=https://{LOOPBACK}:{settings.etcd_port}",
        f"--etcd-cafile={layout.certificate('etcd-ca')}",
        f"--etcd-certfile={etcd[0]}",
        f"--etcd-keyfile={etcd[1]}",
        f"--kubelet-client-certificate={kubelet[0]}",
        f"--kubelet-client-key={kubelet[1]}",
        *verifying,
        "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname",
        f"--proxy-client-cert-file={proxy[0]}",
        f"--proxy-client-key-file={proxy[1]}",
        f"--requestheader-client-ca-file={layout.certificate('front-proxy-ca')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={layout.pki / 'sa.pub'}",
        f"--service-account-signing-key-file={layout.key('sa')}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        # Or it would wait a minute for watches to end when it is stopped.
        "--shutdown-watch-termination-grace-period=1s",
        *auditing,
        *settings.api_flags,
    ]


def _controller_manager(layout: Layout, settings: Settings) -> list[str]:
    own = layout.kubeconfig("controller-manager")
    return [
        mark(Component.CONTROLLER_MANAGER, layout),
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--secure-port=0",
        "--leader-elect=false",
        "--controllers=*,bootstrap-signer-controller,token-cleaner-controller",
        "--use-service-account-credentials=true",
        f"--root-ca-file={layout.authority}",
        f"--service-account-private-key-file={layout.key('sa')}",
        f"--cluster-signing-cert-file={layout.authority}",
        f"--cluster-signing-key-file={layout.key('ca')}",
        f"--cluster-signing-duration={settings.signing_duration}",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={POD_CIDR}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--cluster-name=dev",
        # It makes this folder, which is /usr/libexec/kubernetes/… by default.
        f"--flex-volume-plugin-dir={layout.directory / 'volume-plugins'}",
        # With the default of 20 a second it takes five seconds to start its forty controllers.
        "--kube-api-qps=500",
        "--kube-api-burst=500",
    ]


def _scheduler(layout: Layout) -> list[str]:
    own = layout.kubeconfig("scheduler")
    return [
        mark(Component.SCHEDULER, layout),
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--secure-port=0",
        "--leader-elect=false",
    ]


def _pair(layout: Layout, name: str) -> tuple[str, str]:
    return str(layout.certificate(name)), str(layout.key(name))
