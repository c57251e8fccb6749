"""API objects that pods of the node use, and their caches.

Modules:

    base.py             PodObjects interface, errors, single GET, retry while the node authorizer lags behind
    references.py       names and kinds of the API objects that a pod refers to
    cluster_objects.py  PodObjects of a cluster node: configMaps, secrets, tokens, trust bundles
    cache_based.py      configMaps and secrets by strategy Cache or Get
    watch_based.py      configMaps and secrets by strategy Watch; LazyInformer
    tokens.py           service account tokens and their cache
    trust_bundles.py    ClusterTrustBundles
    services.py         Service informer and the service environment variables
    runtime_classes.py  RuntimeClass handlers
"""
