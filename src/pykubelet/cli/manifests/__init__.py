"""Commands for manifests: run and restart."""
