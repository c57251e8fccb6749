"""API server access: REST client, credentials, reflectors, event recorder and the node's certificates.

Modules:

    rest_config.py      kubeconfig parsing; the result is a RestConfig, one cluster and one user
    credentials.py      tokens, client certificates and exec plugins; reload while the kubelet runs
    tls.py              TLS contexts, TLS error descriptions, reloading of certificate and token files
    proxy.py            proxy selection from kubeconfig and environment, SOCKS5 connector
    connection_pool.py  HTTP/1.1 connections for writes, concurrency limiter, shared DNS resolver
    transport.py        connections per certificate, mapping of network failures to KubeError, clock check
    client.py           Resource descriptors, RestClient (rate limit, retries), typed ApiClient, client set
    errors.py           exception hierarchy and the API's Status object
    metrics.py          rest_client_* metrics
    reflector.py        list and watch into a local Store
    events.py           event recorder and correlator
    certificates/       certificate signing requests, bootstrap, rotation, serving certificate, storage
"""
