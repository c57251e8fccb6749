"""Names of TLS versions, cipher suites and key exchanges, and whether the TLS fields fit together."""

from __future__ import annotations

from collections.abc import Iterator

from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_rules import Gates, check, one_of

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
"""Accepted, because old clients need them; whoever serves TLS should warn."""

CURVES = {
    23: "P-256",
    24: "P-384",
    25: "P-521",
    29: "X25519",
    4587: "SecP256r1MLKEM768",
    4588: "X25519MLKEM768",
    4589: "SecP384r1MLKEM1024",
}
"""Key exchanges by their number in IANA's registry."""


def problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Check all fields about TLS."""
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
