"""gRPC client and server over a common HTTP/2 frame layer, and HTTP/1.1 responses.

- `endpoint.py`: parsing of runtime endpoints (`unix:///path`).
- `errors.py`: exceptions of failed calls, by gRPC status code.
- `http1.py`: incremental HTTP/1.1 response parser.
- `http2.py`: HTTP/2 frames, headers, and validation of what peers send.
- `grpc_connection.py`: client connection, and gRPC status codes.
- `grpc_server.py`: server on a Unix socket.
"""
