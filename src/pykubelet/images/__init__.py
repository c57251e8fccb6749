"""Images on the node: pulling them, with which credentials, and how often."""
