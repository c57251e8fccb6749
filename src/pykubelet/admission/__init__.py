"""May this pod run here? A chain of small links, of which the first refusal is the pod's final status."""
