"""Where an attention function goes in a transformers model, and which models it cannot serve."""

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from .fingerprint import rope_parameters

_names = itertools.count(1)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module that has the layers and takes position_ids. Models that cannot be served: TypeError or ValueError."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: found {type(model).__name__}, expected a model of transformers (a PreTrainedModel)")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder: only decoder-only models attend to a fixed context")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{name} has an adapter, which changes keys and values: merge it into the weights, save and "
                         "load the model, and capture with it")
    if model.training:
        raise ValueError(f"{name} is in training mode: call model.eval() first")
    decoder = model.get_decoder()
    decoder = model.base_model if decoder is model else decoder
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{type(decoder).__name__} takes no position_ids: what follows a context cannot be moved "
                         "behind it")
    if not any(_holds_positions(module) for module in decoder.modules()):
        raise ValueError(f"{type(decoder).__name__}: found neither a rotary nor a learned position embedding, expected "
                         "one of them")
    config = model.config.get_text_config(decoder=True)
    for field in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, field, None):
            raise ValueError(f"{name}: {field} is {getattr(config, field)}: soft-capped logits cannot be served, "
                             "because those of an index are scale times q.k")
    return decoder


def _holds_positions(module: torch.nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "rotary" in name or any("inv_freq" in buffer for buffer, _ in module.named_buffers(recurse=False)) or (
        "positional" in name or isinstance(getattr(module, "wpe", None), torch.nn.Embedding))


def check_longrope(config: Any, context: int, total: int) -> None:
    """Keys turned by the short frequencies do not fit queries turned by the long ones: ValueError."""
    rope = rope_parameters(config)
    if rope["rope_type"] != "longrope":
        return
    original = int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    if context <= original < total:
        raise ValueError(f"longrope changes its frequencies after {original} tokens: a context of {context} tokens is "
                         f"before, {total} tokens with what follows are after")


def check_call(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               scaling: float | None, options: dict[str, Any], model: dict[str, Any]) -> int:
    """The layer of a call to the attention function; ValueError if an index cannot say what the layer computes.

    query: [batch, query heads, tokens, head_dim]; key, value: [batch, KV heads, keys, head_dim]. model: its
    description. options: the function's other keyword arguments.
    """
    layer = getattr(module, "layer_idx", None)
    name = f"{type(module).__name__} of layer {layer}"
    if not isinstance(layer, int) or not 0 <= layer < model["layers"]:
        raise ValueError(f"{type(module).__name__}: layer_idx: found {layer}, expected 0 to {model['layers'] - 1}")
    found = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    expected = (model["query_heads"], model["kv_heads"], model["head_dim"], model["head_dim"])
    if found != expected:
        raise ValueError(f"{name}: found query heads, KV heads, head_dim of keys and of values {found}, expected "
                         f"{expected}")
    scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
    if not math.isclose(scale, model["attention_scale"], rel_tol=1e-6):
        raise ValueError(f"{name}: scaling: found {scale}, expected {model['attention_scale']}, as in all layers")
    for option in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(option) is not None:
            raise ValueError(f"{name}: {option} is given, which changes the softmax as an index cannot serve it")
    window = options.get("sliding_window") or 0
    if window not in (0, model["sliding_window"][layer]):
        raise ValueError(f"{name}: sliding_window: found {window}, expected {model['sliding_window'][layer]}")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{name} is not causal")
    return layer


@contextlib.contextmanager
def attention_function(decoder: PreTrainedModel, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, the decoder's layers call `function`, with the masks that scaled_dot_product_attention gets.

    The name is new each time, so that code compiled for one function is never run with another.
    """
    name = f"sqz-{next(_names)}"
    configs = {id(module.config): module.config for module in decoder.modules()
               if hasattr(getattr(module, "config", None), "_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it there are no masks at all
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
