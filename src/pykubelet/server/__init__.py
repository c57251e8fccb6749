"""HTTP servers of the kubelet: the API (port 10250), read-only port, health port and control socket.

- `api.py`: routes of the API and its HTTPS server; start reading here.
- `pipeline.py`: middlewares of each request: metrics, path validation, authentication, authorization.
- `auth.py`, `identity.py`, `reviews.py`: authenticator and authorizer; users and attributes; TokenReviews
  and SubjectAccessReviews with their cache.
- `tls.py`: TLS settings, serving certificate, verification of client certificates.
- `connections.py`, `listeners.py`, `http2/`: limits on connections and request heads; sockets; HTTP/2.
- `lookup.py`, `pods.py`: pod and container lookup; response documents.
- `container_logs.py`, `log_files.py`: `/containerLogs`; reader of CRI log files.
- `streaming.py`, `container_actions.py`: `/exec`, `/attach`, `/portForward`; `/run`, `/checkpoint`,
  `/runningpods`.
- `node_logs.py`, `debug.py`, `metrics.py`: `/logs/`; `/debug/`, `/flagz`, `/statusz`, `/configz`; `/metrics`.
- `manifests.py`: `/manifests/`, and the routes of the control socket.
- `readonly.py`: `/pods` and `/spec/` of the read-only port; `/healthz`.
"""
