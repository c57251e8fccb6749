"""Health of containers: startup, readiness and liveness probes.

`Prober` is the room's door. Read `kinds.py` for the words, `timing.py` and `threshold.py` for the
rules, `prober.py` for how they come together.
"""
