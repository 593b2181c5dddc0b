"""FixedContext: a model of transformers answers as if the context of an index stood in front."""

import contextlib
import inspect
import itertools
import math
import os
import threading
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

import sqz

from .adapter import attention_function, check_call, check_longrope, decoder_of
from .attention import additive_bias, own_state, rows_of
from .fingerprint import describe, difference, fingerprint_of, max_positions, stored_description, tokenizer_hash
from .rows import Piece, Rows, cut, real_tokens

_contexts: weakref.WeakValueDictionary[int, "FixedContext"] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FixedContext:
    """Within its block, every forward pass of `model` follows the fixed context of `index`.

        with FixedContext(model, "manual.sqz", budget=0.125) as context:
            model.generate(**tokenizer(question, add_special_tokens=False, return_tensors="pt"))
            print(context.stats().delivered_budget)

    model: a decoder-only model, float32, float16 or bfloat16, on the CPU or one CUDA device, in evaluation mode.
    index: a path, or an sqz.Index that stays open (and, once uploaded, on the GPU) from one block to the next.
    tokenizer: if given and the index knows the hash of its own, both must be equal.
    session: what sqz.Session takes: budget, keep, selector, rule, ... `device` is the model's.

    Entering raises sqz.Error for an index that cannot be read or a session that cannot be had, and TypeError or
    ValueError for a model or tokenizer that does not fit; the model is then as before. So it is after the block.
    A context serves one generate() at a time; others wait. Leaving the block while another thread generates makes
    that generate() raise RuntimeError, and waits for it.
    """

    def __init__(self, model: PreTrainedModel, index: "str | os.PathLike[str] | sqz.Index", *, tokenizer: Any = None,
                 **session: Any) -> None:
        self._model, self._given, self._tokenizer, self._options = model, index, tokenizer, session
        self._lock = threading.RLock()
        self._generating: int | None = None  # the thread that does
        self._open = False

    def __enter__(self) -> "FixedContext":
        if self._open:
            raise RuntimeError("this FixedContext is open already")
        self._decoder = decoder_of(self._model)
        if getattr(self._decoder, "_sqz_context", None) is not None:
            raise RuntimeError(f"{type(self._model).__name__} has another FixedContext open: one model follows one "
                               "context at a time; leave the other block first")
        with contextlib.ExitStack() as stack:
            self._open_index(stack)
            self._session = sqz.Session(self._index, device=self._device(stack), **self._options)
            stack.callback(self._session.close)
            self._install(stack)
            self._closing = stack.pop_all()
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the block: the model is as before. Nothing happens if it was left."""
        if self._generating == threading.get_ident():
            raise RuntimeError("a FixedContext cannot be closed by the generate() that it serves: leave the block after it")
        if not self._open:
            return
        self._open = False  # a generate() of another thread raises at its next forward pass
        with self._lock:
            self._closing.close()

    def stats(self, layer: int = -1) -> "sqz.Stats":
        """What was asked for and delivered since the block began or reset_stats(), of one layer or of all (-1)."""
        return self._session.stats(layer)

    def reset_stats(self) -> None:
        self._session.reset_stats()

    # ---- entering ----

    def _open_index(self, stack: contextlib.ExitStack) -> None:
        given = isinstance(self._given, sqz.Index)
        self._index = self._given if given else stack.enter_context(sqz.Index(self._given))
        info = self._info = self._index.info
        if not info.has_kv:
            raise ValueError(f"{info.path}: an index without keys and values (--no-kv): build it with them")
        stored = self._described = stored_description(info.path)
        described = describe(self._model)
        if fingerprint_of(described) != info.model_fingerprint:
            raise ValueError(f"{info.path}: not an index of this model: {difference(stored, described)}")
        if self._tokenizer is not None and info.tokenizer_hash not in ("", found := tokenizer_hash(self._tokenizer)):
            raise ValueError(f"{info.path}: tokenizer_hash: the index was built with {info.tokenizer_hash}, this tokenizer "
                             f"has {found}")
        self._config = self._model.config.get_text_config(decoder=True)
        self._most = max_positions(self._config) or None
        if self._most and info.tokens >= self._most:
            raise ValueError(f"{info.path}: {info.tokens} tokens leave no room for a question: the model has {self._most} "
                             "positions")

    def _device(self, stack: contextlib.ExitStack) -> "int | None":
        """Where the session is: the model's device, with the index on it."""
        devices = {parameter.device for parameter in self._model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            raise ValueError(f"model: found on {', '.join(sorted(map(str, devices)))}, expected the CPU or one CUDA device")
        device = next(iter(devices))
        if self._model.dtype not in _DTYPES:
            raise ValueError(f"model: found {self._model.dtype}, expected float32, float16 or bfloat16")
        asked = self._options.pop("device", device)
        asked = torch.device("cpu" if asked is None else asked)
        if (asked.type, asked.index or 0) != (device.type, device.index or 0):
            raise ValueError(f"device: found {asked}, expected {device}, the model's")
        if device.type == "cpu":
            return None
        if any(self._described["sliding_window"]):
            raise ValueError(f"{self._info.path}: layers with a sliding window are served on the CPU only: move the model "
                             "there")
        number = device.index or 0
        try:
            self._index.upload(number)
        except sqz.Error as error:
            if "is already" not in str(error):
                raise
        return number

    def _install(self, stack: contextlib.ExitStack) -> None:
        """Changes the model; the stack undoes it."""
        model, decoder = self._model, self._decoder
        self._number = next(_numbers)
        self._rows: Rows | None = None
        self._mask: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._checked: set[int] = set()
        self._calls = 0
        self._buffers: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}
        self._prepared: dict[tuple[Any, ...], Any] = {}
        self._max_tokens = self._options.get("max_tokens") or 4096
        self._max_request_tokens = self._options.get("max_request_tokens") or self._max_tokens
        self._needs_positions = any(self._described["sliding_window"]) or (
            self._info.partition == "buckets")  # their selectors look at queries before RoPE
        _contexts[self._number] = self
        stack.callback(_contexts.pop, self._number, None)
        stack.enter_context(attention_function(decoder, self._attend))
        before = decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        stack.callback(before.remove)
        after = decoder.register_forward_hook(self._after_forward)
        stack.callback(after.remove)
        self._generate = model.generate
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
                return self._generate(*args, **kwargs)
            finally:
                self._generating = None

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the FixedContext was closed while the model was generating")

    def _before_forward(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Puts the tokens behind the context, and says which rows ask the index."""
        self._check_open()
        if args:
            kwargs = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments
            kwargs.update(kwargs.pop("kwargs", {}))
        inputs = kwargs.get("input_ids")
        inputs = kwargs["inputs_embeds"] if inputs is None else inputs
        batch, tokens = inputs.shape[:2]
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        mask = mask.get("full_attention") if isinstance(mask, dict) else mask
        positions = kwargs.get("position_ids")
        seen = 0 if cache is None or (mask is not None and positions is not None) else int(cache.get_seq_length())
        self._check_length(seen + tokens if mask is None else mask.shape[-1])
        if positions is None:
            positions = torch.arange(seen, seen + tokens, device=inputs.device)[None]
        kwargs["position_ids"] = positions + self._info.tokens
        if tokens > 1 or self._needs_positions:
            self._find_rows(batch, tokens, mask, kwargs["position_ids"])
        if not torch.compiler.is_compiling():
            self._calls, self._mask, self._bias = 0, None, None
        return (), kwargs

    def _check_length(self, own: int) -> None:
        total = self._info.tokens + own
        if self._most and total > self._most:
            raise ValueError(f"{self._info.tokens} tokens of context and {own} that follow are {total}, but the model has "
                             f"{self._most} positions")
        check_longrope(self._config, self._info.tokens, total)

    @torch.compiler.disable
    def _find_rows(self, batch: int, tokens: int, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        real = real_tokens(mask, tokens) if tokens > 1 else None
        index = None if real is None else real.flatten().nonzero().flatten()
        lengths = [tokens] * batch if real is None else real.sum(1).tolist()
        found = None
        if self._needs_positions:
            flat = positions.expand(batch, tokens).flatten()
            found = (flat if index is None else flat[index]).tolist()
        most = min(self._max_tokens, self._max_request_tokens) if tokens > 1 else self._max_tokens
        self._rows = Rows(index, cut(lengths, most, self._options.get("block") or 0), found)
        self._buffers_of(batch, self._model.dtype)  # before a graph of the tokens that follow is captured

    def _attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                **options: Any) -> tuple[torch.Tensor, None]:
        """The attention function: the state over the own keys, merged with that over the fixed context."""
        batch, heads, tokens, dim = query.shape
        layer = module.layer_idx
        compiling = torch.compiler.is_compiling()
        if not compiling:
            if layer not in self._checked:
                self._checked.add(check_call(module, query, key, value, scaling, options, self._described))
            if query.requires_grad:
                raise RuntimeError("a FixedContext computes no gradients: run the model under torch.no_grad()")
            self._calls += 1
        own, own_lse = own_state(query, key, value, self._bias_of(attention_mask, query, key, compiling),
                                 1 / math.sqrt(dim) if scaling is None else scaling)
        rows = query.reshape(batch, heads, dim) if tokens == 1 else rows_of(query)
        if compiling:
            torch.ops.sqz.add_context(rows, own, own_lse, layer, tokens, self._number)
        else:
            self.add_context(rows, own, own_lse, layer, tokens)
        return own.view(batch, tokens, heads, dim), None

    def _bias_of(self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
                 compiling: bool) -> torch.Tensor | None:
        """The same for all layers with the same mask."""
        if mask is None or compiling:
            return None if mask is None else additive_bias(mask, query, key)
        if mask is not self._mask:
            self._mask, self._bias = mask, additive_bias(mask, query, key)
        return self._bias

    def _after_forward(self, decoder: PreTrainedModel, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._calls != self._info.layers:
            raise ValueError(f"{type(decoder).__name__}: {self._calls} of {self._info.layers} layers called the attention "
                             "function: the others do not see the context")

    def add_context(self, rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, tokens: int) -> None:
        """Merges the state over the context into own and own_lse. All: [batch * tokens, heads(, head_dim)]."""
        if tokens == 1 and not self._needs_positions and rows.shape[0] <= self._max_tokens:
            buffers, call = self._prepared_of(rows.shape[0], rows.dtype)
            buffers[0].copy_(rows)
            call(layer)
            sqz.merge_states(own, own_lse, buffers[1], buffers[2])
            return
        plan = self._rows
        if tokens == 1 and not self._needs_positions:
            plan = Rows(None, cut([1] * rows.shape[0], self._max_tokens, 0), None)
        index = plan.index
        part, part_lse = (own, own_lse) if index is None else (own[index], own_lse[index])
        rows = rows.contiguous() if index is None else rows[index]
        for piece in plan.pieces:
            self._add_piece(piece, layer, rows, part, part_lse, plan.positions)
        if index is not None:  # what padding attends to is nothing: no NaN may go on
            own.zero_().index_copy_(0, index, part)

    def _add_piece(self, piece: Piece, layer: int, rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor,
                   positions: list[int] | None) -> None:
        some = slice(piece.first, piece.last)
        q = rows[some]
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self._session.attend(layer, q, out, lse, positions=None if positions is None else positions[some],
                             indptr=piece.indptr)
        sqz.merge_states(own[some], own_lse[some], out, lse)

    def _buffers_of(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, out and lse of one token a request, in memory that stays."""
        key = (rows, dtype)
        if key not in self._buffers:
            q = torch.empty(rows, self._info.query_heads, self._info.head_dim, dtype=dtype, device=self._model.device)
            self._buffers[key] = (q, torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        return self._buffers[key]

    def _prepared_of(self, rows: int, dtype: torch.dtype) -> Any:
        stream = torch.cuda.current_stream().cuda_stream if self._model.device.type == "cuda" else None
        key = (rows, dtype, stream)
        if key not in self._prepared:
            buffers = self._buffers_of(rows, dtype)
            self._prepared[key] = buffers, self._session.prepare(*buffers, indptr=list(range(rows + 1)), stream=stream)
        return self._prepared[key]


@torch.library.custom_op("sqz::add_context", mutates_args=("own", "own_lse"))
def _add_context(rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, tokens: int,
                 context: int) -> None:
    """FixedContext.add_context() for torch.compile."""
    _contexts[context].add_context(rows, own, own_lse, layer, tokens)
