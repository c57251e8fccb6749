import time
def test_loop(make_node, plane, namespace):
    node = make_node(env={"PYTHONFAULTHANDLER": "1"}, settings={"clusterDNS": ["10.96.0.10"]})
    for i in range(25):
        node.start()
        node.wait_registered()
        pods = [node.create_pod(namespace) for _ in range(3)]
        for p in pods:
            node.wait_pod_ready(p, 60)
        for p in pods:
            plane.delete("pod", p["metadata"]["name"], namespace, grace=0)
        assert node.process.poll() is None, node.log_tail(100)
        node.kill()
