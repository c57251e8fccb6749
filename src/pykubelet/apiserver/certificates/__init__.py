"""Certificates of the node.

Modules:

    x509.py                   PEM and DER parsing: validity, subject, public key
    key_generation.py         keys, signing requests and self-signed certificates, from a subprocess
    key_generation_worker.py  the subprocess; no other part of the kubelet imports the cryptography library
    store.py                  certificates on disk in upstream's layout; expiry and rotation metrics
    bootstrap.py              certificate signing requests, TLS bootstrap
    rotation.py               renewal before expiry; client certificate rotation
    serving.py                serving certificate: requested, configured files, or self-signed
"""
