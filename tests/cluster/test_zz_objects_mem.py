import asyncio, time, gc
import uvloop, yaml
from pykubelet.kube import kubeconfig
from pykubelet.kube.client import ApiClient
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.transport import Transport
from pykubelet.kube.resources import SERVICES
from tests.cluster.test_pod_objects import (
    created,
    config_map,
    eventually,
    ClusterObjects,
    TaskScope,
    node_name,
)


def pss():
    gc.collect()
    return int([l for l in open("/proc/self/smaps_rollup") if l.startswith("Pss:")][0].split()[1])


def test_mem(plane, namespace, node_name):
    for n in range(50):
        plane.create(config_map(namespace, f"c{n}", data={"a": "1"}))
    pod = created(plane, namespace, node_name, *[{"configMap": {"name": f"c{n}"}} for n in range(50)])

    async def main():
        access = kubeconfig.load(
            plane.node_kubeconfig(node_name), lambda path: dict(yaml.safe_load(path.read_text()))
        )
        async with Transport(access) as transport, TaskScope() as scope:
            client = ApiClient(transport, TokenBucket(50, 100))
            objects = ClusterObjects(client, scope)
            await client.get(SERVICES, "kubernetes", "default")
            before = pss()
            cpu = time.process_time()
            t = time.time()
            objects.register(pod)
            for n in range(50):
                await eventually(lambda: objects.config_map(pod, f"c{n}"))
            took = time.time() - t
            await asyncio.sleep(2)
            print(
                "\nPSS per watch KB",
                (pss() - before) / 50,
                "cpu ms per watch",
                (time.process_time() - cpu) / 50 * 1000,
                "took",
                took,
                objects._config_maps.watches,
            )
            await asyncio.sleep(40)
            print("\nPSS later", (pss() - before) / 50)

    uvloop.run(main())
