"""Debian's Prometheus, scraping one kubelet with the job settings of kube-prometheus."""

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.support.plane import Plane
from tests.support.ports import held_port

T = TypeVar("T")

PROGRAM = "prometheus"
JOB = "kubelet"
PATHS = ("/metrics", "/metrics/cadvisor", "/metrics/probes", "/metrics/resource", "/metrics/slis")
INTERVAL_SECONDS = 3
_ACCOUNT = {"name": "prometheus-k8s", "namespace": "kube-system"}
_RBAC = "rbac.authorization.k8s.io"
_POLL_SECONDS, _READY_SECONDS = 0.2, 60.0


class Prometheus:
    """A running Prometheus."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process, self._port, self._log = process, port, log

    def get(self, path: str, **query: str) -> Any:
        """Return the data of a response of its API."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the vector that an expression has now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def wait(self, what: str, look: Callable[[], T | None], seconds: float = _READY_SECONDS) -> T:
        """Return the first true result of `look`; raises AssertionError with the end of the log."""
        deadline = time.monotonic() + seconds
        last: object = None
        while True:
            try:
                if found := look():
                    return found
                last = found
            except OSError as err:
                last = err
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                tail = "\n".join(self.log_lines()[-5:])
                raise AssertionError(f"{what}: not within {seconds:g} s: {last!r}\n{tail}")
            time.sleep(_POLL_SECONDS)

    def log_lines(self) -> list[str]:
        """Return the lines of its log."""
        return self._log.read_text(errors="replace").splitlines()


def scrape_token(plane: Plane) -> str:
    """Return the token of a service account with kube-prometheus's permissions."""
    plane.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _ACCOUNT})
    rules: list[dict[str, list[str]]] = [
        {"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]},
        {"nonResourceURLs": ["/metrics", "/metrics/slis"], "verbs": ["get"]},
    ]
    name = {"name": _ACCOUNT["name"]}
    plane.apply({"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": name, "rules": rules})
    plane.apply(
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": name,
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", **name},
            "subjects": [{"kind": "ServiceAccount", **_ACCOUNT}],
        }
    )
    path = f"{plane.place('serviceaccount', _ACCOUNT['namespace'])}/{_ACCOUNT['name']}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(plane.request("POST", path, request)["status"]["token"])


def scrape_config(target: str, node: str, token: Path) -> dict[str, Any]:
    """Return a configuration that scrapes all paths of a kubelet as kube-prometheus does."""
    jobs = [
        {
            "job_name": f"{JOB}{path}",
            "scheme": "https",
            "metrics_path": path,
            "honor_labels": True,
            "scrape_interval": f"{INTERVAL_SECONDS}s",
            "authorization": {"credentials_file": str(token)},
            "tls_config": {"insecure_skip_verify": True},
            "static_configs": [{"targets": [target], "labels": {"node": node}}],
            "relabel_configs": [
                {"source_labels": ["__metrics_path__"], "target_label": "metrics_path"},
                {"target_label": "job", "replacement": JOB},
            ],
        }
        for path in PATHS
    ]
    return {"global": {"scrape_timeout": f"{INTERVAL_SECONDS}s"}, "scrape_configs": jobs}


@contextmanager
def running_prometheus(directory: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Run Prometheus for the time of a block; it starts when every target was scraped."""
    path, log = directory / "prometheus.yaml", directory / "prometheus.log"
    path.write_text(yaml.safe_dump(config))
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with held_port() as port:
        command = [
            *("setpriv", "--pdeathsig", "KILL", "--", PROGRAM),
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=directory, env=env
            )
        try:
            yield Prometheus(process, port, log)
        finally:
            process.kill()
            process.wait()
