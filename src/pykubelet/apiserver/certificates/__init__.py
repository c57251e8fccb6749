"""Certificates of the node: keys, signing requests, the first certificate, rotation and storage."""
