"""Volumes of pods: mounted before the containers start, refreshed while they run, unmounted after they end.

Modules:

    manager           PodVolumes, the volume manager that pod workers call
    plugin, registry  the interface of volume plugins, and the plugins by volume type
    plugins, csi      in-tree volume plugins; the CSI plugin and its drivers
    pvc               resolution of claims to persistent volumes
    operations        operations that may take long or hang: one at a time per volume, with back-off
    attach            waiting for the attach/detach controller, and `status.volumesInUse`
    volume_state      volumes of each pod since this process started
    unmounter         teardown of pods' volumes, and release of what pods shared
    paths             layout on disk and bind mounts
    file_projection   volumes whose files the kubelet writes
    mounts            block devices, disks, SELinux labels, sub-paths, and the host binaries for them
    ownership         fsGroup
    usage             usage of volumes (`volumeStatsAggPeriod`)
    metrics           Prometheus metrics of operations; `collector`: of numbers and usage of volumes
    errors            errors, and their texts in events
"""
