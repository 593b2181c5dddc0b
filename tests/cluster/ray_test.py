#!/usr/bin/env python3
"""A corpus on a Ray cluster of three nodes on this machine, one of which is lost while it builds.

  python -m venv v && v/bin/pip install ray && PYTHONPATH=python v/bin/python tests/cluster/ray_test.py build/cpu/tools

Twelve pieces of a novel, and a document that is missing, under a key that JSON lines must not be cut at. Every index
must have the bytes of a build alone. Not part of ctest: it wants Ray.
"""
import json
import pathlib
import sys
import tempfile
import threading
import time

from corpus import MODEL, Corpus
from ray.cluster_utils import Cluster

import sqz.ray


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus(pathlib.Path(name), sys.argv[1], 12, 20000)
        with corpus.manifest.open("a") as manifest:
            manifest.write(json.dumps({"key": "lost\u2028\u0085", "texts": ["none.txt"]}, ensure_ascii=False) + "\n")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()

        def lose() -> None:
            time.sleep(6)
            cluster.remove_node(nodes[0], allow_graceful=False)
            print("lost a node", flush=True)

        threading.Thread(target=lose).start()
        start = time.monotonic()
        code = sqz.ray.main(["build", "--address", cluster.address, "--manifest", str(corpus.manifest),
                             "--tool", str(corpus.tool), "--model", str(MODEL), "-o", str(corpus.out)])
        print(f"{time.monotonic() - start:.1f} s, exit code {code}", flush=True)
        assert code == 1, "one document is missing"
        corpus.check()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
