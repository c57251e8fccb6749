"""The two programs: `kubelet`, the drop-in, and `pykubelet`, for people."""
