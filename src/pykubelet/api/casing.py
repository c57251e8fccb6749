"""How Python's field names become Kubernetes' JSON names.

Structs in this code base are written in snake_case; on the wire Kubernetes uses
camelCase with its own habit of writing acronyms in capitals (`clusterDNS`, `podIPs`).
One rule here, instead of a rename per field, keeps the structs readable.
"""

_WORDS = {
    "api": "API",
    "ca": "CA",
    "cfs": "CFS",
    "cidr": "CIDR",
    "cidrs": "CIDRs",
    "cpus": "CPUs",
    "dns": "DNS",
    "fqdn": "FQDN",
    "gc": "GC",
    "gid": "GID",
    "id": "ID",
    "ip": "IP",
    "ipc": "IPC",
    "ips": "IPs",
    "iptables": "IPTables",
    "oom": "OOM",
    "os": "OS",
    "pid": "PID",
    "qos": "QOS",
    "qps": "QPS",
    "tls": "TLS",
    "ttl": "TTL",
    "uid": "UID",
    "uri": "URI",
    "url": "URL",
    "uuid": "UUID",
}


def wire_name(field: str) -> str:
    """Give the JSON name of a struct field: `cluster_dns` is `clusterDNS`.

    A trailing underscore, which keeps a field off Python's keywords, is dropped.
    """
    first, *rest = field.rstrip("_").split("_")
    return first + "".join(_WORDS.get(word, word[:1].upper() + word[1:]) for word in rest)
