"""The API server: who it is, how it is asked, and what the agent mirrors of it and tells it.

From the kubeconfig to an answer:

    kubeconfig.py     a file becomes an `Access`: one server, one user (access.py), perhaps a proxy
    kubeconfig_watch.py       the file is replaced while the agent runs
    credentials.py    tokens and certificates as they are now: files, plugins (exec_plugin.py), TLS (tls.py)
    transport.py      connections, kept and watched, perhaps through a proxy; failures in words (reaching.py)
    kept.py           the connections for writing, without the HTTP library
    calls.py          one request: its turn (rate.py, turns.py), its retries, its refusal (errors.py)
    client.py         typed verbs on resources (resources.py); the agent's three are in clients.py

and what is built on it:

    reflector.py      a copy of some objects, kept up to date (watch_stream.py, object_copy.py)
    event_recorder.py events, told without waiting; what is told is decided in events.py
    leases.py         the node's sign of life; tokens.py the tokens of service accounts

and the node's own certificates, whose keys are made in a process of their own (certificate_making.py):

    csr.py            one certificate, requested and waited for
    certificate_store.py      where they are kept, as the reference keeps them
    bootstrap.py      the first one, with bootstrap credentials, and the kubeconfig that goes with it
    rotation.py       a new one in time; rotation_client.py for the client's
    certificate_serving.py    the server's: requested, given in files, or self-signed
"""
