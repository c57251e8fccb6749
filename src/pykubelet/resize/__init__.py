"""In-place resize of pods: desired, allocated and actuated resources."""
