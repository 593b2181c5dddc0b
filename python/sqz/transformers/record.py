"""One dense pass over a fixed context: keys, values and the last queries of each layer, as they come."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .adapter import attention_function, decoder_of
from .attention import over_a_context
from .layers import Layers, State, cache_argument, check_call, new_cache, number_of, state_of


def record(model: PreTrainedModel, layers: Layers, tokens: np.ndarray, queries: int,
           take: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None], None],
           attention: Callable[..., Any] | None = None) -> list[State]:
    """Runs the model once over `tokens` (of context_tokens()); layers: look(model). Returns the layers' states.

    take(layer, keys, values, queries) is called in order for each layer that has keys: keys [KV heads, tokens,
    head_dim], values [KV heads, tokens, value_dim], and the last `queries` queries [query heads, queries, head_dim],
    after RoPE, on the model's device and in its dtype; of a sliding or chunked layer the last keys and values, those
    that the next token sees and perhaps one more, and no queries. They are valid during the call. attention: the
    function of the layers, None = dense. ValueError for a model that an index cannot serve.
    """
    decoder, count = decoder_of(model), len(tokens)
    if attention is None and "_sqz_context" in vars(decoder):
        raise RuntimeError(f"{type(model).__name__} has a FixedContext open: close it first")
    waiting = [number for number, layer in enumerate(layers.all) if layer.kind not in ("state", "none")]

    def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None = None, scaling: float | None = None, **options: Any) -> Any:
        number = number_of(module, len(layers.all))
        layer = layers.all[number]
        check_call(module, query, key, value, scaling, options, layer)
        if number != waiting.pop(0):
            raise ValueError(f"{type(model).__name__}: layer {number} attended out of turn: each layer must attend "
                             "once, in order")
        first = max(0, count - layer.window) if layer.window else count - count % layer.chunk if layer.chunk else 0
        if layer.kind != "shared":
            take(number, key[0, :, first:], value[0, :, first:],
                 query[0, :, count - queries:] if layer.kind == "full" else None)
        if attention is not None:
            return attention(module, query, key, value, attention_mask, scaling=scaling, **options)
        return over_a_context(query, key, value, layer, options.get("s_aux")), None

    given: dict[str, Any] = {"use_cache": False}
    cache = new_cache(model)
    if any(layers.states):
        given = {"use_cache": True, cache_argument(decoder): cache}
        for layer in cache.layers:
            if hasattr(layer, "update"):  # it keeps no keys and values
                vars(layer)["update"] = lambda keys, values, *_, **__: (keys, values)
    with torch.inference_mode(), attention_function(decoder, attend, masks=attention is not None):
        decoder(input_ids=torch.from_numpy(tokens)[None].long().to(model.device), **given)
    if waiting:
        raise ValueError(f"{type(model).__name__}: layer {waiting[0]} did not call the attention function")
    return [state_of(cache, number) for number in range(len(layers.all))]


def context_tokens(input_ids: Any, model: dict[str, Any], config: Any) -> np.ndarray:
    """[tokens] int32 of a tensor, an array or a list; ValueError if they are no context of the model.

    model: its description.
    """
    if isinstance(input_ids, str):
        raise ValueError("input_ids: found text, expected token ids: tokenizer(text, return_tensors=\"pt\").input_ids")
    ids = input_ids.cpu().numpy() if isinstance(input_ids, torch.Tensor) else np.asarray(input_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids: found shape {list(ids.shape)} of {ids.dtype}, expected [tokens] or [1, tokens] "
                         "of integers")
    if ids.min() < 0 or ids.max() >= model["vocab_size"]:
        raise ValueError(f"input_ids: found {ids.min()} to {ids.max()}, expected 0 to {model['vocab_size'] - 1}, the "
                         "vocabulary of the model: use the tokenizer of its folder")
    if 0 < model["max_positions"] < ids.size:
        raise ValueError(f"input_ids: found {ids.size} tokens, expected at most {model['max_positions']}, the model's "
                         "positions: give less text")
    for kind in ("image", "video", "audio"):
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None and (ids == token).any():
            raise ValueError(f"input_ids: found {token}, the model's {kind} token, expected a context of text alone")
    return ids.astype(np.int32)
