"""Where an attention function goes in a transformers model, and which models it cannot serve."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

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
    decoder = getattr(model, "model", model.base_model) if decoder is model else decoder  # Llama4ForCausalLM, GPT-2
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{type(decoder).__name__} takes no position_ids: what follows a context cannot be moved "
                         "behind it")
    config = model.config.get_text_config(decoder=True)
    for field in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, field, None):
            raise ValueError(f"{name}: {field} is {getattr(config, field)}: soft-capped logits cannot be served, "
                             "because those of an index are scale times q.k")
    return decoder


@contextlib.contextmanager
def attention_function(decoder: PreTrainedModel, function: Callable[..., Any], masks: bool = True) -> Iterator[None]:
    """Within the block, the decoder's layers call `function`, with the masks that scaled_dot_product_attention gets.

    masks: without, they get none, and no memory is needed for them.
    The name is new each time, so that code compiled for one function is never run with another.
    """
    name = f"sqz-{next(_names)}"
    configs = {id(module.config): module.config for module in decoder.modules()
               if hasattr(getattr(module, "config", None), "_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    AttentionInterface.register(name, function)
    if masks:
        AttentionMaskInterface.register(name, sdpa_mask)
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
