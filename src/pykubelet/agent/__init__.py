"""Composition of the kubelet: every part is built from the configuration here, then started."""
