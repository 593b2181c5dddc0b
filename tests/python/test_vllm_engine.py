"""vLLM with an index on a CPU: its answers, and what it says when it cannot serve. Takes minutes."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: examples/vllm/install makes an environment that has it")
import architectures
from transformers_support import BOOK, NANO, ROOT, answers, load, torch, transformers, whole_answers
from vllm.platforms import current_platform

import sqz
import sqz.transformers

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
    folder = tmp_path_factory.mktemp("book")
    subprocess.run([ROOT / "examples/vllm/prepare", sys.prefix, folder], check=True)
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


# Contexts, requests of them in random order, how many of these at a time, and contexts that memory holds.
COUNTS = [int(number) for number in os.environ.get("SQZ_TEST_LIBRARY", "24 120 16 5").split()]
LIBRARY = """
import asyncio, json, random, sys
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    options, asked = json.load(sys.stdin)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, block_size=32,
        max_num_batched_tokens=64, attention_backend="CUSTOM", **options))
    room, answers = asyncio.Semaphore(options["max_num_seqs"]), {}
    async def ask(number, names, prompt):
        async with room:
            parameters = vllm.SamplingParams(temperature=0, max_tokens=8, extra_args={"sqz_context": names})
            try:
                async for output in engine.generate({"prompt_token_ids": prompt}, parameters, str(number)):
                    answers[number] = list(output.outputs[0].token_ids)
            except Exception as error:
                answers[number] = f"{type(error).__name__}: {error}"
    order = list(enumerate(asked))
    random.Random(1).shuffle(order)
    await asyncio.gather(*(ask(number, *one) for number, one in order))
    print("ANSWERS", json.dumps([answers[number] for number in range(len(asked))]))
    print("COUNTED", json.dumps(vars(engine.sqz_leases.counters)))
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("session", [{"selector": "dense"}, {"budget": 0.25, "block": 1}], ids=["dense", "sparse"])
def test_contexts_are_never_mixed(session, tmp_path):
    """Many contexts, each with its own fact: every answer is that of its own context alone, whatever was evicted."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(NANO), load(NANO)
    # Two blocks of vLLM's cache, which are equal for all contexts but for their salt.
    question = tokenizer.encode("\nIt was late when we came there, and nobody said a word of what he had seen on the way, "
                                "so that we sat down and looked at the papers which had been left for us on the table, and "
                                "read them by the light of a candle.\nWhat is the special magic number for lantern mentioned in the provided text? The "
                                "special magic number for lantern mentioned in the provided text is",
                                add_special_tokens=False)
    assert len(question) > 70
    contexts, requests, at_a_time, held = COUNTS
    text, alone, bytes_each = BOOK.read_text(encoding="utf-8"), {}, 0
    for number in range(contexts):
        first = number * 900 % (len(text) - 900)
        ids = tokenizer.encode(f"{text[first:first + 400]}\nOne of the special magic numbers for lantern is: "
                               f"{1234567 + number * 314159 % 8765432}.\n{text[first + 400:first + 800]}")
        path = tmp_path / f"{number}.sqz"
        sqz.build(model, tokenizer, ids, path, tail=16, progress=False)
        bytes_each = max(bytes_each, path.stat().st_size)
        with sqz.transformers.FixedContext(model, path, **session) as fixed:
            alone[str(number)] = answers(model, torch.tensor([question]), max_new_tokens=8)[0]
            assert fixed.stats().selections > 0 and fixed.stats().delivered_budget < (1.01 if "selector" in session else 0.4)
    assert len(set(map(tuple, alone.values()))) > contexts // 2  # most find their own number
    asked = [(str(number % contexts), question) for number in range(requests)]
    asked += [(str(contexts), question), (["1", "../1"], question), ([str(one) for one in range(held + 1)], question)]
    engine = {"model": str(NANO), "max_model_len": 512, "max_num_seqs": at_a_time}
    program = subprocess.run([sys.executable, "-c", LIBRARY], text=True, capture_output=True, timeout=600 + requests,
                             check=False, input=json.dumps((engine, asked)),
                             env=os.environ | {"SQZ_CONTEXTS": str(tmp_path), "SQZ_MEMORY": str(held * bytes_each)} |
                             {f"SQZ_{name.upper()}": str(value) for name, value in session.items()})
    lines = dict(line.split(" ", 1) for line in program.stdout.splitlines() if line.startswith(("ANSWERS", "COUNTED")))
    found, counted = json.loads(lines["ANSWERS"]), json.loads(lines["COUNTED"])
    for (name, _), answer in zip(asked[:-3], found[:-3], strict=True):
        assert answer == alone[name], name
    refusals = "which is not in the server's library", "without ..", "SQZ_MEMORY" if held < 8 else "at most 8"
    for answer, sentence in zip(found[-3:], refusals, strict=True):
        assert sentence in answer
    assert counted["requests"] == requests and counted["fetches"] > contexts
    assert counted["evictions"] >= counted["fetches"] - 2 * held  # small indexes leave room for more


MAMBA = {"hidden_size": 256, "head_dim": 64, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_d_ssm": 512}


@pytest.mark.parametrize(("name", "changed"), [  # windows, and sinks in the first; states, in the last beside attention
    ("gpt_oss", {}), ("gemma3_text", {}), ("granitemoehybrid", MAMBA), ("falcon_h1", MAMBA)])
def test_layers_with_windows_sinks_and_states(name, changed, tmp_path):
    architectures.make(name, 24, width=256, **changed).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    torch.manual_seed(3)
    context, questions = torch.randint(3, 320, (1, 200)), torch.randint(3, 320, (4, 12))
    expected, logits = architectures.whole_answers(model, context, questions)
    sqz.build(model, None, context, tmp_path / "context.sqz", rows="f16")
    output, rounds = run({"SQZ_INDEX": str(tmp_path / "context.sqz"), "SQZ_SELECTOR": "dense"}, questions.tolist(),
                         model=str(tmp_path), skip_tokenizer_init=True, max_model_len=256)
    assert [architectures.count_equal(found, expected, logits) for found in rounds] == [4, 4], output


def test_too_long_requests_are_refused_at_the_start(book):
    output, rounds = run({"SQZ_INDEX": str(book / "book.sqz"), "SQZ_BUDGET": "0.25"}, [[5]], max_model_len=32768)
    assert not rounds
    assert "and the model has 32768 positions; set --max-model-len to at most" in output
    assert "EngineCore" not in output  # it was not started
