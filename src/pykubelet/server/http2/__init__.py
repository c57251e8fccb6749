"""Package server.http2."""
