"""Health of containers: startup, readiness and liveness probes."""
