"""Validation of the fields on servers and clients: ports, authorization, logs, tracing, URLs and TLS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.duration import Duration
from pykubelet.api.ip import parse_cidr, parse_ip
from pykubelet.api.names import dns_subdomain_problem
from pykubelet.api.quantity import Quantity
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate_rules import (
    Gates,
    between,
    check,
    one_of,
    positive,
    readable,
    unless_empty,
)
from pykubelet.transport.endpoint import Endpoint
from pykubelet.util.text import quoted


def serving_problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Yield the problems of the fields on servers, clients and logs."""
    yield from check(_RULES, config)
    yield from _logging(config, gates)
    yield from _tracing(config)
    yield from _headers(config.static_pod_url_header)
    if config.enable_system_log_query and not config.enable_system_log_handler:
        yield Problem("enableSystemLogQuery", "needs enableSystemLogHandler to be true")
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    previous = f"{major}.{int(minor) - 1}"
    if config.show_hidden_metrics_for_version not in ("", previous):
        yield Problem("showHiddenMetricsForVersion", f'must be empty or "{previous}", the previous release')


def _bind_address(text: str) -> None:
    if dns_subdomain_problem(text) or not re.search("[a-z]", text):
        parse_ip(text)


def _networks(text: str) -> None:
    for network in text.split(","):
        parse_cidr(network.strip())


def _web_address(text: str) -> None:
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good or re.search(r"\s", text):
        # The URL is not shown, because it may contain a password.
        raise ValueError("is not a web address: write one such as https://example.com/pods")


def _provider(text: str) -> None:
    if not text.isprintable() or " " in text:
        raise ValueError(f"{quoted(text)} is not a provider id: write one such as aws:///zone/instance")


_RULES = (
    between("port", 1, 65535),
    between("read_only_port", 0, 65535),
    between("healthz_port", 0, 65535),
    between("streaming_connection_idle_timeout", Duration(0)),
    between("authentication.webhook.cache_ttl", Duration(0)),
    between("authorization.webhook.cache_authorized_ttl", Duration(0)),
    between("authorization.webhook.cache_unauthorized_ttl", Duration(0)),
    between("event_burst", 0),
    between("event_record_qps", 0),
    between("kube_api_burst", 0),
    between("kube_api_qps", 0),
    between("logging.verbosity", 0, 2**31 - 1),
    positive("logging.flush_frequency"),
    positive("file_check_frequency"),
    positive("http_check_frequency"),
    positive("runtime_request_timeout"),
    one_of("authorization.mode", "AlwaysAllow", "Webhook"),
    one_of("logging.format", "text", "json"),
    one_of("hairpin_mode", "promiscuous-bridge", "hairpin-veth", "none"),
    one_of(
        "content_type",
        "application/vnd.kubernetes.protobuf",
        "application/json",
        "application/yaml",
        "application/cbor",
    ),
    readable("address", parse_ip),
    readable("healthz_bind_address", _bind_address),
    readable("cluster_dns", parse_ip),
    readable("container_runtime_endpoint", Endpoint.parse),
    unless_empty(readable("image_service_endpoint", Endpoint.parse)),
    unless_empty(readable("pod_cidr", _networks)),
    unless_empty(readable("static_pod_url", _web_address)),
    unless_empty(readable("provider_id", _provider)),
)


def _logging(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    logging = config.logging
    if logging.format == "json" and not gates("LoggingBetaOptions"):
        yield Problem("logging.format", "json needs the feature gate LoggingBetaOptions")
    if logging.vmodule and logging.format != "text":
        yield Problem("logging.vmodule", "works only with logging.format: text")
    for index, item in enumerate(logging.vmodule):
        path = key_path("logging.vmodule", index)
        if not item.file_pattern or re.search("[=,]", item.file_pattern):
            yield Problem(f"{path}.filePattern", "must be a file name or pattern without '=' and ','")
        if item.verbosity >= 2**31:
            yield Problem(f"{path}.verbosity", f"must be between 0 and {2**31 - 1}, not {item.verbosity}")
    for name, routing in (("text", logging.options.text), ("json", logging.options.json)):
        path = f"logging.options.{name}"
        if routing.split_stream and not gates("LoggingAlphaOptions"):
            yield Problem(f"{path}.splitStream", "needs the feature gate LoggingAlphaOptions")
        try:
            size = Quantity.parse(routing.info_buffer_size)
        except ValueError as err:
            yield Problem(f"{path}.infoBufferSize", str(err))
        else:
            if size.nanos and not gates("LoggingAlphaOptions"):
                yield Problem(f"{path}.infoBufferSize", "needs the feature gate LoggingAlphaOptions")


def _tracing(config: KubeletConfiguration) -> Iterator[Problem]:
    if config.tracing is None:
        return
    rate, endpoint = config.tracing.sampling_rate_per_million, config.tracing.endpoint
    if rate is not None and not 0 <= rate <= 1_000_000:
        yield Problem("tracing.samplingRatePerMillion", f"must be between 0 and 1000000, not {rate}")
    if endpoint is not None:
        try:
            url = urlsplit(endpoint if "//" in endpoint else f"dns://{endpoint}")
            good = url.scheme in ("dns", "unix", "unix-abstract") and url.port != 0
        except ValueError:
            good = False
        if not good:
            yield Problem(
                "tracing.endpoint",
                f"must be host:port, dns://…, unix://… or unix-abstract://…, not {quoted(endpoint)}",
            )


def _headers(headers: dict[str, list[str]]) -> Iterator[Problem]:
    for name, values in headers.items():
        path = key_path("staticPodURLHeader", name)
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name, re.ASCII):
            yield Problem(path, "is not the name of an HTTP header: use letters, digits and '-'")
        # Values may be credentials and are not shown.
        if any(re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value) for value in values):
            yield Problem(path, "has a value with line breaks or control characters: remove them")


TLS_VERSIONS = ("VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13")
STRONG_CIPHER_SUITES = (
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
)
WEAK_CIPHER_SUITES = (
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
)
"""Accepted, because old clients need them; the server should log a warning."""
CURVES = {
    23: "P-256",
    24: "P-384",
    25: "P-521",
    29: "X25519",
    4587: "SecP256r1MLKEM768",
    4588: "X25519MLKEM768",
    4589: "SecP384r1MLKEM1024",
}
"""Key exchange groups by their number in the IANA registry."""


def tls_problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Yield the problems of the TLS fields."""
    yield from check([one_of("tls_min_version", "", *TLS_VERSIONS)], config)
    if bool(config.tls_cert_file) != bool(config.tls_private_key_file):
        missing = "tlsCertFile" if config.tls_private_key_file else "tlsPrivateKeyFile"
        yield Problem(missing, "is missing: tlsCertFile and tlsPrivateKeyFile go together")
    for index, suite in enumerate(config.tls_cipher_suites):
        if suite not in STRONG_CIPHER_SUITES + WEAK_CIPHER_SUITES:
            known = ", ".join(STRONG_CIPHER_SUITES)
            yield Problem(key_path("tlsCipherSuites", index), f"must be one of {known}, not {quoted(suite)}")
    curves = config.tls_curve_preferences
    for index, curve in enumerate(curves):
        if curve not in CURVES:
            known = ", ".join(f"{number} ({name})" for number, name in CURVES.items())
            yield Problem(key_path("tlsCurvePreferences", index), f"must be one of {known}, not {curve}")
        elif curve in curves[:index]:
            yield Problem(key_path("tlsCurvePreferences", index), f"{curve} is listed twice: list it once")
    if config.server_tls_bootstrap and not gates("RotateKubeletServerCertificate"):
        yield Problem("serverTLSBootstrap", "needs the feature gate RotateKubeletServerCertificate")
