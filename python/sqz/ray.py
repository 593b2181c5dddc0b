"""Builds the indexes of a corpus on a Ray cluster (docs/corpora.md).

    python -m sqz.ray build --model MODEL --manifest corpus.jsonl -o DIR [options of sqz-index build]

A task builds one shard of the manifest with `sqz-index build`. A task whose node is lost runs again elsewhere, and what
is built stays built. All nodes see the same files under the same paths, and sqz-index is on their PATH.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
from typing import Any


def build_shard(command: list[str], shard: int, shards: int) -> dict[str, Any]:
    """What a task does: the events of `sqz-index build --json` for one shard.

    Returns {"documents": list of their events, "error": str or None}. The error is of a shard that did not come to an
    end. RuntimeError if the process was killed, so that Ray runs the task again.
    """
    process = subprocess.run([*command, "--shard", f"{shard}/{shards}", "--json", "--quiet"], capture_output=True,
                             check=False)
    if process.returncode < 0:
        raise RuntimeError(f"sqz-index was killed by signal {-process.returncode}")
    # JSON may have any other line end of Unicode, and names bytes that are no UTF-8.
    output, errors = (text.decode(errors="surrogateescape") for text in (process.stdout, process.stderr))
    events = [json.loads(line) for line in output.split("\n") if line]
    result = any(event["event"] == "result" for event in events)
    return {"documents": [event for event in events if event["event"] == "document"],
            "error": None if result else errors.strip()}


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
    parser.add_argument("--tool", default="sqz-index", help="path of sqz-index (default: sqz-index)")
    return parser


def _tasks_at_a_time(options: argparse.Namespace) -> int:
    """How many tasks the cluster has room for. ValueError if no node has what one wants."""
    import ray

    if options.cpus <= 0 and options.gpus <= 0:
        raise ValueError(f"--cpus {options.cpus:g} --gpus {options.gpus:g}: expected one of them above 0")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = {name: count for name, count in (("CPU", options.cpus), ("GPU", options.gpus)) if count > 0}
    rooms = [min(int(node.get(name, 0) // count) for name, count in wanted.items()) for node in nodes]
    if not any(rooms):
        raise ValueError(f"--cpus {options.cpus:g} --gpus {options.gpus:g}: no node has as many")
    return sum(rooms)


def _run(options: argparse.Namespace, command: list[str]) -> collections.Counter[str]:
    """How many documents came to each state. A shard that did not come to an end counts as "failed", once."""
    import ray

    with open(options.manifest, "rb") as manifest:
        lines = sum(1 for line in manifest if line.strip())
    if options.shards is not None and options.shards < 1:
        raise ValueError(f"--shards: found {options.shards}, expected 1 or more")
    shards = options.shards or max(1, min(lines, 8 * _tasks_at_a_time(options)))
    task = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_retries=3,
                      retry_exceptions=[RuntimeError, OSError])(build_shard)
    waiting = [task.remote(command, shard, shards) for shard in range(shards)]
    states: collections.Counter[str] = collections.Counter()
    said: set[str] = set()
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            shard = ray.get(done[0])
        except Exception as error:  # whatever the task raised, or Ray about its worker
            shard = {"documents": [], "error": str(error)}
        failures = [] if shard["error"] is None else [shard["error"]]
        for document in shard["documents"]:
            states[document["state"]] += 1
            if document["state"] == "failed":
                failures.append(f"{options.manifest}: {document['key']}: {document['message']}")
        states["failed"] += shard["error"] is not None
        for failure in failures:
            if failure not in said:  # most errors of shards are of them all
                print(failure, file=sys.stderr)
            said.add(failure)
        print(f"{shards - len(waiting)} of {shards} shards, {states['built']} documents built, {states['there']} there "
              f"before, {states['failed']} failed", file=sys.stderr)
    return states


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 if all documents are there, 1 if some failed, 3 if all failed."""
    options, rest = _parser().parse_known_args(arguments)
    command = [options.tool, "build", "--manifest", options.manifest, "-o", options.output, "--threads",
               str(max(1, int(options.cpus))), *rest]

    import ray

    ours = not ray.is_initialized()
    try:
        if ours:
            ray.init(address=options.address, log_to_driver=False)
        states = _run(options, command)
    except (OSError, ValueError) as error:  # a manifest that is not there, a cluster that does not answer
        print(error, file=sys.stderr)
        return 2
    finally:
        if ours:
            ray.shutdown()
    if states["failed"] == 0:
        return 0
    return 1 if states["failed"] < sum(states.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
