"""What the tests of sqz.transformers share: skips, models, indexes, and answers of transformers itself."""

import os
import pathlib
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: docs/transformers.md says how to run these tests")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("h5py", reason="h5py is not installed")
if tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 56):
    pytest.skip(f"found transformers {transformers.__version__}, expected 4.56 or newer", allow_module_level=True)

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "examples/models/nano"
BOOK = ROOT / "examples/texts/dracula.txt"
ANSWER = 24  # tokens
torch.set_num_threads(1)


def tool(name):
    """A tool of sqz: SQZ_TOOLS names its folder, else PATH, else the build folder."""
    built = [str(path.parent) for path in ROOT.glob(f"build/*/tools/{name}")]
    folder = os.environ.get("SQZ_TOOLS") or next(iter(built), None)
    path = shutil.which(name, path=folder) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} was not found: set SQZ_TOOLS to the folder of the built tools")
    return path


def build(capture, index, *options, rows="f16"):
    subprocess.run([tool("sqz-index"), "build", "--capture", capture, "-o", index, "--rows", rows, "--threads", "2",
                    *options], check=True, stdout=subprocess.DEVNULL)
    return index


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # answers have all their tokens
    model.generation_config.pad_token_id = 0
    return model.eval()


def answers(model, questions, **options):
    """The tokens that follow each of the questions [questions, tokens], a list each."""
    options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(questions), **options}
    return model.generate(questions, **options)[:, questions.shape[1]:].tolist()


def whole_answers(model, context, questions, dtype=torch.float16):
    """The same by transformers over the whole context [1, tokens], its keys and values rounded as in the index."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(context, past_key_values=cache, logits_to_keep=1)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(dtype).float(), layer.values.to(dtype).float()
    cache.batch_repeat_interleave(len(questions))
    whole = torch.cat([context.expand(len(questions), -1), questions], 1)
    return answers(model, whole, past_key_values=cache)
