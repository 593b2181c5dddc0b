"""One dense pass over a fixed context: keys, values and the last queries of each layer, as they come."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .adapter import attention_function, check_call, decoder_of


def record(model: PreTrainedModel, description: dict[str, Any], tokens: np.ndarray, queries: int,
           take: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None],
           attention: Callable[..., Any] | None = None) -> None:
    """Runs the model once over `tokens` (of context_tokens()); description: describe(model).

    take(layer, keys, values, queries) is called for layer 0, 1, ... with keys and values [KV heads, tokens, head_dim]
    and the last `queries` queries [query heads, queries, head_dim], after RoPE, on the model's device and in its dtype.
    They are valid during the call. attention: the function of the layers, None = torch's. ValueError for a model that
    an index cannot serve.
    """
    decoder, layers, done = decoder_of(model), description["layers"], 0

    def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None, **options: Any) -> Any:
        nonlocal done
        layer = check_call(module, query, key, value, scaling, options, description)
        if layer != done:
            raise ValueError(f"{type(model).__name__}: layer {layer} attended where layer {done} was expected: each "
                             "layer must attend once, in order")
        take(layer, key[0], value[0], query[0, :, len(tokens) - queries:])
        done += 1
        return (attention or sdpa_attention_forward)(module, query, key, value, attention_mask, scaling=scaling, **options)

    with torch.inference_mode(), attention_function(decoder, attend):
        decoder(input_ids=torch.from_numpy(tokens)[None].long().to(model.device), use_cache=False)
    if done != layers:
        raise ValueError(f"{type(model).__name__}: {done} of {layers} layers called the attention function: "
                         "the others compute something that an index does not hold")


def context_tokens(input_ids: Any, model: dict[str, Any]) -> np.ndarray:
    """[tokens] int32 of a tensor, an array or a list; ValueError if they are no context of the model."""
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
    return ids.astype(np.int32)
