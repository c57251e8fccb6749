"""Topology manager: hints of the resource managers and the NUMA nodes they agree on."""
