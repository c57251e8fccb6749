"""Container probes: startup, readiness and liveness.

`Prober` is the entry point.

- `prober.py`: probe workers, their schedule, and the `Prober`.
- `runner.py`: one probe of any type with its retries, and exec probes.
- `network_probes.py`: HTTP and TCP probes, and the HTTP client of lifecycle hooks; `exchanges.py`: their
  connections to IP addresses without TLS; `grpc_probe.py`: gRPC probes.
- `custom.py`: probes by third-party code, selected by an annotation.
- `results.py`: results manager, thresholds, and the `started` and `ready` fields of the status.
- `types.py`: types and helpers of all modules; `metrics.py`: metrics.
"""
