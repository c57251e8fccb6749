"""In-place resize of pods: desired, allocated and actuated resources.

Modules:

    allocation_manager  decides about resizes, tracks their progress, and applies them in a pod's sync
    feasibility         pure rules: feasibility, order of retries, event texts; metrics
    conditions          the conditions PodResizePending and PodResizeInProgress
"""
