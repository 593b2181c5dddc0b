"""FixedContext: a model of transformers answers as if the context of an index stood in front."""

import inspect
import math
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import sqz
from sqz._arguments import MOST_CONTEXTS, one_behind_the_other

from .adapter import attention_function, decoder_of
from .attention import additive_bias, own_state, rows_of, seen, with_sinks
from .fingerprint import check_longrope, check_match, describe, tokenizer_hash
from .layers import cache_argument, check_call, check_continues, look, new_cache, put_states
from .serving import Serving, real_tokens


class FixedContext:
    """Until close(), or the end of its block, every forward pass of `model` follows the fixed context of `index`.

        with FixedContext(model, "manual.sqz", budget=0.125) as context:
            model.generate(**tokenizer(question, add_special_tokens=False, return_tensors="pt"))
        print(context.stats().delivered_budget)

    model: a decoder-only model, float32, float16 or bfloat16, on the CPU or one CUDA device, in evaluation mode.
    index: a path, or an sqz.Index that stays open (and, once uploaded, on the GPU) from one context to the next; or
        several, documents that stand one behind the other although each was built alone.
    contexts: for each row of a batch the numbers of its documents among `index`, in their order: [[0], [2, 0], []].
        None: every row has all. It may be set anew between calls.
    tokenizer: if given and the index knows the hash of its own, both must be equal.
    session: what sqz.Session takes: budget, keep, selector, rule, ... `device` is the model's.

    An index that was made `after` others follows them in each row, directly, or is refused.

    Raises sqz.Error for an index that cannot be read or a session that cannot be had, and TypeError or ValueError for
    a model or tokenizer that does not fit; the model is then as before. So it is after close().
    A context serves one generate() at a time; others wait. close() while another thread generates makes that
    generate() raise RuntimeError, and waits for it. A closed context can be entered again.
    """

    def __init__(self, model: PreTrainedModel,
                 index: str | os.PathLike[str] | sqz.Index | Sequence[str | os.PathLike[str] | sqz.Index], *,
                 contexts: Sequence[Sequence[int]] | None = None, tokenizer: Any = None, _from_zero: bool = False,
                 **session: Any) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, session
        self._given = list(index) if isinstance(index, Sequence) and not isinstance(index, str) else [index]
        if not self._given:
            raise ValueError("index: found no index, expected at least one")
        self.contexts, self._from_zero = contexts, _from_zero  # positions that follow begin with 0
        self._lock = threading.RLock()
        self._generating: int | None = None  # the thread that does
        self._running: int | None = None  # the thread in a forward pass, which holds the lock
        self._open = self._entered = False
        self._begin()

    def __enter__(self) -> "FixedContext":
        if self._entered:
            raise RuntimeError("this FixedContext is open already")
        if not self._open:
            self._begin()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """The model is as before. Nothing happens the second time."""
        if self._generating == threading.get_ident():
            raise RuntimeError("a FixedContext cannot be closed by the generate() that it serves: close it after that")
        if not self._open:
            return
        self._end_pass()
        self._open = self._entered = False  # a generate() of another thread raises at its next forward pass
        with self._lock, self._closing:
            self._last = {(layer, slot): self._session.stats(layer, slot) for slot in range(len(self._given))
                          for layer in range(-1, self._info.layers)}

    def stats(self, layer: int = -1, document: int = 0) -> sqz.Stats:
        """What was asked and read of one of the indexes since the beginning or reset_stats(), until now or close(): of
        one layer or all (-1)."""
        return self._session.stats(layer, document) if self._open else self._last[layer, document]

    def reset_stats(self) -> None:
        self._session.reset_stats()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model cannot be copied or pickled while a FixedContext is open on it: close that first")

    # ---- beginning ----

    def _begin(self) -> None:
        self._decoder = decoder_of(self._model)
        if "_sqz_context" in self._decoder.__dict__:
            raise RuntimeError(f"{type(self._model).__name__} has another FixedContext open: one model follows one "
                               "context at a time; close the other first")
        with ExitStack() as stack:
            indexes = [one if isinstance(one, sqz.Index) else stack.enter_context(sqz.Index(one))
                       for one in self._given]
            self._layers = look(self._model)
            check_continues(self._model, self._layers)
            self._config = self._model.config.get_text_config(decoder=True)
            self._described = describe(self._model, self._layers)
            for index in indexes:
                self._check_match(index)
            self._check_composition()
            self._infos, self._info = [index.info for index in indexes], indexes[0].info
            self._check_length(1)
            self._session = stack.enter_context(self._new_session(indexes))
            self._install(stack)
            self._closing = stack.pop_all()
        self._open = True

    def _check_match(self, index: sqz.Index) -> None:
        info = index.info
        check_match(index, self._described, "this model")
        for number, state in enumerate(self._layers.states):
            own, stored = ({name: (list(one.shape), str(one.dtype)) for name, one in tensors.items()}
                           for tensors in (state, index.state(number)))
            if own != stored:
                raise ValueError(f"{info.path}: state of layer {number}: the index has {stored}, this model {own}")
        if self._tokenizer is not None and info.tokenizer_hash not in ("", found := tokenizer_hash(self._tokenizer)):
            raise ValueError(f"{info.path}: tokenizer_hash: the index was built with {info.tokenizer_hash}, this "
                             f"tokenizer has {found}")

    def _check_composition(self) -> None:
        """A state, and the bounds of chunks, are those of one context that stands in front of everything."""
        several = len(self._given) > 1 or self._from_zero or self.contexts is not None
        odd = next((number for number, layer in enumerate(self._layers.all)
                    if layer.chunk or self._layers.states[number]), None)
        if several and odd is not None:
            kept = "a state" if self._layers.states[odd] else "chunks"
            raise ValueError(f"layer {odd} of {type(self._model).__name__} keeps {kept}: such a model follows one "
                             "context, the same in all rows of a batch")

    def _new_session(self, indexes: list[sqz.Index]) -> sqz.Session:
        """On the model's device, with the indexes there."""
        devices = {parameter.device for parameter in self._model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            raise ValueError(f"model: found on {', '.join(sorted(map(str, devices)))}, expected the CPU or one CUDA "
                             "device")
        self._device = device = next(iter(devices))
        if self._model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"model: found {self._model.dtype}, expected float32, float16 or bfloat16")
        given = self._options.get("device", device)
        asked = torch.device("cpu" if given is None else given)
        if (asked.type, asked.index or 0) != (device.type, device.index or 0):
            raise ValueError(f"device: found {asked}, expected {device}, the model's")
        self._states = [{name: tensor.to(device) for name, tensor in indexes[0].state(number).items()}
                        for number in range(len(self._layers.all))]
        if device.type == "cuda":
            for index in set(indexes):
                try:
                    index.upload(device.index or 0)
                except sqz.Error as error:
                    if "is already" not in str(error):
                        raise
        several = min(len(indexes), MOST_CONTEXTS) + self._from_zero
        options: dict[str, Any] = {"max_contexts": several, **self._options, "device": str(device)}
        session = sqz.Session(indexes[0], **options)
        for slot, index in enumerate(indexes[1:], 1):
            session.put(slot, index)
        return session

    def _document(self, number: int) -> sqz.IndexInfo:
        if not 0 <= number < len(self._infos):
            raise ValueError(f"contexts: found document {number}, expected 0 to {len(self._infos) - 1}")
        return self._infos[number]

    def _rows(self, batch: int) -> list[tuple[sqz.Context, ...]] | None:
        """The contexts of each row of a batch; None: all have the only index."""
        if self.contexts is None and len(self._given) == 1 and not self._from_zero:
            return None
        self._check_composition()
        given = [range(len(self._given))] if self.contexts is None else self.contexts
        if len(given) == 0 or batch % len(given) != 0:
            raise ValueError(f"contexts: found those of {len(given)} rows, expected {batch}, the rows of the batch")
        rows = []
        for documents in given:
            row, tokens = one_behind_the_other([(number, self._document(number)) for number in documents])
            if self._from_zero:
                row = tuple(one._replace(offset=one.offset - tokens) for one in row)
            rows += [row] * (batch // len(given))  # a row and its beams follow each other
        return rows

    def _length_of(self, row: tuple[sqz.Context, ...]) -> int:
        """Where what follows begins."""
        return row[-1].offset + self._infos[row[-1].slot].tokens if row else 0

    def _install(self, stack: ExitStack) -> None:
        """Changes the model; the stack undoes it."""
        model, decoder = self._model, self._decoder
        self._chunks = any(layer.chunk for layer in self._layers.all)
        needs_positions = (any(layer.window or layer.chunk for layer in self._layers.all) or
                           self._info.partition == "buckets")
        self._serving = Serving(self._session, self._options, needs_positions)
        self._mask: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._checked: set[int] = set()
        self._modules = {id(module): getattr(module, "attn_temperature_tuning", False) and not module.use_rope
                         for module in decoder.modules()}
        self._calls = 0
        stack.enter_context(attention_function(decoder, self._attend))
        stack.callback(decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(self._after_forward, always_call=True).remove)
        self._generate = model.generate
        stack.callback(vars(model).update, {name: own for name, own in vars(model).items() if name == "generate"})
        model.generate = self._generate_alone
        stack.callback(model.__dict__.pop, "generate", None)
        decoder._sqz_context = self
        stack.callback(decoder.__dict__.pop, "_sqz_context", None)

    # ---- running ----

    def _generate_alone(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._check_open()
            self._generating = threading.get_ident()
            try:
                self._check_request(args[0] if args else None, **kwargs)
                return self._generate(*args, **kwargs)
            finally:
                self._generating = None
                self._end_pass()

    def _check_request(self, first: Any, max_new_tokens: Any = None, max_length: Any = None, **given: Any) -> None:
        """Refuses at once what would run out of positions at its end."""
        prompts = (first, *(given.get(name) for name in ("inputs", "input_ids", "inputs_embeds")))
        prompt = next((one for one in prompts if isinstance(one, torch.Tensor)), None)
        if prompt is not None and isinstance(max_new_tokens, int):
            max_length = prompt.shape[1] + max_new_tokens
        if prompt is not None and isinstance(max_length, int):
            self._check_length(max_length - 1)  # the last token is not attended to

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the FixedContext was closed while the model was generating")

    def _check_length(self, own: int) -> None:
        given = [range(len(self._infos))] if self.contexts is None else self.contexts
        context = max([0, *(sum(self._document(number).tokens for number in documents) for documents in given)])
        most = self._described["max_positions"]
        if 0 < most < context + own:
            raise ValueError(f"{context} tokens of context and {own} that follow are {context + own}, but the model "
                             f"has {most} positions")
        check_longrope(self._config, context, context + own)

    def _before_forward(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Puts the tokens behind the context, and says which rows ask the index."""
        if not torch.compiler.is_compiling():
            self._end_pass()
            self._lock.acquire()  # _after_forward() releases it
            self._running = threading.get_ident()
        self._check_open()
        if args:
            kwargs = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments
            kwargs.update(kwargs.pop("kwargs", {}))
        kwargs.pop("logits_to_keep", None)  # Gemma 4 would run its last layers for these tokens alone
        inputs = kwargs.get("input_ids")
        inputs = kwargs["inputs_embeds"] if inputs is None else inputs
        batch, tokens = inputs.shape[:2]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        cache = kwargs.get(cache_argument(decoder))
        mask = mask.get("full_attention") if isinstance(mask, dict) else mask
        buckets = self._info.partition == "buckets" and self._device.type == "cuda"
        if (self._chunks or buckets) and getattr(cache, "is_compileable", False):
            raise ValueError(f"{type(cache).__name__}: {'buckets on a GPU' if buckets else 'layers with chunks'} need a "
                             "dynamic cache: leave cache_implementation out")
        if any(self._states):
            if cache is None:  # also a pass without one continues the context's state
                cache = kwargs[cache_argument(decoder)] = new_cache(self._model)
            if not cache.has_previous_state(next(number for number, state in enumerate(self._states) if state)):
                self._continue_state(cache, batch, tokens, mask)
        before = 0
        if cache is not None and (mask is None or positions is None or self._chunks):
            before = int(cache.get_seq_length())
        self._check_length(before + tokens if mask is None else mask.shape[-1])
        if positions is None:
            positions = torch.arange(before, before + tokens, device=inputs.device)[None]
            if mask is not None and mask.ndim == 2:  # padding on the left does not stand behind the context
                positions = (positions - (mask.long().cumsum(1) == 0).sum(1, keepdim=True)).clamp(min=0)
        rows, offset = self._rows(batch), self._info.tokens
        if rows is not None:
            offset = torch.tensor([[self._length_of(row)] for row in rows], device=inputs.device)
        kwargs["position_ids"] = positions = positions + offset
        positions = positions if positions.ndim == 2 else positions[0]  # M-RoPE: of text all are equal
        self._positions, self._offset, self._seen = positions, offset, before
        self._serving.begin(batch, tokens, mask, positions, rows)
        if not torch.compiler.is_compiling():
            self._calls, self._mask, self._bias = 0, None, None
        return (), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _continue_state(self, cache: Any, batch: int, tokens: int, mask: torch.Tensor | None) -> None:
        if real_tokens(mask, tokens) is not None:
            raise ValueError(f"{type(self._model).__name__}: found padding, expected requests of one length in a "
                             "batch: a layer with a state takes padding for tokens")
        put_states(cache, self._states, batch)

    def _attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attention_mask: torch.Tensor | None = None, scaling: float | None = None, dropout: float = 0.0,
                **options: Any) -> tuple[torch.Tensor, None]:
        """The attention function: the state over the own keys, merged with that over the fixed context."""
        tempered = self._modules.get(id(module))
        if tempered is None:  # of another model with the same configuration
            plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
            return plain
        if key.dtype != query.dtype or value.dtype != query.dtype:  # under autocast
            key, value = key.to(query.dtype), value.to(query.dtype)
        batch, heads, tokens, dim = query.shape
        number: Any = module.layer_idx
        layer, compiling = self._layers.all[number], torch.compiler.is_compiling()
        if tempered:
            query = self._tempered(module, query)
        if layer.chunk:
            attention_mask = self._chunk_mask(layer, key.shape[2])
        if compiling:
            bias = None if attention_mask is None else additive_bias(attention_mask, query, key)
        else:
            if number not in self._checked:
                check_call(module, query, key, value, scaling, options, layer)
                self._checked.add(number)
            if query.requires_grad:
                raise RuntimeError("a FixedContext computes no gradients: run the model under torch.no_grad()")
            self._calls += 1
            if attention_mask is not self._mask:  # most layers have the same
                self._mask, self._bias = attention_mask, (
                    None if attention_mask is None else additive_bias(attention_mask, query, key))
            bias = self._bias
        own, own_lse = own_state(query, key, value, bias, 1 / math.sqrt(dim) if scaling is None else scaling)
        rows = query.reshape(batch, heads, dim) if tokens == 1 else rows_of(query)
        if compiling:
            torch.ops.sqz.add_context(rows, own, own_lse, number, tokens, self._positions, self._serving.number)
        else:
            self._serving.add(rows, own, own_lse, number, self._serving.rows)
        return with_sinks(own, own_lse, options.get("s_aux")).view(batch, tokens, heads, value.shape[3]), None

    def _chunk_mask(self, layer: sqz.Layer, keys: int) -> torch.Tensor:
        """[batch or 1, 1, tokens, keys]: transformers' own knows nothing of the context's tokens in the chunk."""
        last = self._positions[:, -1:]
        key = last + torch.arange(1 - keys, 1, device=last.device)
        return (seen(self._positions, key, layer.window, layer.chunk) & (key >= self._offset)[:, None])[:, None]

    def _tempered(self, module: torch.nn.Module, query: torch.Tensor) -> torch.Tensor:
        """Llama 4 scales queries by the length of its cache, which does not hold the context."""
        def scale(positions: torch.Tensor) -> torch.Tensor:
            return torch.log1p(torch.floor((positions.float() + 1) / module.floor_scale)) * module.attn_scale + 1

        seen_before = self._seen + torch.arange(query.shape[2], device=query.device)
        return (query * (scale(self._positions) / scale(seen_before))[:, None, :, None]).to(query.dtype)

    def _after_forward(self, decoder: PreTrainedModel, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._end_pass():
            return
        calls = self._calls
        if output is not None and calls != self._layers.calls:
            raise ValueError(f"{type(decoder).__name__}: {calls} of {self._layers.calls} layers called the "
                             "attention function: the others do not see the context")

    def _end_pass(self) -> bool:
        """Releases the lock if this thread is in a pass: torch calls no hook after Ctrl-C, and no other hook after one that
        raised before _before_forward()."""
        if self._running != threading.get_ident():
            return False
        self._running = None
        self._serving.rows.results.clear()
        self._lock.release()
        return True
