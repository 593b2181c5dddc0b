#!/usr/bin/env python3
"""A corpus on a Ray cluster of three nodes on this machine, one of which is lost while it builds.

  python -m venv v && v/bin/pip install ray && PYTHONPATH=python v/bin/python tests/cluster/ray_test.py build/cpu/tools

Twelve documents of a novel, and one that is missing, with the small model in this checkout. Every index must have the
bytes of a build alone, and nothing else may be left. Not part of ctest: it wants Ray.
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


def main() -> int:
    tool = pathlib.Path(sys.argv[1]).resolve() / "sqz-index"
    text = (ROOT / "examples" / "texts" / "dracula.txt").read_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        entries = []
        for i in range(12):
            (folder / f"{i}.txt").write_bytes(text[20000 * i:20000 * (i + 1)])
            entries.append({"key": f"part/{i}", "texts": [f"{i}.txt"]})
        entries.append({"key": "lost", "texts": ["none.txt"]})
        (folder / "corpus.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()

        def lose() -> None:
            time.sleep(6)
            cluster.remove_node(nodes[0], allow_graceful=False)
            print("lost a node", flush=True)

        threading.Thread(target=lose).start()
        start = time.monotonic()
        code = sqz.ray.main(["build", "--address", cluster.address, "--manifest", str(folder / "corpus.jsonl"),
                             "--tool", str(tool), "--model", str(MODEL), "-o", str(folder / "out")])
        print(f"{time.monotonic() - start:.1f} s, exit code {code}", flush=True)
        assert code == 1, "one document is missing"
        subprocess.run([tool, "corpus", "gc", folder / "out", "--manifest", folder / "corpus.jsonl"], check=True)
        found = sorted(str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*") if path.is_file())
        assert found == sorted(f"part/{i}.sqz" for i in range(12)), found
        for i in range(12):
            alone = folder / "alone.sqz"
            subprocess.run([tool, "build", "--model", MODEL, folder / f"{i}.txt", "-o", alone, "--force", "-q"],
                           check=True, stdout=subprocess.DEVNULL)
            assert alone.read_bytes() == (folder / "out" / "part" / f"{i}.sqz").read_bytes(), i
        print("twelve indexes, each as if built alone; nothing else is left")
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
