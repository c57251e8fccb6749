import json, subprocess
from tests.cluster.test_golden import STATIC_WEB, _create, IMAGE, fresh_namespace, recorded
from pathlib import Path
def test_loop(make_node, plane, runtime):
    ctr = ["ctr", "--address", str(runtime.instance.socket), "--namespace", "k8s.io", "images", "tag"]
    subprocess.run([*ctr, runtime.busybox_image, IMAGE], check=True, capture_output=True)
    socket = runtime.instance.data_dir / "proxy.sock"
    with recorded(runtime.endpoint, socket) as recording, fresh_namespace(plane, "scn-given-basic") as ns:
        node = make_node(name="vm", settings={"clusterDNS": ["10.96.0.10"], "containerRuntimeEndpoint": f"unix://{socket}"})
        for i in range(20):
            node.start()
            node.wait_registered()
            node.write(STATIC_WEB)
            pods = _create(node, "basic", Path("/srv/hostdir"))
            for p in pods:
                node.wait_pod_ready(p, 60)
            for p in pods:
                plane.delete("pod", p["metadata"]["name"], ns, grace=0)
            for p in node.manifests.iterdir(): p.unlink()
            assert node.process.poll() is None, node.log_tail(100)
            node.wait("no", lambda: not node.truth.running(), 60)
            node.kill()
