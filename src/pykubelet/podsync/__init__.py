"""Pod syncer: brings one pod to its desired state, step by step."""
