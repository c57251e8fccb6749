"""What the agent serves and speaks to: ports, TLS, authorization, logs, traces, the static pod URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.ip import parse_cidr, parse_ip
from pykubelet.api.names import dns_subdomain_problem
from pykubelet.api.quantity import Quantity
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_rules import Between, Gates, OneOf, Positive, Readable, Rule, check
from pykubelet.cri.endpoint import Endpoint

TLS_VERSIONS = ("VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13")
TLS_CURVES = {
    23: "P-256",
    24: "P-384",
    25: "P-521",
    29: "X25519",
    4587: "SecP256r1MLKEM768",
    4588: "X25519MLKEM768",
    4589: "SecP384r1MLKEM1024",
}
"""Key exchanges by their number in IANA's registry."""

TLS_CIPHER_SUITES = frozenset(
    f"TLS_{name}"
    for name in """
        AES_128_GCM_SHA256 AES_256_GCM_SHA384 CHACHA20_POLY1305_SHA256
        ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 ECDHE_ECDSA_WITH_AES_256_GCM_SHA384
        ECDHE_RSA_WITH_AES_128_GCM_SHA256 ECDHE_RSA_WITH_AES_256_GCM_SHA384
        ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256 ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
        ECDHE_ECDSA_WITH_CHACHA20_POLY1305 ECDHE_RSA_WITH_CHACHA20_POLY1305
        ECDHE_ECDSA_WITH_AES_128_CBC_SHA ECDHE_ECDSA_WITH_AES_256_CBC_SHA
        ECDHE_RSA_WITH_AES_128_CBC_SHA ECDHE_RSA_WITH_AES_256_CBC_SHA
        ECDHE_ECDSA_WITH_AES_128_CBC_SHA256 ECDHE_RSA_WITH_AES_128_CBC_SHA256
        ECDHE_ECDSA_WITH_RC4_128_SHA ECDHE_RSA_WITH_RC4_128_SHA ECDHE_RSA_WITH_3DES_EDE_CBC_SHA
        RSA_WITH_AES_128_GCM_SHA256 RSA_WITH_AES_256_GCM_SHA384 RSA_WITH_AES_128_CBC_SHA256
        RSA_WITH_AES_128_CBC_SHA RSA_WITH_AES_256_CBC_SHA RSA_WITH_3DES_EDE_CBC_SHA RSA_WITH_RC4_128_SHA
    """.split()
)
"""The suites that can be asked for, the weak ones of the reference's list included."""


def problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Check all fields about serving and speaking."""
    yield from check(_RULES, config)
    yield from _tls(config, gates)
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
    if dns_subdomain_problem(text):
        parse_ip(text)


def _networks(text: str) -> None:
    for network in text.split(","):
        parse_cidr(network.strip())


def _web_address(text: str) -> None:
    try:
        url = urlsplit(text)
        if (
            url.scheme in ("http", "https")
            and url.hostname
            and (url.port or 1)
            and not re.search(r"\s", text)
        ):
            return
    except ValueError:
        pass
    raise ValueError(f"{quoted(text)} is not a web address: write one such as https://example.com/pods")


def _provider(text: str) -> None:
    if not text.isprintable() or " " in text:
        raise ValueError(f"{quoted(text)} is not a provider id: write one such as aws:///zone/instance")


_RULES: tuple[Rule, ...] = (
    Between("port", 1, 65535),
    Between("read_only_port", 0, 65535),
    Between("healthz_port", 0, 65535),
    Between("streaming_connection_idle_timeout", 0),
    Between("authentication.webhook.cache_ttl", 0),
    Between("authorization.webhook.cache_authorized_ttl", 0),
    Between("authorization.webhook.cache_unauthorized_ttl", 0),
    Between("event_burst", 0),
    Between("event_record_qps", 0),
    Between("kube_api_burst", 0),
    Between("kube_api_qps", 0),
    Positive("file_check_frequency"),
    Positive("http_check_frequency"),
    Positive("runtime_request_timeout"),
    Positive("logging.flush_frequency"),
    Between("logging.verbosity", 0, 2**31 - 1),
    OneOf("authorization.mode", ("AlwaysAllow", "Webhook")),
    OneOf(
        "content_type",
        ("application/vnd.kubernetes.protobuf", "application/json", "application/yaml", "application/cbor"),
    ),
    OneOf("tls_min_version", ("", *TLS_VERSIONS)),
    OneOf("hairpin_mode", ("promiscuous-bridge", "hairpin-veth", "none")),
    Readable("address", parse_ip),
    Readable("healthz_bind_address", _bind_address),
    Readable("cluster_dns", parse_ip),
    Readable("pod_cidr", _networks),
    Readable("static_pod_url", _web_address),
    Readable("provider_id", _provider),
    Readable("image_service_endpoint", Endpoint.parse),
)


def _tls(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    if bool(config.tls_cert_file) != bool(config.tls_private_key_file):
        missing = "tlsCertFile" if config.tls_private_key_file else "tlsPrivateKeyFile"
        yield Problem(missing, "is missing: tlsCertFile and tlsPrivateKeyFile go together")
    for index, suite in enumerate(config.tls_cipher_suites):
        if suite not in TLS_CIPHER_SUITES:
            yield Problem(
                f"tlsCipherSuites[{index}]", f"there is no cipher suite {quoted(suite)}: see docs for names"
            )
    curves = config.tls_curve_preferences
    for index, curve in enumerate(curves):
        if curve not in TLS_CURVES:
            known = ", ".join(f"{number} ({name})" for number, name in TLS_CURVES.items())
            yield Problem(f"tlsCurvePreferences[{index}]", f"must be one of {known}, not {curve}")
        elif curve in curves[:index]:
            yield Problem(f"tlsCurvePreferences[{index}]", f"{curve} is listed twice: list it once")
    if config.server_tls_bootstrap and not gates("RotateKubeletServerCertificate"):
        yield Problem("serverTLSBootstrap", "needs the feature gate RotateKubeletServerCertificate")


def _logging(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    logging = config.logging
    if logging.format not in ("text", "json"):
        yield Problem("logging.format", f"must be text or json, not {quoted(logging.format)}")
    if logging.format == "json" and not gates("LoggingBetaOptions"):
        yield Problem("logging.format", "json needs the feature gate LoggingBetaOptions")
    if logging.vmodule and logging.format != "text":
        yield Problem("logging.vmodule", "works only with logging.format: text")
    for index, item in enumerate(logging.vmodule):
        path = f"logging.vmodule[{index}]"
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
            good = url.scheme in ("dns", "unix", "unix-abstract") and (url.port or True)
        except ValueError:
            good = False
        if not good:
            yield Problem(
                "tracing.endpoint",
                f"must be host:port, dns://…, unix://… or unix-abstract://…, not {quoted(endpoint)}",
            )


def _headers(headers: dict[str, list[str]]) -> Iterator[Problem]:
    for name, values in headers.items():
        path = f"staticPodURLHeader[{name}]"
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name, re.ASCII):
            yield Problem(path, "is not the name of an HTTP header: use letters, digits and '-'")
        # Values are often credentials, so they are not shown.
        if any(re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value) for value in values):
            yield Problem(path, "has a value with line breaks or control characters: remove them")
