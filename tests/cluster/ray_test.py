#!/usr/bin/env python3
"""A corpus on a Ray cluster of three nodes on this machine, one of which is lost while it builds.

  python -m venv v && v/bin/pip install ray && PYTHONPATH=python v/bin/python tests/cluster/ray_test.py build/cpu/tools

Twelve pieces of a novel, and a document that is missing, under a key that JSON lines must not be cut at. Every index
must have the bytes of a build alone. Not part of ctest: it wants Ray.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

from ray.cluster_utils import Cluster

import sqz.ray

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "nano"
COUNT, SIZE = 12, 20000


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
    text = (ROOT / "examples" / "texts" / "dracula.txt").read_bytes()
    lines = [{"key": "lost\u2028\u0085", "texts": ["none.txt"]}]
    for i in range(COUNT):
        (folder / f"{i}.txt").write_bytes(text[SIZE * i:SIZE * (i + 1)])
        lines.append({"key": f"part/{i}", "texts": [f"{i}.txt"]})
    manifest = folder / "corpus.jsonl"
    manifest.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return manifest


def main() -> int:
    tool = pathlib.Path(sys.argv[1]).resolve() / "sqz-index"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        manifest = write_corpus(folder)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()

        def lose() -> None:
            time.sleep(6)
            cluster.remove_node(nodes[0], allow_graceful=False)
            print("lost a node", flush=True)

        threading.Thread(target=lose).start()
        code = sqz.ray.main(["build", "--address", cluster.address, "--manifest", str(manifest), "--tool", str(tool),
                             "--model", str(MODEL), "-o", str(folder / "out")])
        assert code == 1, f"exit code {code}, expected 1: one document is missing"
        found = sorted(str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*.sqz"))
        assert found == sorted(f"part/{i}.sqz" for i in range(COUNT)), found
        for i in range(COUNT):
            alone = folder / "alone.sqz"
            subprocess.run([tool, "build", "--model", MODEL, folder / f"{i}.txt", "-o", alone, "--force", "-q"],
                           check=True, stdout=subprocess.DEVNULL)
            assert alone.read_bytes() == (folder / "out" / "part" / f"{i}.sqz").read_bytes(), i
        print(f"{COUNT} indexes, each as if built alone")
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
