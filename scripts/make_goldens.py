#!/usr/bin/env python3
"""Makes the golden files of tests/golden from Hugging Face transformers.

    pip install torch transformers safetensors tokenizers numpy
    scripts/make_goldens.py logits
    scripts/make_goldens.py profile

`logits`: tiny models of every architecture, RoPE type and weight layout, randomly initialised, with
the logits and greedy continuations that transformers computes in float32; and the same for the
example model.

`profile`: how much the attention of each layer of the example model changes the hidden state, over
windows of two stretches of the example text: mean cosine and its standard error, in float64.
"""

import argparse
import json
import math
import pathlib
import shutil

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "logits"
NANO, BOOK = ROOT / "examples/models/nano", ROOT / "examples/texts/dracula.txt"

VOCAB, HIDDEN, LAYERS, POSITIONS = 96, 64, 2, 512
TOKENS = 300  # beyond original_max_position_embeddings of the scaled models

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 48}

# name -> (model type, weight dtype, config fields, how it is saved)
MODELS = {
    "llama-tied": ("llama", torch.bfloat16, dict(tie_word_embeddings=True, rope_theta=500000.0), {}),
    "llama-llama3-bias": ("llama", torch.float32, dict(rope=LLAMA3, attention_bias=True, mlp_bias=True,
                                                       num_key_value_heads=4), {}),
    "llama-linear-head-dim": ("llama", torch.float16, dict(rope={"rope_type": "linear", "factor": 4.0}, head_dim=24,
                                                           rope_theta=1000.0), dict(old_config=True)),
    "llama-yarn-sharded": ("llama", torch.bfloat16, dict(rope=YARN, num_key_value_heads=1), dict(shard="40KB")),
    "mistral-window": ("mistral", torch.float16, dict(sliding_window=24), {}),
    "qwen2-window-yarn": ("qwen2", torch.bfloat16, dict(rope=dict(YARN, beta_fast=24, beta_slow=2, truncate=False),
                                                        use_sliding_window=True, sliding_window=40,
                                                        max_window_layers=1), dict(old_config=True)),
    "qwen2-tied-sharded": ("qwen2", torch.bfloat16, dict(tie_word_embeddings=True, rope_theta=1000000.0),
                           dict(shard="40KB")),
    "qwen3": ("qwen3", torch.bfloat16, dict(head_dim=32, rope_theta=1000000.0), {}),
}


def make_config(model_type, fields):
    fields = dict(fields)
    rope = dict(fields.pop("rope", {"rope_type": "default"}))
    rope["rope_theta"] = fields.pop("rope_theta", 10000.0)
    defaults = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=None, tie_word_embeddings=False,
        rope_parameters=rope)
    return AutoConfig.for_model(model_type, **{**defaults, **fields})


def randomise(model):
    """Weights such that attention is peaked (logits of q.k have a standard deviation near 3):
    with the usual 0.02 every key weighs the same and an error in RoPE would not show."""
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if "norm" in name:
            value = 1.0 + 0.2 * torch.randn(shape)
            if "q_norm" in name or "k_norm" in name:
                value += 0.6
        elif name.endswith("bias"):
            value = 0.3 * torch.randn(shape)
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.4 * torch.randn(shape)
        else:
            gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
            value = gain / math.sqrt(shape[1]) * torch.randn(shape)
        parameter.data.copy_(value)


def to_old_config(path):
    """config.json as transformers 4 wrote it: rope_theta, rope_scaling with "type", torch_dtype."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def all_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def greedy(model, prompt, count):
    """The continuation, and how far ahead of the second every choice was."""
    tokens, margin = list(prompt), math.inf
    for _ in range(count):
        top = all_logits(model, tokens)[-1].topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
    return tokens[len(prompt):], margin


def write_golden(model, tokens, positions, prompt, count, path):
    """tokens [N], positions [n], logits [n, vocab]; prompt tokens are the first `prompt` of them,
    generated [g], generated_logits [g, vocab] of the rows that chose them."""
    logits = all_logits(model, tokens)
    generated, margin = greedy(model, tokens[:prompt], count)
    assert margin > 0.005, f"{path}: a choice by {margin} only; take another prompt"
    steps = all_logits(model, tokens[:prompt] + generated)[prompt - 1:-1]
    keep = steps if logits.shape[1] <= 1024 else steps[-2:]
    save_file({
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "logits": logits[positions].contiguous(),
        "prompt": torch.tensor([prompt], dtype=torch.int32),
        "generated": torch.tensor(generated, dtype=torch.int32),
        "generated_logits": keep.contiguous(),
    }, path)
    spread = float(logits.std())
    print(f"{path.relative_to(ROOT)}: logits deviate by {spread:.2f}, margin {margin:.3f}")


def make_tiny(name, seed):
    model_type, dtype, fields, save = MODELS[name]
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(model_type, fields))
    randomise(model)
    model.to(dtype).save_pretrained(folder, max_shard_size=save.get("shard", "1GB"))
    if save.get("old_config"):
        to_old_config(folder / "config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(seed).integers(0, VOCAB, TOKENS).tolist()
    positions = [0, 1, 15, 33, 64, 127, 200, 255, 256, TOKENS - 1]
    write_golden(model, tokens, positions, 180, 24, folder / "golden.safetensors")


def make_trained(path):
    tokens = AutoTokenizer.from_pretrained(NANO)(BOOK.read_text(encoding="utf-8")[:20000]).input_ids[:2000]
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    write_golden(model, tokens, [0, 700, 1999], 400, 12, path)


def logits():
    torch.set_num_threads(2)
    for seed, name in enumerate(MODELS):
        make_tiny(name, seed + 1)
    make_trained(GOLDEN / "nano.safetensors")


def token_cosines(model, tokens):
    """[layers, tokens] cosine of the state before a layer's input norm with that state plus what
    the attention adds to it, from hooks on the modules of transformers."""
    before, added, hooks = {}, {}, []
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: before.__setitem__(
                i, (args[0] if args else kwargs["hidden_states"])[0].double()), with_kwargs=True))
        hooks.append(layer.self_attn.register_forward_hook(
            lambda _, args, out, i=i: added.__setitem__(i, out[0][0].double())))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    rows = [torch.nn.functional.cosine_similarity(before[i], before[i] + added[i], dim=1)
            for i in range(len(before))]
    return torch.stack(rows).numpy()


def profile():
    torch.set_num_threads(2)
    window, block = 300, 128
    tokens = AutoTokenizer.from_pretrained(NANO)(BOOK.read_text(encoding="utf-8")[:40000]).input_ids
    texts = [tokens[:700], tokens[5000:5350]]
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    cosines = [token_cosines(model, part[i:i + window])
               for part in texts for i in range(0, len(part), window)]
    blocks = [c[:, i:i + block] for c in cosines for i in range(0, c.shape[1], block)]
    weight = np.array([b.shape[1] for b in blocks]) / sum(b.shape[1] for b in blocks)
    means = np.stack([b.mean(axis=1) for b in blocks], axis=1)  # [layers, blocks]
    mean = np.concatenate(cosines, axis=1).mean(axis=1)
    spread = (weight ** 2 * (means - mean[:, None]) ** 2).sum(axis=1)
    error = np.sqrt(spread * len(blocks) / (len(blocks) - 1))
    path = GOLDEN.parent / "profile.json"
    path.write_text(json.dumps({"window": window, "texts": texts, "cosine": mean.tolist(),
                                "cosine_error": error.tolist()}) + "\n")
    print(f"{path.relative_to(ROOT)}: {mean.round(4).tolist()} +- {error.round(4).tolist()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["logits", "profile"])
    {"logits": logits, "profile": profile}[parser.parse_args().what]()
