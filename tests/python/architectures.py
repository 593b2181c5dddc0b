"""Tiny models of the architectures that are served, their answers over a whole context, and README.md's table."""

import contextlib
import math

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import sqz

QUESTIONS, TOKENS, ANSWER = 10, 12, 24
# Tokens of a context, and those of a window or chunk: what is asked leaves the short one, and crosses the long one.
CONTEXTS = {200: 24, 130: 160}

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1}
EQUAL = {"num_key_value_heads": 4}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
          "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16}
DELTA = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_expand": 2}
CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
MLA = {**EQUAL, "head_dim": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
KDA = {**MLA, **EXPERTS, "n_group": 1, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"] * 2,
       "linear_head_dim": 16, "linear_num_heads": 4}
CHUNKED = {"intermediate_size_mlp": 96, "num_local_experts": 2, "floor_scale": 64}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "num_position_embeddings": 16}

# The rows of README.md's table: (family, layers, vLLM, {model type: configuration}). What follows a slash tells two models
# of one type apart. vLLM: what was run there.
FAMILIES = [
    ("Llama, Mistral, Qwen2, Qwen3", "full", "0.25.1 on an H200",
     {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": {**EXPERTS, "num_attention_heads": 32}}),
    ("Qwen3.5 to 3.8, Qwen3-Next, OLMo Hybrid", "gated delta net, full",
     "`qwen3_5_text` on a CPU, `qwen3_next` on an H100",
     {"qwen3_5_text": DELTA, "qwen3_5_moe_text": {**DELTA, **EXPERTS}, "qwen3_next": {**DELTA, **EXPERTS},
      "olmo_hybrid": DELTA, "qwen3_5": {"text_config": DELTA, "vision_config": VISION}}),
    ("gpt-oss, Granite SWA", "sliding and full, with sinks", "`gpt_oss` on a CPU and an H100",
     {"gpt_oss": {**SLIDING, **EXPERTS}, "granite_swa": {**SLIDING, "attention_multiplier": 0.25},
      "granitemoe_swa": {**SLIDING, **EXPERTS, "attention_multiplier": 0.25}}),
    ("Gemma 3, 3n and 4", "sliding, full of another shape, shared keys", "`gemma3_text` on a CPU and an H100",
     {"gemma3_text": SLIDING, "gemma3n_text": SHARED, "gemma4_text": {
         **SLIDING, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "hidden_size_per_layer_input": 0}, "gemma4_text/E": {**SHARED, "global_head_dim": 512}}),
    ("GLM-4.5, MiniMax-M2, Hy3, Seed-OSS, Solar Open", "full, 10 or 12 query heads a KV head", "`glm4_moe` on an H100",
     {"glm4_moe": {**EXPERTS, "num_attention_heads": 24}, "minimax_m2": {**EXPERTS, "head_dim": 80}, "hy_v3": {
         **EXPERTS, "num_attention_heads": 20, "head_dim": 80}, "seed_oss": {"num_attention_heads": 20},
      "solar_open": {**EXPERTS, "num_attention_heads": 24}}),
    ("Nemotron 3, Granite 4 H, Falcon-H1, Bamba", "Mamba2, full, some without RoPE",
     "`granitemoehybrid`, `falcon_h1` on a CPU, `nemotron_h`, `falcon_h1` on an H100",
     {"nemotron_h": {**EXPERTS, "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
                     "num_attention_heads": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
                     "n_groups": 1, "chunk_size": 16},
      "granitemoehybrid": {**MAMBA, **EXPERTS, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
      "falcon_h1": MAMBA, "bamba": {**MAMBA, "attn_layer_indices": [2]}}),
    ("MiMo-V2-Flash, Laguna, EXAONE 4 and MoE, AFM", "sliding and full, two thetas, full ones without RoPE", "",
     {"mimo_v2_flash": {**SLIDING, **EXPERTS, "head_dim": 192, "v_head_dim": 128}, "laguna": {**SLIDING, **EXPERTS},
      "exaone4": SLIDING, "exaone_moe": {**SLIDING, **EXPERTS}, "afmoe": {**SLIDING, **EXPERTS}}),
    ("Cohere 2, OLMo 3, Ministral 3, SmolLM3", "sliding and full", "",
     {"cohere2": SLIDING, "olmo3": SLIDING, "ministral3": {}, "smollm3": {}}),
    ("Kimi Linear, Bailing Hybrid", "KDA, latent attention", "",
     {"kimi_linear": KDA, "kimi_linear/q": {**KDA, "q_lora_rank": 32}, "bailing_hybrid": KDA}),
    ("ZAYA", "full, each with a convolution", "", {"zaya": {"num_experts": 4, "num_experts_per_tok": 1}}),
    ("DeepSeek V3", "latent attention", "", {"deepseek_v3": {**MLA, **EXPERTS, "n_group": 1, "topk_group": 1}}),
    ("LFM2 and 3", "short convolutions, full", "", {"lfm2": CONV, "lfm3": CONV, "lfm2_moe": {**CONV, **EXPERTS}}),
    ("Llama 4", "chunked, full without RoPE", "",
     {"llama4_text": CHUNKED, "llama4_text/q": {**CHUNKED, "num_attention_heads": 10}}),
    (("Apertus, Arcee, Cohere, Ernie 4.5, Gemma, GLM, GPT-2, GPT-NeoX, Granite, Helium, Mixtral, OLMo, Persimmon, Phi, "
      "Starcoder2 and more"), "full", "",
     {"apertus": {}, "arcee": {}, "cohere": {}, "ernie4_5": {}, "gemma": {}, "glm": {}, "glm4": {}, "gpt_neox": EQUAL,
      "gpt2": {**EQUAL, "n_positions": 1024}, "granite": {"attention_multiplier": 0.2}, "helium": {}, "mixtral": {},
      "nemotron": {}, "olmo": {}, "olmo2": {}, "olmoe": {}, "persimmon": EQUAL, "phi": {}, "phi3": {}, "stablelm": {},
      "starcoder2": {}}),
]
MODELS = {name: given for *_, models in FAMILIES for name, given in models.items()}


def table():
    """The lines of README.md's table."""
    rows = [("family", "layers", "vLLM", "model types that were run")]
    rows += [(family, layers, vllm or "not run",
              ", ".join(f"`{name}`" for name in dict.fromkeys(name.partition("/")[0] for name in models)))
             for family, layers, vllm, models in FAMILIES]
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:])]


def windowed(name):
    return MODELS[name].get("layer_types", [])[:1] == ["sliding_attention"] or name.startswith("llama4")


def make(name, window, width=64, **changed):
    """A model with random weights, 4 query heads and width / 4 dimensions a head, where the table says nothing else.
    changed: what its configuration has in place of the table's."""
    small = {"vocab_size": 320, "hidden_size": width, "intermediate_size": 96, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4,
             "max_position_embeddings": 1024, "initializer_range": 0.3 * math.sqrt(64 / width),
             "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
             "mamba_d_head": width // 4, "mamba_d_ssm": 2 * width}
    if windowed(name):
        small["attention_chunk_size" if name.startswith("llama4") else "sliding_window"] = window
    given = {**MODELS[name], **changed}
    if "vision_config" in given:
        given = {"text_config": {**small, **given["text_config"]},
                 "vision_config": {**given["vision_config"], "out_hidden_size": width}}
    kind = name.partition("/")[0]
    config = transformers.AutoConfig.for_model(kind, **(given if "text_config" in given else {**small, **given}))
    torch.manual_seed(1)
    auto = transformers.AutoModelForImageTextToText if "vision_config" in given else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    for parameter in (value for key, value in model.named_parameters() if key.endswith("sinks")):
        torch.nn.init.uniform_(parameter, 8, 16)  # about as much as all keys together
    model.generation_config.eos_token_id = None  # answers have all their tokens
    model.generation_config.pad_token_id = 0
    return model


def ask(model, ids, **options):
    """The tokens that follow each row of ids, a list each."""
    options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **options)[:, ids.shape[1]:].tolist()


def ask_padded(model, ids):
    """ask() with padding on the left of each row."""
    pad = torch.nn.functional.pad
    return ask(model, pad(ids, (5, 0)), attention_mask=pad(torch.ones_like(ids), (5, 0)))


def with_state(made):
    """Whether the index of a build has a layer with a state, which refuses padding."""
    with sqz.Index(made.path) as index:
        return any(index.state(layer) for layer in range(index.info.layers))


def cache_of(model, context, copies):
    """The model's cache of a context [1, tokens], as many times."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(context, past_key_values=cache, position_ids=torch.arange(context.shape[1], device=context.device)[None],
              use_cache=True, logits_to_keep=1)
        for layer in cache.layers:
            for name in ("keys", "values"):
                if getattr(layer, name, None) is not None:
                    setattr(layer, name, getattr(layer, name).repeat_interleave(copies, 0))
            for name in ("conv_states", "recurrent_states"):
                for place, state in getattr(layer, name, {}).items():
                    if state is not None:
                        getattr(layer, name)[place] = state.repeat_interleave(copies, 0)
    return cache


def whole_answers(model, context, questions, dtype=torch.float16):
    """The same over the whole context [1, tokens], its keys and values rounded as in the index; and the logits that
    they were chosen from, [answer tokens, questions, vocabulary]."""
    with torch.inference_mode(), plain_attention(model, context.shape[1], dtype):
        cache = cache_of(model, context, len(questions))
        whole = torch.cat([context.expand(len(questions), -1), questions], 1)
        found = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=ANSWER, do_sample=False,
                               past_key_values=cache, return_dict_in_generate=True, output_logits=True)
    return found.sequences[:, whole.shape[1]:].tolist(), torch.stack(found.logits).float()


def count_equal(found, expected, logits):
    """The answers that are equal in all tokens, or up to one that was as good as the other to float32's rounding."""
    count = 0
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        place = next((place for place in range(len(theirs)) if ours[place] != theirs[place]), None)
        count += place is None or bool(logits[place, row, theirs[place]] - logits[place, row, ours[place]] < 2e-3)
    return count


@contextlib.contextmanager
def plain_attention(model, tokens, dtype):
    """Attention as its definition says, with sinks, and with the first `tokens` keys and values rounded."""
    behind = 0  # tokens of the pass, and of those before, that are not the first

    def attend(module, query, key, value, attention_mask=None, scaling=None, s_aux=None, **_):
        front = key.shape[2] - behind if behind > 0 else 0
        group = query.shape[1] // key.shape[1]
        key, value = (torch.cat([part[:, :, :front].to(dtype).to(part.dtype), part[:, :, front:]], 2) if front > 0 else
                      part for part in (key, value))
        key, value = (part.repeat_interleave(group, 1).float() for part in (key, value))
        logits = query.float() @ key.mT * (1 / math.sqrt(query.shape[3]) if scaling is None else scaling)
        if attention_mask is not None:
            logits = logits + attention_mask[..., :key.shape[2]]
        if s_aux is not None:
            logits = torch.cat([logits, s_aux.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], 3)
        out = logits.softmax(-1)[..., :key.shape[2]] @ value
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    def count(_, args, kwargs):
        nonlocal behind
        behind = int(kwargs["position_ids"].max()) + 1 - tokens

    AttentionInterface.register("plain", attend)
    AttentionMaskInterface.register("plain", eager_mask)
    configs = {id(module.config): module.config for module in model.modules()
               if hasattr(getattr(module, "config", None), "_attn_implementation")}.values()
    before = [config._attn_implementation for config in configs]
    from sqz.transformers.adapter import decoder_of

    hook = decoder_of(model).register_forward_pre_hook(count, with_kwargs=True)
    try:
        for config in configs:
            config._attn_implementation = "plain"
        yield
    finally:
        hook.remove()
        for config, name in zip(configs, before):
            config._attn_implementation = name
