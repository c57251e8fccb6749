"""The admin's line to the API server: a request, an answer. Blocking, and a new connection each time.

For starting a cluster and for tests, where being plain counts; nodes have `pykubelet.kube`.
"""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from pykubelet.devcluster.identities import LOOPBACK
from pykubelet.devcluster.layout import Layout, Settings

UNREACHABLE = (OSError, http.client.HTTPException)
"""What a request raises when there is no API server to answer it."""


class ApiRefusal(Exception):
    """The API server answered, and the answer is no."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """The HTTP status."""


class Api:
    """Requests to one API server, as whom the certificate says."""

    def __init__(self, port: int, authority: Path, certificate: Path, key: Path) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(certificate, key)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        timeout: float = 10,
    ) -> Any:
        """Give the answer, a document or text; raises ApiRefusal, or one of UNREACHABLE."""
        connection = http.client.HTTPSConnection(LOOPBACK, self._port, timeout=timeout, context=self._context)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": content_type} if data else {})
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        told = json.loads(raw) if is_json else raw.decode(errors="replace")
        if answer.status >= http.client.BAD_REQUEST:
            message = told.get("message", "") if isinstance(told, dict) else told
            raise ApiRefusal(answer.status, message)
        return told

    def ready(self) -> bool:
        """Whether the API server says that it is ready."""
        try:
            return bool(self.request("GET", "/readyz", timeout=5) == "ok")
        except (*UNREACHABLE, ApiRefusal):
            return False


def admin_api(layout: Layout, settings: Settings) -> Api:
    """The admin's line to a cluster; raises OSError when its certificates are not there."""
    return Api(settings.port, layout.authority, layout.certificate("admin"), layout.key("admin"))
