"""Dense sessions give transformers' own greedy tokens over the whole context, for models that sqz-index cannot run."""

import pytest
from transformers_support import answers, build, load, torch, transformers, whole_answers

import sqz.transformers

CONTEXT, QUESTIONS, TOKENS = 400, 10, 12
SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3,
         "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MANY = {"num_key_value_heads": 4}
# These call the attention function from transformers 5 on.
SINCE_5 = {"nemotron", "olmoe", "stablelm"}
# Model type, and what its configuration has beside SMALL.
MODELS = {
    "apertus": {}, "arcee": {}, "cohere": {}, "ernie4_5": {}, "gemma": {"head_dim": 16}, "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16}, "granite": {"attention_multiplier": 0.2}, "helium": {"head_dim": 16}, "mixtral": {},
    "nemotron": {}, "olmo": {}, "olmo2": {}, "olmoe": {}, "phi": {}, "phi3": {}, "qwen3_moe": {"head_dim": 16},
    "seed_oss": {"head_dim": 16}, "smollm3": {}, "stablelm": {}, "starcoder2": {},
    # As many KV heads as query heads; the last has learned positions.
    "gpt_neox": MANY, "persimmon": MANY, "gpt2": {**MANY, "n_positions": 1024},
    # Layers with a sliding window beside full ones.
    "gemma3_text": {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "num_hidden_layers": 4},
    "cohere2": {"sliding_window": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "olmo3": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", MODELS)
def test_dense_is_transformers_over_the_whole_context(kind, tmp_path):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind]})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model")
    context = torch.randint(3, 320, (1, CONTEXT))
    if kind in SINCE_5 and transformers.__version__.startswith("4."):
        with pytest.raises(ValueError, match="0 of 3 layers called the attention function"):
            sqz.transformers.capture(model, context, tmp_path / "context.h5")
        assert not list(tmp_path.glob("*.h5*"))
        return
    sqz.transformers.capture(model, context, tmp_path / "context.h5")
    index = build(tmp_path / "context.h5", tmp_path / "context.sqz")

    questions = torch.randint(3, 320, (QUESTIONS, TOKENS))
    expected = whole_answers(model, context, questions)
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as fixed:
        assert answers(model, questions) == expected
        assert fixed.stats().delivered_budget == 1
    # The context matters: without it other tokens follow.
    assert sum(a != b for a, b in zip(answers(model, questions), expected)) > QUESTIONS / 2
