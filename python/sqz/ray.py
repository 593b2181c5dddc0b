"""Builds the indexes of a corpus on a Ray cluster (docs/corpora.md).

    python -m sqz.ray build --model MODEL --manifest corpus.jsonl -o DIR [options of sqz-index build]

A task builds one shard of the manifest with `sqz-index build`; a task whose node is lost runs again elsewhere, and what
is built stays built. All nodes see the same files under the same paths, and sqz-index is on their PATH. Manifest and
DIR may also be in an object store (s3://bucket/corpus.jsonl; pip install s3fs): a task copies its documents to its node
and publishes the indexes.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any


def _is_remote(path: str) -> bool:
    return "://" in path


def _run_tool(command: list[str]) -> dict[str, Any]:
    process = subprocess.run([*command, "--json", "--quiet"], capture_output=True, text=True, check=False)
    if process.returncode < 0:
        raise RuntimeError(f"sqz-index was killed by signal {-process.returncode}")
    events = [json.loads(line) for line in process.stdout.splitlines()]
    result = any(event["event"] == "result" for event in events)
    return {"documents": [event for event in events if event["event"] == "document"],
            "error": None if result else process.stderr.strip()}


def build_shard(command: list[str], manifest: str, target: str, shard: int, shards: int) -> dict[str, Any]:
    """What a task does: the events of `sqz-index build --json` for one shard.

    Returns {"documents": list of their events, "error": str or None}; the error is of a shard in which nothing was
    tried. RuntimeError if the process was killed, so that Ray runs the task again.
    """
    return _run_tool([*command, "--manifest", manifest, "-o", target, "--shard", f"{shard}/{shards}"])


def build_staged(command: list[str], entries: list[dict[str, Any]], target: str, replace: bool) -> dict[str, Any]:
    """The same for entries of a manifest in an object store, in a folder that is removed at the end."""
    from sqz import _staging

    with tempfile.TemporaryDirectory() as folder:
        stage = _staging.Stage(pathlib.Path(folder), target)
        stage.fill(entries)
        outcome = _run_tool([*command, "--manifest", str(stage.manifest), "-o", str(stage.out)])
        for document in outcome["documents"]:
            if document["state"] != "built":
                continue
            try:
                document["state"] = stage.publish(document["key"], replace)
            except FileExistsError as error:
                document.update(state="failed", message=str(error))
    return outcome


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sqz.ray", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build"])
    parser.add_argument("--manifest", required=True, help="the corpus (.jsonl)")
    parser.add_argument("-o", "--output", required=True, help="folder of the indexes")
    parser.add_argument("--address", help="of the cluster (default: RAY_ADDRESS, or a new one on this machine)")
    parser.add_argument("--shards", type=int, help="tasks, each of which loads the model once (default: eight for each "
                        "that runs at a time; at most one a document)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of a task, its threads (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a task (default: 0)")
    parser.add_argument("--retries", type=int, default=3, help="of a task whose worker is lost (default: 3)")
    parser.add_argument("--tool", default="sqz-index", help="path of sqz-index (default: sqz-index)")
    return parser


def _tasks_at_a_time(options: argparse.Namespace) -> int:
    """How many tasks the cluster has room for. ValueError if no node has what one wants."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = {name: count for name, count in (("CPU", options.cpus), ("GPU", options.gpus)) if count > 0}
    rooms = [min(int(node.get(name, 0) // count) for name, count in wanted.items()) for node in nodes]
    if not any(rooms):
        most = ", ".join(f"{max(node.get(name, 0) for node in nodes):g} {name}s" for name in wanted)
        raise ValueError(f"--cpus {options.cpus:g} --gpus {options.gpus:g}: no node has as many; found {most} at most")
    return sum(rooms)


def _submit(options: argparse.Namespace, command: list[str]) -> list[Any]:
    """The tasks, a shard each."""
    import ray

    usual = 8 * _tasks_at_a_time(options)

    def remote(function: Any) -> Any:
        return ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_retries=options.retries,
                          retry_exceptions=[RuntimeError, OSError])(function)

    if not _is_remote(options.output):
        with open(options.manifest, encoding="utf-8") as manifest:
            lines = sum(1 for line in manifest if line.strip())
        shards = options.shards or max(1, min(lines, usual))
        task = remote(build_shard)
        return [task.remote(command, options.manifest, options.output, shard, shards) for shard in range(shards)]

    from sqz import _staging

    entries = _staging.read_manifest(options.manifest)
    shards = options.shards or max(1, min(len(entries), usual))
    task, replace = remote(build_staged), "--update" in command or "--force" in command
    return [task.remote(command, entries[shard::shards], options.output, replace) for shard in range(shards)]


def _run(options: argparse.Namespace, command: list[str]) -> collections.Counter[str] | None:
    """How many documents came to each state; None if sqz-index refused a shard."""
    import ray

    waiting = _submit(options, command)
    shards = len(waiting)
    states: collections.Counter[str] = collections.Counter()
    there = []
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        shard = ray.get(done[0])
        if shard["error"] is not None:
            print(shard["error"], file=sys.stderr)
            return None
        for document in shard["documents"]:
            states[document["state"]] += 1
            if document["state"] != "failed":
                there.append(document)
            else:
                print(f"{options.manifest}: {document['key']}: {document['message']}", file=sys.stderr)
        print(f"{shards - len(waiting)} of {shards} shards, {states['built']} documents built, {states['there']} there "
              f"before, {states['failed']} failed", file=sys.stderr)
    if _is_remote(options.output):
        from sqz import _staging

        _staging.write_manifest(options.output, there)
    return states


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 if all documents are there, 1 if some failed, 3 if all failed."""
    options, rest = _parser().parse_known_args(arguments)
    if _is_remote(options.manifest) != _is_remote(options.output):
        print("--manifest and -o: one is in an object store and the other is not", file=sys.stderr)
        return 2
    command = [options.tool, "build", "--threads", str(max(1, int(options.cpus))), *rest]

    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=options.address, log_to_driver=False)
        except ConnectionError as error:
            print(f"--address {options.address}: {error} (without it, Ray starts on this machine)", file=sys.stderr)
            return 2
    try:
        states = _run(options, command)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if ours:
            ray.shutdown()
    if states is None:
        return 3
    if states["failed"] == 0:
        return 0
    return 1 if states["failed"] < sum(states.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
