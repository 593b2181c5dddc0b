"""vLLM with an index on a CPU: its answers, and what it says when it cannot serve. Takes minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: examples/vllm/install makes an environment that has it")
from transformers_support import NANO, ROOT, load, torch, transformers, whole_answers
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("this vLLM is for GPUs; these tests run the CPU backend", allow_module_level=True)

# Prompts come in chunks of 16 tokens. Each is asked twice: the second time, full blocks come from the prefix cache.
PROGRAM = """
import json, sys
import vllm
if __name__ == "__main__":
    options, prompts = json.load(sys.stdin)
    engine = vllm.LLM(dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, max_num_seqs=4,
                      block_size=32,
                      max_num_batched_tokens=16, attention_backend="CUSTOM", disable_log_stats=True, **options)
    for _ in range(2):
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False,
                                  sampling_params=vllm.SamplingParams(temperature=0, max_tokens=24))
        print("ANSWERS", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
        print("CACHED", sum(answer.num_cached_tokens for answer in answers))
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A folder with book.txt and book.sqz."""
    tools = Path(os.environ.get("SQZ_TOOLS", ROOT / "build/cpu/tools"))
    if not (tools / "sqz-index").exists():
        pytest.skip(f"{tools} has no sqz-index: set SQZ_TOOLS to the folder of the built tools")
    folder = tmp_path_factory.mktemp("book")
    subprocess.run([ROOT / "examples/vllm/prepare", folder, "--threads", "2", "-qq"], check=True,
                   env=os.environ | {"SQZ_TOOLS": str(tools)})
    return folder


def run(environment, prompts, **options):
    """vLLM in a process of its own: what it printed, and its rounds of answers."""
    program = subprocess.run([sys.executable, "-c", PROGRAM], text=True, capture_output=True, timeout=600, check=False,
                             input=json.dumps(({"model": str(NANO), **options}, prompts)),
                             env=os.environ | environment)
    rounds = [json.loads(line.removeprefix("ANSWERS")) for line in program.stdout.splitlines()
              if line.startswith("ANSWERS")]
    return program.stdout + program.stderr, rounds


def test_answers_are_those_over_the_whole_context(book):
    tokenizer = transformers.AutoTokenizer.from_pretrained(NANO)
    questions = [tokenizer.encode(f"\nWhat is the special magic number for {word} mentioned in the provided text? The "
                                  f"special magic number for {word} mentioned in the provided text is",
                                  add_special_tokens=False) * 2 for word in ("harbour", "violin", "glacier")]
    questions.append(questions[0][:1])
    output, rounds = run({"SQZ_INDEX": str(book / "book.sqz"), "SQZ_SELECTOR": "dense"}, questions, max_model_len=256)
    assert len(rounds) == 2, output[-4000:]
    blocks = sum((len(question) - 1) // 32 for question in questions)  # that are full, of the second round
    assert f"CACHED {32 * blocks}\n" in output and blocks > 0
    model, context = load(NANO), torch.tensor([tokenizer.encode((book / "book.txt").read_text())])
    expected = [whole_answers(model, context, torch.tensor([question]), torch.bfloat16)[0] for question in questions]
    assert rounds == [expected, expected]


def test_too_long_requests_are_refused_at_the_start(book):
    output, rounds = run({"SQZ_INDEX": str(book / "book.sqz"), "SQZ_BUDGET": "0.25"}, [[5]], max_model_len=32768)
    assert not rounds
    assert "and the model has 32768 positions; set --max-model-len to at most" in output
    assert "EngineCore" not in output  # it was not started
