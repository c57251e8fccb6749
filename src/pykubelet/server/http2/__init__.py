"""HTTP/2 of the API on port 10250."""
