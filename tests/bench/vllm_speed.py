#!/usr/bin/env python3
"""Tokens a second of vLLM over a fixed context: from an index, and with the context in the prompts.

    vllm_speed.py MODEL INDEX [--requests 1 16 64] [--answer 128] [--load-format dummy] [--random 128000]

Three engines in turn, each in a process of its own:
  dense   sqz.vllm reads all of the index
  sparse  sqz.vllm with --budget of it
  prompt  vLLM alone, the context in each prompt and all of it in the prefix cache
MODEL is a Hugging Face folder, INDEX one of that model, or a folder of several, which the requests take in turn; with
--random it is made first, of random keys of the model's shape, as many tokens long. The context in the prompts is as
long as the first index's, of random tokens, which takes as long as any. Each request has a question of its own, random
too, and its answer has exactly --answer tokens. Time is from sending all requests to the last answer: the questions'
prefill is in it, the context's is not. Each number of requests runs once to warm up and then --repeat times; the median
is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import sqz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("index")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="at a time")
    parser.add_argument("--question", type=int, default=32, help="tokens of a question")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--budget", type=float, default=0.125)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["dense", "sparse", "prompt"])
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, only config.json is read")
    parser.add_argument("--random", type=int, metavar="TOKENS", help="INDEX is made, of random keys")
    parser.add_argument("--rows", default="q8", choices=["q8", "bf16"], help="of that index")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.9, help="fraction of the GPU's memory that vLLM takes")
    parser.add_argument("--gpus", type=int, default=1, help="that share the model, by tensor parallelism")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE",
                        choices=["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"],
                        help="CUDA graphs; NONE and FULL_DECODE_ONLY are without torch.compile")
    parser.add_argument("-o", "--output", help="a line of JSON for each engine, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # the process of one engine: where its result goes
    arguments = parser.parse_args()
    if arguments.serve:
        with open(arguments.serve, "w", encoding="utf-8") as file:
            json.dump(measure(arguments), file)
        return 0

    if arguments.random and not os.path.exists(arguments.index):
        make_random(arguments.model, arguments.index, arguments.random, arguments.rows)
    results = []
    for engine in arguments.engines:
        result = in_own_process(engine, arguments)
        results.append(result)
        if arguments.output:
            with open(arguments.output, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    print_table(results, arguments)
    return 0


def make_random(model: str, path: str, tokens: int, rows: str = "q8", seed: int = 0) -> None:
    """An index of the model's shape, with keys, values and queries of a normal distribution."""
    import numpy as np
    import torch
    import transformers

    from sqz._builder import Build
    from sqz.transformers.fingerprint import describe
    from sqz.transformers.layers import look

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    vars(network)["state_dict"] = dict  # without weights
    layers, start = look(network), time.perf_counter()
    torch.manual_seed(seed)
    states = [{name: torch.randn(one.shape).to(one.dtype) for name, one in state.items()} for state in layers.states]
    ids = np.random.default_rng(seed).integers(0, config.get_text_config().vocab_size, tokens)
    kept = states if any(states) else None
    with Build(path, describe(network, layers), ids, state=kept, rows=rows) as made:
        where = "cuda" if made.plan["takes_gpu"] else "cpu"
        for layer in layers.all:
            if layer.kind in ("full", "recent"):
                shape = layer.kv_heads, min(layer.window or tokens, tokens)
                keys, values = (torch.randn(*shape, dim, dtype=torch.bfloat16, device=where)
                                for dim in (layer.head_dim, layer.value_dim))
                queries = torch.randn(layer.query_heads, made.plan["tail"], layer.head_dim, dtype=torch.bfloat16)
                if where == "cuda":
                    torch.cuda.synchronize()
                made.add_layer(keys, values, queries if layer.kind == "full" else None)
        for number, state in enumerate(states):
            made.add_state(number, state)
        made.finish()
    print(f"{path}: {tokens} tokens in {time.perf_counter() - start:.0f} s", flush=True)


def in_own_process(engine: str, arguments: argparse.Namespace) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("SQZ_") or name == "SQZ_LIBRARY"}
    if engine != "prompt":
        environment["SQZ_CONTEXTS" if os.path.isdir(arguments.index) else "SQZ_INDEX"] = arguments.index
        environment |= {"SQZ_SELECTOR": "dense"} if engine == "dense" else {"SQZ_BUDGET": str(arguments.budget)}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        subprocess.run([sys.executable, *sys.argv, "--serve", file.name], env=environment, check=True)
        return {"engine": engine, **json.load(file)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second for each number of requests, and what this ran on."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    in_prompt = not os.environ.keys() & {"SQZ_INDEX", "SQZ_CONTEXTS"}
    names = sorted(path.stem for path in pathlib.Path(arguments.index).glob("*.sqz"))  # none of a single index
    with sqz.Index(os.path.join(arguments.index, names[0] + ".sqz") if names else arguments.index) as index:
        tokens = index.info.tokens
    most, room = max(arguments.requests), arguments.question + arguments.answer
    cuda = current_platform.is_cuda()
    engine = vllm.LLM(arguments.model, skip_tokenizer_init=True, load_format=arguments.load_format,
                      dtype=arguments.dtype, max_model_len=(tokens if in_prompt else 0) + room, max_num_seqs=most,
                      enforce_eager=arguments.graphs == "NONE", disable_log_stats=True,
                      tensor_parallel_size=arguments.gpus,
                      compilation_config={"cudagraph_mode": arguments.graphs} | (
                         {"mode": 0, "cudagraph_capture_sizes": arguments.requests}
                         if arguments.graphs == "FULL_DECODE_ONLY" else {}),
                      **({"gpu_memory_utilization": arguments.memory} if cuda else {"kv_cache_memory_bytes": 2 << 30}),
                      **({} if in_prompt else {"attention_backend": "CUSTOM"}))
    samplings = [vllm.SamplingParams(temperature=0, max_tokens=arguments.answer, ignore_eos=True, detokenize=False,
                                     extra_args={"sqz_context": name} if name else None)
                 for name in (names if not in_prompt else None) or [None]]
    words = random.Random(0)
    vocabulary = engine.llm_engine.vllm_config.model_config.get_vocab_size()
    context = [words.randrange(vocabulary) for _ in range(tokens)] if in_prompt else []

    def seconds(requests: int) -> float:
        prompts = [{"prompt_token_ids": context + [words.randrange(vocabulary) for _ in range(arguments.question)]}
                   for _ in range(requests)]
        start = time.perf_counter()
        in_turn = list(itertools.islice(itertools.cycle(samplings), requests))
        answers = engine.generate(prompts, in_turn, use_tqdm=False)
        took = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == arguments.answer for answer in answers)
        return took

    seconds(len(samplings))  # the context is in the prefix cache, and all indexes are on the GPU, from here on
    speeds = {}
    for requests in arguments.requests:
        seconds(requests)
        times = [seconds(requests) for _ in range(arguments.repeat)]
        speeds[requests] = requests * arguments.answer / statistics.median(times)
    return {"context": tokens, "contexts": len(samplings), "speeds": speeds, "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores, {platform.machine()}"}


def print_table(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    first = results[0]
    print(f"\n{first['device']}; vLLM {first['vllm']}, torch {first['torch']}, Python {platform.python_version()}; "
          f"{arguments.model}, {arguments.dtype}, graphs {arguments.graphs}; {first['contexts']} contexts of "
          f"{first['context']} tokens, {arguments.question} of question, {arguments.answer} of answer; median of "
          f"{arguments.repeat}")
    print(f"{'tokens a second, requests:':28}" + "".join(f"{requests:>12}" for requests in arguments.requests))
    names = {"dense": "index, dense", "sparse": f"index, budget {arguments.budget}", "prompt": "context in the prompt"}
    for result in results:
        print(f"{names[result['engine']]:28}" + "".join(f"{speed:12.1f}" for speed in result["speeds"].values()))


if __name__ == "__main__":
    sys.exit(main())
