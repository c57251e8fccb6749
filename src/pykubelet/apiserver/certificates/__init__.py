"""Package apiserver.certificates."""
