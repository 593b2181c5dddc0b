"""What each layer of a model does: a pass over two tokens shows it. And the state that layers keep in a cache."""

import contextlib
import inspect
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from sqz.index import Layer

from .adapter import attention_function, decoder_of

_STATES = ("conv_states", "recurrent_states")  # of a layer of a cache: a dictionary of tensors each
_WINDOWS = ("sliding_attention", "hybrid_sliding")
State = dict[str, torch.Tensor]
_continue: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()  # models that check_continues() found right


@dataclass(frozen=True)
class Layers:
    """All layers of a model."""

    all: list[Layer]
    states: list[State]  # of one request, as state_of() returns them

    @property
    def calls(self) -> int:
        """How often a pass calls the attention function."""
        return sum(layer.kind not in ("state", "none") for layer in self.all)


def look(model: PreTrainedModel) -> Layers:
    """Runs the model over two tokens. ValueError, with the layer's name, for a layer that an index cannot describe."""
    decoder, config, name = decoder_of(model), model.config.get_text_config(decoder=True), type(model).__name__
    found: dict[int, Layer] = {}
    owners = list[tuple[torch.Tensor, int]]()
    kinds = layer_kinds(config)

    def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None = None, scaling: float | None = None, **options: Any) -> Any:
        number = number_of(module, len(kinds))
        if number in found:
            raise ValueError(f"{type(module).__name__} of layer {number} attends twice in a pass, expected once")
        _, window, chunk = kinds[number]
        usual = 1 / math.sqrt(query.shape[3])
        scale = usual if scaling is None or math.isclose(scaling, usual, rel_tol=1e-9) else scaling
        owner = next((of for keys, of in owners if keys is key), None)
        owners.append((key, number))
        layer = Layer("recent" if window or chunk else "full", query.shape[1], key.shape[1], query.shape[3],
                      value.shape[3], window, chunk, scale, None)
        check_call(module, query, key, value, scaling, options, layer)
        if attention_mask is not None and attention_mask.is_floating_point() and not attention_mask.is_meta and (
                (attention_mask > -1e4) & (attention_mask != 0)).any():
            raise ValueError(f"{type(module).__name__} of layer {number}: its mask holds a bias, which changes the "
                             "softmax as an index cannot serve it")
        found[number] = layer if owner is None else replace(layer, kind="shared", of=owner)
        return _stand_in(module, query, key, value)

    cache = new_cache(model)
    with torch.no_grad(), attention_function(decoder, attend), _without_experts(decoder):
        decoder.forward(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device),
                        **{cache_argument(decoder): cache}, use_cache=True)
    if not found:
        raise ValueError(f"{name}: no layer called the attention function of AttentionInterface, and only such layers "
                         "can be asked about a context")
    states = [state_of(cache, number) for number in range(len(kinds))]
    for number, (kind, _, _) in enumerate(kinds):
        cached = cache.layers[number] if number < len(cache.layers) else None
        if cached is not None and (type(cached).__module__ != DynamicCache.__module__ or
                                   hasattr(cached, "update_indexer")):
            raise ValueError(f"layer {number} of {name} ({kind}): its cache is a {type(cached).__name__}, expected "
                             "keys and values, conv_states or recurrent_states")
        if number not in found and not states[number] and kind not in ("moe", "mlp"):
            raise ValueError(f"layer {number} of {name} ({kind}) neither calls the attention function of "
                             "AttentionInterface nor keeps its state in its layer of the cache")
        found.setdefault(number, Layer("state" if states[number] else "none", 0, 0, 0, 0, 0, 0, 0.0, None))
    return Layers([found[number] for number in range(len(kinds))], states)


def check_continues(model: PreTrainedModel, layers: Layers) -> None:
    """ValueError if the first layer with a state answers two tokens alike whatever the state before them is, as Jamba's do."""
    number = next((number for number, state in enumerate(layers.states) if state), None)
    if number is None or model.device.type == "meta" or model in _continue:
        return
    decoder, tokens = decoder_of(model), torch.arange(2, device=model.device)[None]

    def answer(changed: str | None) -> torch.Tensor:
        states = [{name: tensor + (at == number and name == changed) for name, tensor in state.items()}
                  for at, state in enumerate(layers.states)]
        cache = new_cache(model)
        put_states(cache, states, 1)
        found = decoder.forward(input_ids=tokens, position_ids=tokens + 2, **{cache_argument(decoder): cache},
                                use_cache=True)
        return found.last_hidden_state

    with torch.no_grad(), attention_function(decoder, _stand_in):
        usual = answer(None)
        forgotten = [name for name in layers.states[number] if torch.equal(answer(name), usual)]
    if forgotten:
        raise ValueError(f"layer {number} of {type(model).__name__}: a prompt of several tokens begins without the "
                         f"{forgotten[0]} in its cache: transformers cannot continue a context with this model")
    _continue.add(model)


def _stand_in(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """For attention, where only what goes in matters."""
    means = query.mean(3, keepdim=True) + key.mean() + value.mean()
    return means.transpose(1, 2).expand(-1, -1, -1, value.shape[3]).contiguous(), None


@contextlib.contextmanager
def _without_experts(decoder: PreTrainedModel) -> Iterator[None]:
    """On the meta device nothing can be routed to experts: they return what they get."""
    experts = [module for name, module in decoder.named_modules() if name.endswith("experts")
               ] if decoder.device.type == "meta" else []
    for module in experts:
        vars(module)["forward"] = lambda hidden_states, *_, **__: hidden_states
    try:
        yield
    finally:
        for module in experts:
            del vars(module)["forward"]


def layer_kinds(config: Any) -> list[tuple[str, int, int]]:
    """Of each layer its kind, by transformers' name, the tokens that a query sees (its own included), and those of a
    chunk; 0 = all."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = window if getattr(config, "use_sliding_window", True) else 0
        return [("attention", window, 0)] * config.num_hidden_layers
    chunk = getattr(config, "attention_chunk_size", None) or 0
    return [(kind, window if kind in _WINDOWS else 0, chunk if kind == "chunked_attention" else 0) for kind in kinds]


def number_of(module: torch.nn.Module, layers: int) -> int:
    """Of the layer that calls the attention function."""
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int) or not 0 <= number < layers:
        raise ValueError(f"{type(module).__name__}: layer_idx: found {number}, expected 0 to {layers - 1}")
    return number


def check_call(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               scaling: float | None, options: dict[str, Any], layer: Layer) -> None:
    """ValueError unless a call to the attention function computes what an index says of the layer.

    query: [batch, query heads, tokens, head_dim]; key, value: [batch, KV heads, keys, head_dim]. options: the
    function's other keyword arguments.
    """
    name = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', None)}"
    found = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    expected = (layer.query_heads, layer.kv_heads, layer.head_dim, layer.value_dim)
    if found != expected:
        raise ValueError(f"{name}: found query heads, KV heads, head_dim of keys and of values {found}, expected "
                         f"{expected}")
    scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
    if not math.isclose(scale, layer.scale, rel_tol=1e-6):
        raise ValueError(f"{name}: scaling: found {scale}, expected {layer.scale}")
    for option in ("softcap", "position_bias", "head_mask"):
        if options.get(option) is not None:
            raise ValueError(f"{name}: {option} is given, which changes the softmax as an index cannot serve it")
    window = options.get("sliding_window", layer.window) or 0
    if window != layer.window:
        raise ValueError(f"{name}: sliding_window: found {window}, expected {layer.window}")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{name} is not causal")


# ---- caches ----

def cache_argument(decoder: PreTrainedModel) -> str:
    """Its name in the decoder's call: another one from transformers 5.24 on."""
    names = inspect.signature(decoder.forward).parameters
    return next(name for name in ("past_key_values", "cache") if name in names)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def state_of(cache: DynamicCache, number: int) -> State:
    """The state of the first request in a layer, by the names that it has in an index; without keys and values."""
    layer = cache.layers[number] if number < len(cache.layers) else None
    return {f"{name}_{place}": tensor[0] for name in _STATES
            for place, tensor in getattr(layer, name, {}).items() if tensor is not None}


def put_states(cache: DynamicCache, states: list[State], batch: int) -> None:
    """Into a fresh cache, for each of `batch` requests."""
    for number, state in enumerate(states):
        for name, tensor in state.items():
            kind, _, place = name.rpartition("_")
            update = cache.update_conv_state if kind == _STATES[0] else cache.update_recurrent_state
            update(tensor.expand(batch, *tensor.shape), number, state_idx=int(place))
