"""HTTP servers of the kubelet: the API (port 10250), read-only port, health port and control socket.

- `api.py`: routes of the API and its HTTPS server; start reading here.
- `pipeline.py`: middlewares of each request: metrics, path validation, authentication, authorization.
- `auth/`: authenticator and authorizer.
- `tls.py`: TLS settings, serving certificate, verification of client certificates.
- `connections.py`, `listeners.py`, `http2/`: limits on connections and request heads; sockets; HTTP/2.
- `lookup.py`, `pods.py`: pod and container lookup; response documents.
- `logs/`: `/containerLogs` and `/logs/`; `streams/`: `/exec`, `/attach`, `/portForward`, `/run`.
- `stats.py`: `/stats/summary`; `metrics/`: the paths below `/metrics`; `cadvisor_api/`: cAdvisor's API.
- `debug.py`: `/debug/`, `/flagz`, `/statusz`, `/configz`.
- `manifests.py`, `images.py`, `node_routes.py`: `/manifests/`, and the routes of the control socket.
- `readonly.py`: `/pods` and `/spec/` of the read-only port; `/healthz`. `page/`: the page on 4194.
"""
