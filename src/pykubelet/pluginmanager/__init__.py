"""Plugins of the node: their registration through sockets, and the calls to them."""
