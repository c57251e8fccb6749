"""Device manager: device plugins, their devices, and the allocations to containers."""
