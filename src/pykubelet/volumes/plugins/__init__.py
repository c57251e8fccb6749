"""Volume plugins, one file each."""
