"""The proxy between the agent and the API server, if there is one.

A kubeconfig may name it (`proxy-url`); otherwise the environment does, read as all of Kubernetes
reads it: `HTTPS_PROXY` or `HTTP_PROXY` by the server's scheme, and `NO_PROXY` with names, suffixes,
addresses and networks, which Python's own reading of it lacks. A proxy is asked over HTTP, over TLS
(trusted as the API server is, as in all of Kubernetes), or in SOCKS5 (`proxy_socks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pykubelet.api.ip import parse_cidr, parse_ip

_PORTS = {"https": 443, "http": 80}
_SOCKS = ("socks5", "socks5h")
_SCHEMES = ("http", "https", *_SOCKS)


def proxy_problem(url: str) -> str | None:
    """Say what is wrong with a proxy's URL; None when it can be used. The URL itself is not shown."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good, parts = False, urlsplit("")
    if not good or parts.scheme not in _SCHEMES:
        return (
            "is not the URL of a proxy: write one such as http://proxy.example.com:3128, "
            "or with https:// or socks5://"
        )
    return None


def is_socks(url: str) -> bool:
    """Whether this is the URL of a SOCKS proxy; names are the proxy's to resolve with both schemes."""
    return urlsplit(url).scheme in _SOCKS


def proxy_from_environment(server: str, environ: Mapping[str, str]) -> str:
    """Give the URL of the proxy that the environment wants for this server, or an empty text."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    name = f"{parts.scheme}_proxy"
    proxy = environ.get(name.upper()) or environ.get(name) or ""
    exempt = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    if not proxy or _is_exempt(host, parts.port or _PORTS[parts.scheme], exempt):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_exempt(host: str, port: int, exempt: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = parse_ip(host)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
        return True
    for entry in filter(None, (part.strip().lower() for part in exempt.split(","))):
        if entry == "*":
            return True
        try:
            if "/" in entry:
                if address is not None and address in parse_cidr(entry):
                    return True
                continue
        except ValueError:
            continue
        name, entry_port = _split_port(entry)
        if entry_port is not None and entry_port != port:
            continue
        if address is not None:
            try:
                if parse_ip(name) == address:
                    return True
            except ValueError:
                pass
        elif _name_matches(host.lower(), name):
            return True
    return False


def _name_matches(host: str, entry: str) -> bool:
    """`example.com` means itself and what is below it, `.example.com` only what is below it."""
    if entry.startswith("*."):
        entry = entry[1:]
    if entry.startswith("."):
        return host.endswith(entry)
    return host == entry or host.endswith(f".{entry}")


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        name, _, rest = entry[1:].partition("]")
        port = rest.removeprefix(":")
    elif entry.count(":") == 1:
        name, _, port = entry.partition(":")
    else:
        name, port = entry, ""
    return name, int(port) if port.isascii() and port.isdigit() else None
