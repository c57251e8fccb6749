"""Pod status: computed from the runtime, merged with that of the API server, and reported."""
