"""HTTP/2 server of the API on port 10250.

- `connection.py`: connections, on the `h2` library.
- `stream.py`: one stream as a transport for aiohttp's request handler.
- `frames.py`: frame parser, frame budget, and limit on the time spent on unauthorized clients.
- `headers.py`: conversion of header fields between HTTP/2 and HTTP/1.1.
"""
