"""The container runtime interface: its protocol and an async client that names what failed."""
