"""Workloads in manifests of a standalone node: Deployment, DaemonSet, StatefulSet, Job, CronJob and claims.

    kinds       decodes a document, and reports what is ignored and what cannot work on one node
    templates   pods of a workload, with names, labels and owner references
    schedule    cron schedules
    job         the next state of a Job, from its record and the phases of its pods
    cron_job    the same for a CronJob and its Jobs
    records     one file per Job and CronJob below the kubelet's root directory
    controller  offers the pods of Jobs and CronJobs together with the other pods of the file source
    claims      persistent volume claims of the manifests

The pods of the first three kinds depend on the manifest only. A Job's pods also depend on its record, which
is written before a pod is offered and survives kubelet restarts.
"""
