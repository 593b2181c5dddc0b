#!/usr/bin/env python3
"""A corpus in an object store: moto's S3 server and Ray on this machine.

  tests/cluster/s3_test.py build/cpu/tools

Installs numpy, ray, s3fs and moto[server] into a virtual environment of its own if they are not there. Six documents of
a novel and one that is missing: built, built again (all there, nothing uploaded), an index of other options refused, an
index that another worker publishes first kept. Not part of ctest.
"""
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import venv

from corpus import MODEL, ROOT, Corpus


def ensure_packages() -> None:
    """Runs this script again in an environment that has them."""
    if all(importlib.util.find_spec(name) for name in ("numpy", "ray", "s3fs", "moto")):
        return
    folder = pathlib.Path(tempfile.mkdtemp())
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "-q", "numpy", "ray", "s3fs", "moto[server]"], check=True)
    os.execv(folder / "bin" / "python", [str(folder / "bin" / "python"), *sys.argv])


def main() -> int:
    ensure_packages()
    import boto3
    import fsspec

    sys.path.insert(0, str(ROOT / "python"))
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    os.environ["SQZ_LIBRARY"] = str(pathlib.Path(sys.argv[1]).resolve().parent / "libruntime" / "libsqz.so.0.2")
    import sqz._staging
    import sqz.ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1",
                      AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            corpus = Corpus(folder, sys.argv[1], 6, 8000)
            client = boto3.client("s3")
            for attempt in range(60):
                try:
                    client.create_bucket(Bucket="sqz")
                    break
                except Exception:  # the server starts
                    assert attempt < 59
                    time.sleep(1)
            store = fsspec.filesystem("s3")
            for path in sorted(folder.glob("*.txt")):
                store.put_file(str(path), f"sqz/in/{path.name}")
            lost = json.dumps({"key": "lost", "texts": ["none.txt"]}) + "\n"
            store.pipe_file("sqz/in/corpus.jsonl", corpus.manifest.read_bytes() + lost.encode())

            def build(*more: str) -> int:
                store.invalidate_cache()
                return sqz.ray.main(["build", "--manifest", "s3://sqz/in/corpus.jsonl", "-o", "s3://sqz/indexes",
                                     "--tool", str(corpus.tool), "--model", str(MODEL), "--shards", "2", *more])

            def stored() -> dict[str, str]:
                store.invalidate_cache()
                return {path: info["ETag"] + str(info["LastModified"])
                        for path, info in store.find("sqz/indexes", detail=True).items() if path.endswith(".sqz")}

            assert build() == 1, "one document is missing"
            first = stored()
            listed = [json.loads(line) for line in store.cat_file("sqz/indexes/manifest.jsonl").splitlines()]
            assert sorted(line["key"] for line in listed) == sorted(corpus.keys), listed
            assert all(len(line["build_id"]) == 16 for line in listed)
            assert build() == 1 and stored() == first, "nothing is uploaded again"
            assert build("--levels", "1") == 3 and stored() == first, "other options are refused"

            stage = sqz._staging.Stage(folder, "s3://sqz/indexes")
            key = corpus.keys[0]
            (corpus.out / key).parent.mkdir(parents=True)
            store.get_file(f"sqz/indexes/{key}.sqz", str(corpus.out / f"{key}.sqz"))
            assert stage.publish(key, replace=False) == "there", "the same came first"
            (corpus.out / f"{key}.sqz").write_bytes(b"another index")
            try:
                stage.publish(key, replace=False)
                raise AssertionError("an index was overwritten")
            except FileExistsError as error:
                print(error)
            assert stored() == first

            store.get("sqz/indexes/", str(corpus.out) + "/", recursive=True)
            (corpus.out / "manifest.jsonl").unlink()
            corpus.check()
    finally:
        server.terminate()
        server.wait()
    print(f"passed after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
