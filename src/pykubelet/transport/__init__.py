"""gRPC client and server over one HTTP/2 frame layer, and HTTP/1.1 responses."""
