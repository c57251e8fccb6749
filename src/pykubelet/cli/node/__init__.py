"""Commands for the node: up, down, doctor, config, pressure and dev."""
