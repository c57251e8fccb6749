"""Objects of the API server that pods refer to: configMaps, secrets, tokens, services, runtime classes."""
