"""The private container runtime that `pykubelet up` owns: its files, its supervision and its removal."""
