#!/usr/bin/env python3
"""The models of tests/python/architectures.py on a GPU. Not part of ctest: it wants a GPU and transformers.

  tests/gpu/architectures.py             all of them; or those that are named
  tests/gpu/architectures.py --vllm      those of VLLM, or those that are named, in vLLM

In float32 all 24 tokens of ten answers must be those of the whole context, whose keys and values were rounded to
float16; with padding on the left, too, if no layer has a state, and of STATIC from a static cache, which is compiled to
CUDA graphs, over two contexts in turn. In bfloat16 the equal ones are counted, and the logits of the prompt must be as near to float32's as those of
transformers are, times 1.5. Heads have 64 dimensions where the table has 16.

vLLM answers ten questions of 1 to 300 tokens twice, alone with the context in the prompt, and behind an index with full
CUDA graphs; of models with recurrent layers also with the prefix cache. The 20 best first tokens must be as near to
float32's as those of vLLM alone are, times 1.5. Equal answers are counted, and ties: those that differ first where vLLM
alone found the two tokens no further apart than three times what it is off. Engines run several at a time.
"""
import concurrent.futures
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
import architectures as a
import sqz
import sqz.transformers

# Models in vLLM, and what kernels and model classes there need in place of the table's configuration.
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
MAMBA = {"hidden_size": 256, "head_dim": 64, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_d_ssm": 512,
         "mamba_chunk_size": 64}
VLLM = {"nemotron_h": {"mamba_head_dim": 64, "ssm_state_size": 32, "chunk_size": 64}, "qwen3_next": DELTA,
        "lfm2": {"conv_dim": 256}, "gpt_oss": {"num_local_experts": 8}, "gemma3_text": {}, "glm4_moe": {},
        "qwen3": {"num_attention_heads": 32}, "granitemoehybrid": MAMBA, "falcon_h1": MAMBA}
STATIC = "llama", "gemma3_text"
BFLOAT16 = "gpt_oss", "gemma3_text"  # vLLM does not take them in float16
LENGTHS = (1, 2, 300, 270, 12, 12, 12, 12, 12, 12)  # of questions


def logits_of(model, ids, context=None):
    """Of a prompt, in float32; behind the cache of a context if there is one."""
    cache = None if context is None else a.cache_of(model, context, len(ids))
    first = 0 if context is None else context.shape[1]
    with torch.inference_mode():
        places = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
        return model(ids, position_ids=places, past_key_values=cache).logits.float()


def run(name, tokens, dtype, folder):
    """A line of what was found, and whether it is right."""
    exact = a.make(name, a.CONTEXTS[tokens], width=256).to("cuda")
    model = copy.deepcopy(exact).to(dtype)
    torch.manual_seed(2)
    context, questions = (torch.randint(3, 320, shape).to("cuda") for shape in ((1, tokens), (a.QUESTIONS, a.TOKENS)))
    rows, stored = ("bf16", torch.bfloat16) if dtype == torch.bfloat16 else ("f16", torch.float16)
    index = sqz.build(model, None, context, f"{folder}/a.sqz", rows=rows, sink=4, tail=30, overwrite=True)
    expected, chosen = a.whole_answers(model, context, questions, stored)
    with a.plain_attention(exact, tokens, torch.float32):
        reference = logits_of(exact, questions, context)
    with a.plain_attention(model, tokens, stored):
        theirs = logits_of(model, questions, context)
    with sqz.transformers.FixedContext(model, index, selector="dense"):
        same = a.count_equal(a.ask(model, questions), expected, chosen)
        ours = logits_of(model, questions)
        if dtype == torch.float32 and not a.with_state(index):
            same = min(same, a.count_equal(a.ask_padded(model, questions), expected, chosen))
    if dtype == torch.float32 and name in STATIC:
        other = context[:, 50:]
        half = sqz.build(model, None, other, f"{folder}/b.sqz", rows=rows, sink=4, tail=30, overwrite=True)
        others = a.whole_answers(model, other, questions, stored)
        for one, wanted in ((index, (expected, chosen)), (half, others), (index, (expected, chosen))):
            with sqz.transformers.FixedContext(model, one, selector="dense"):
                same = min(same, a.count_equal(a.ask(model, questions, cache_implementation="static"), *wanted))
    # The median of the tokens: in bfloat16 a router that is near a tie gives a few of them to other experts.
    error, allowed = (((one - reference).norm(dim=-1) / reference.norm(dim=-1)).median() for one in (ours, theirs))
    right = same == a.QUESTIONS if dtype == torch.float32 else bool(error <= 1.5 * allowed)
    return right, f"{same} of {a.QUESTIONS} answers, logits off by {error:.1e}, transformers' by {allowed:.1e}"


def answer(folder, kind):
    """In a process of its own: vLLM's answers to what asked.json asks go to KIND.json, with the best logits of each."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if torch.cuda.is_available():  # kernels are compiled once, and not once for each setting that may be fastest
        import triton
        tune = triton.autotune
        triton.autotune = lambda configs, *rest, **named: tune(configs[:1], *rest, **named)
    import vllm

    asked = json.loads((folder / "asked.json").read_text())
    alone = kind == "alone"
    cached = {"enable_prefix_caching": True, "mamba_cache_mode": "align"} if kind == "cached" else {}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    engine = vllm.LLM(str(folder), dtype=asked["dtype"], skip_tokenizer_init=True, max_model_len=700 if alone else 400,
                      max_num_seqs=4, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 28, enforce_eager=alone,
                      compilation_config={} if alone else graphs, disable_log_stats=True, gpu_memory_utilization=0.03,
                      additional_config={"gdn_prefill_backend": "triton"},  # the other one wants FlashInfer
                      **({} if alone else {"attention_backend": "CUSTOM"}), **cached)
    prompts = [{"prompt_token_ids": (asked["context"] if alone else []) + one} for one in asked["questions"]]
    wanted = vllm.SamplingParams(temperature=0, max_tokens=a.ANSWER, detokenize=False, ignore_eos=True, logprobs=20)
    rounds = [engine.generate(prompts, wanted, use_tqdm=False) for _ in range(2)]
    found = [[[[(token, one.logprob) for token, one in step.items()] for step in output.outputs[0].logprobs]
              for output in outputs] for outputs in rounds]
    tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds]
    (folder / f"{kind}.json").write_text(json.dumps([tokens, found]))


def compare(folder, kind):
    """A line about KIND's answers beside those of vLLM alone, and whether they are right."""
    asked = json.loads((folder / "asked.json").read_text())
    (theirs, _), logits = json.loads((folder / "alone.json").read_text())
    rounds, found = json.loads((folder / f"{kind}.json").read_text())
    error = max(off(found[number], asked["exact"]) for number in (0, 1))
    equal, ties, allowed = 0, 0, off(logits[0], asked["exact"])
    for row, (mine, other) in ((row, both) for ours in rounds for row, both in enumerate(zip(ours, theirs))):
        place = next((place for place in range(a.ANSWER) if mine[place] != other[place]), None)
        equal += place is None
        if place is not None:
            known = dict(logits[0][row][place])
            ties += known[other[place]] - known.get(mine[place], -1e9) < 3 * allowed
    note = f"{equal} of {2 * len(theirs)} answers, {ties} ties, first tokens off by {error:.1e}, vLLM's by {allowed:.1e}"
    return error <= 1.5 * allowed, f"{asked['dtype']}, {note}"


def off(answers, exact):
    """How far the first tokens' logarithms of probabilities are from exact ones, in the mean of squares."""
    differences = [value - row[token] for steps, row in zip(answers, exact) for token, value in steps[0]]
    return torch.tensor(differences).square().mean().sqrt().item()


def with_vllm(names):
    """What failed."""
    def run_engine(folder, name, kind):
        where = {} if kind == "alone" else {"SQZ_INDEX": str(folder / "context.sqz"), "SQZ_SELECTOR": "dense"}
        with open(folder / f"{kind}.log", "w", encoding="utf-8") as log:
            done = subprocess.run([sys.executable, __file__, "--answer", str(folder), kind], env=os.environ | where,
                                  stdout=log, stderr=log, check=False, timeout=400)
        lines = (folder / f"{kind}.log").read_text().splitlines()
        return [] if done.returncode == 0 else lines[-25:]

    failed, device = [], "cuda" if torch.cuda.is_available() else "cpu"
    at_once = concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() - 2))
    with tempfile.TemporaryDirectory() as root, at_once as pool:
        started = {}
        for name in names or VLLM:
            folder, dtype = pathlib.Path(root) / name, torch.bfloat16 if name in BFLOAT16 else torch.float16
            a.make(name, a.CONTEXTS[200], width=256, **VLLM.get(name, {})).to(dtype).save_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
            torch.manual_seed(3)
            context, *questions = (torch.randint(3, 320, (count,)).tolist() for count in (200, *LENGTHS))
            rows = "f16" if dtype == torch.float16 else "bf16"
            made = sqz.build(model, None, context, folder / "context.sqz", rows=rows, sink=4, tail=30)
            exact = [logits_of(model.float(), torch.tensor([context + one]).to(device))[0, -1].log_softmax(-1).tolist()
                     for one in questions]
            (folder / "asked.json").write_text(json.dumps({"context": context, "questions": questions, "exact": exact,
                                                           "dtype": str(dtype).removeprefix("torch.")}))
            for kind in ("alone", "index", "cached")[:3 if a.with_state(made) else 2]:
                started[name, kind] = pool.submit(run_engine, folder, name, kind)
        for (name, kind), engine in started.items():
            broken = [*engine.result(), *started[name, "alone"].result()]
            if broken or kind != "alone":
                right, note = (False, "\n  ".join(broken)) if broken else compare(pathlib.Path(root) / name, kind)
                print(f"{'ok    ' if right else 'FAILED'} {name}, {kind}: {note}", flush=True)
                failed += [] if right else [f"{name} {kind}"]
    return failed


def with_transformers(names):
    """What failed."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or a.MODELS:
            for tokens in list(a.CONTEXTS)[:2 if a.windowed(name) else 1]:
                for dtype in (torch.float32, torch.bfloat16):
                    try:
                        right, note = run(name, tokens, dtype, folder)
                    except Exception as error:  # noqa: BLE001 - the others are run all the same
                        right, note = False, f"{type(error).__name__}: {error}"
                    print(f"{'ok    ' if right else 'FAILED'} {name}, {tokens} tokens, {dtype}: {note}", flush=True)
                    failed += [] if right else [f"{name} {tokens} {dtype}"]
    return failed


def main():
    if sys.argv[1:2] == ["--answer"]:
        return answer(pathlib.Path(sys.argv[2]), sys.argv[3])
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, sqz {sqz.__version__}, "
          f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}")
    failed = with_vllm(sys.argv[2:]) if sys.argv[1:2] == ["--vllm"] else with_transformers(sys.argv[1:])
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
