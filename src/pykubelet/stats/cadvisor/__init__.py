"""Metrics of `/metrics/cadvisor`, with cAdvisor's names and labels.

- `metrics`: the text, whole or in the lean profile; `page`: the records that it reports, at one time.
- `families`: families of cgroups; `devices`: those of file systems, devices, interfaces and the host.
"""
