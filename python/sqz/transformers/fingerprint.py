"""What identifies a loaded model and its tokenizer: the description that sqz-index writes for its checkpoint folder."""

import json
import math
import os
import sys
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import cached_file
from xxhash import xxh3_64_hexdigest

import sqz
from sqz.index import Layer

from .layers import Layers, look

_SHARDS = ("model.safetensors", "model.safetensors.index.json")
_LAST = {"geometry": 1, "weights_hash": 2}  # to be named, if other fields differ as well
_SAMPLES, _SAMPLE = 16, 4096  # blocks of a shard's data, and bytes of a block


def _hash(data: bytes) -> str:
    return str(xxh3_64_hexdigest(data))


def describe(model: PreTrainedModel, layers: Layers | None = None) -> dict[str, Any]:
    """The fields of `model` in docs/format.md, for a loaded model. ValueError for a model that they cannot describe.

    layers: look(model), if it is known.
    """
    layers = layers or look(model)
    config = model.config.get_text_config(decoder=True)
    usual = min((layer for layer in layers.all if layer.query_heads), key=lambda layer: layer.kind != "full")
    description = {
        "architecture": type(model).__name__,
        "layers": len(layers.all),
        "query_heads": usual.query_heads,
        "kv_heads": usual.kv_heads,
        "head_dim": usual.head_dim,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": max_positions(config),
        "rope": _rope(model, config, usual.head_dim),
        "sliding_window": [layer.window for layer in layers.all],
        "weights_hash": _weights_hash(model),
        "attention_scale": usual.scale,
    }
    geometry = [_geometry(layer, usual) for layer in layers.all]
    return {**description, "geometry": geometry} if any(geometry) else description


def _geometry(layer: Layer, usual: Layer) -> dict[str, Any] | None:
    """What differs in a layer from the description of the model."""
    if layer.kind == "shared":
        return {"kind": "shared", "of": layer.of}
    if not layer.query_heads:
        return {"kind": layer.kind}
    given = {name: (getattr(layer, name), getattr(usual, name)) for name in ("query_heads", "kv_heads", "head_dim")}
    given |= {"attention_scale": (layer.scale, usual.scale), "value_dim": (layer.value_dim, layer.head_dim),
              "chunk": (layer.chunk, 0)}
    entry = {name: found for name, (found, expected) in given.items() if found != expected}
    return {"kind": layer.kind, **entry} if entry else None


def fingerprint(model: PreTrainedModel) -> str:
    """XXH3-64 of the description: equal to an index's `model_fingerprint` if it is an index of this model."""
    return fingerprint_of(describe(model))


def fingerprint_of(description: dict[str, Any]) -> str:
    return _hash(json.dumps(description, sort_keys=True, separators=(",", ":")).encode())


def check_match(index: sqz.Index, model: dict[str, Any], name: str) -> None:
    """ValueError, with the first difference, unless the index is of the model with this description."""
    if fingerprint_of(model) == index.info.model_fingerprint:
        return
    with open(index._file, "rb") as file:  # a safetensors file
        size = int.from_bytes(file.read(8), "little")
        stored = json.loads(json.loads(file.read(size))["__metadata__"]["model"])
    found = difference(stored, model) or "the file was replaced after it was opened"
    raise ValueError(f"{index.info.path}: not an index of {name}: {found}")


def difference(index: Any, model: Any, path: str = "") -> str:
    """The first field that differs, such as geometry[5].kv_heads, with both values."""
    a, b = _entries(index), _entries(model)
    if a is None or b is None:
        return f"{path[1:]}: the index was built for {json.dumps(index)}, this model has {json.dumps(model)}"
    for name in sorted(a.keys() | b.keys(), key=lambda name: (_LAST.get(name, 0), name)):
        if a.get(name) != b.get(name):
            return difference(a.get(name), b.get(name), path + (f"[{name}]" if isinstance(name, int) else f".{name}"))
    return ""


def _entries(value: Any) -> dict[Any, Any] | None:
    """None for what is neither a list nor a dictionary; null stands for one that says nothing."""
    return dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else \
        {} if value is None else None


def tokenizer_hash(tokenizer: Any) -> str:
    """XXH3-64 of the file that a tokenizer was loaded from; FileNotFoundError if there is none."""
    path = _checkpoint_file(tokenizer.name_or_path, ("tokenizer.json",), None)
    if path is None:
        raise FileNotFoundError(f"tokenizer: no tokenizer.json was found for {tokenizer.name_or_path!r}; "
                                "pass no tokenizer to leave it unchecked")
    with open(path, "rb") as file:
        return _hash(file.read())


def max_positions(config: Any) -> int:
    """0 if the configuration does not say."""
    return getattr(config, "max_position_embeddings", None) or 0


def rope_parameters(config: Any) -> dict[str, Any]:
    """Those of the full-attention layers, by the names of transformers 5."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # transformers 4
        rope = dict(getattr(config, "rope_scaling", None) or {})
        rope["rope_theta"] = getattr(config, "rope_theta", None) or 10000.0
    rope = rope.get("full_attention", rope)
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def check_longrope(config: Any, context: int, total: int) -> None:
    """Keys turned by the short frequencies do not fit queries turned by the long ones: ValueError."""
    rope = rope_parameters(config)
    if rope["rope_type"] != "longrope":
        return
    original = int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    if context <= original < total:
        raise ValueError(f"longrope changes its frequencies after {original} tokens: a context of {context} tokens is "
                         f"before, {total} tokens with what follows are after")


def _turns_halves(model: PreTrainedModel) -> bool:
    """Whether RoPE turns the dimensions i and i + d / 2 together, as the description says, and not neighbours."""
    rotate = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    return rotate is not None and rotate(torch.arange(1.0, 5.0, device="cpu")).tolist() == [-3, -4, 1, 2]


def _rope(model: PreTrainedModel, config: Any, head_dim: int) -> dict[str, Any]:
    given = rope_parameters(config)
    positions = (getattr(config, "original_max_position_embeddings", None) or
                 given.get("original_max_position_embeddings") or max_positions(config))
    rope = {"kind": given["rope_type"], "theta": float(given.get("rope_theta", 10000.0)), "factor": 1.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 0, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.0, "truncate": True}
    if (rope["kind"] not in ("default", "linear", "llama3", "yarn") or not _turns_halves(model) or
            0 in (getattr(config, "no_rope_layers", None) or ()) or hasattr(config, "kv_lora_rank") or
            not any("rotary" in type(module).__name__.lower() for module in model.modules())):
        return {**rope, "kind": "other"}
    share = given.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if share < 1:
        rope["rotary_dim"] = int(head_dim * share)
    if rope["kind"] == "default":
        return rope
    rope["factor"] = float(given.get("factor") or max_positions(config) / positions)
    if rope["kind"] != "linear":
        rope["original_max_positions"] = positions
    if rope["kind"] == "llama3":
        rope.update(low_freq_factor=float(given["low_freq_factor"]), high_freq_factor=float(given["high_freq_factor"]))
    if rope["kind"] == "yarn":
        rope.update(beta_fast=float(given.get("beta_fast") or 32), beta_slow=float(given.get("beta_slow") or 1),
                    attention_factor=_yarn_factor(given, rope["factor"]), truncate=given.get("truncate", True))
    return rope


def _yarn_factor(given: dict[str, Any], factor: float) -> float:
    """What cosine and sine are multiplied by (YaRN, section 3.4)."""
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)


def _checkpoint_file(name: str, candidates: tuple[str, ...], revision: str | None) -> str | None:
    """The first of the files that a folder, or the local cache of a hub's model, has."""
    for candidate in candidates if name else ():
        try:
            found = cached_file(name, candidate, revision=revision, local_files_only=True)
        except (OSError, ValueError):
            continue
        if found is not None:
            return str(found)
    return None


def _weights_hash(model: PreTrainedModel) -> str:
    """XXH3-64 of the checkpoint's shards as sqz-index computes it, or of samples of weights that came from no file."""
    path = _checkpoint_file(model.name_or_path or "", _SHARDS, getattr(model.config, "_commit_hash", None))
    if path is None:
        return _hash(b"".join(_sample_of(name, tensor) for name, tensor in sorted(model.state_dict().items())))
    shards = {path}
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            shards = {os.path.join(os.path.dirname(path), name) for name in json.load(file)["weight_map"].values()}
    for shard in shards:
        _check_unchanged(model, shard)
    return _hash(b"".join(_samples_of_shard(shard) for shard in sorted(shards)))


def _check_unchanged(model: PreTrainedModel, path: str) -> None:
    """ValueError if the layers' weights are not those of the file, of which a row each is compared.

    Skips weights without memory, and those that the file has under another name or in another kind of numbers.
    """
    weights = model.state_dict()
    with safe_open(path, "pt") as file:
        for name in file.keys():
            here, stored = weights.get(name, weights.get(f"{model.base_model_prefix}.{name}")), file.get_slice(name)
            if (here is None or here.is_meta or not here.is_floating_point() or here.ndim < 2 or
                    list(here.shape) != stored.get_shape() or stored.get_dtype() not in ("F32", "F16", "BF16") or
                    not any(part.isdecimal() for part in name.split("."))):
                continue
            there = stored[:1].to(here.device, here.dtype)
            if not torch.allclose(here[:1].float(), there.float(), rtol=2**-8, atol=1e-7):  # a rounding to bfloat16
                raise ValueError(f"{name} is not as in {path}: the model was changed after it was loaded, for example "
                                 "by an adapter that was merged. Save it and load it again")


def _samples_of_shard(path: str) -> bytes:
    """The safetensors header and 16 blocks of the data, evenly spread: formats/checkpoint.h."""
    with open(path, "rb") as file:
        header = file.read(8)
        header += file.read(int.from_bytes(header, "little"))
        size = os.path.getsize(path) - len(header)
        if size <= _SAMPLES * _SAMPLE:
            return header + file.read()
        out = [header]
        for i in range(_SAMPLES):
            file.seek(len(header) + (size - _SAMPLE) // (_SAMPLES - 1) * i)
            out.append(file.read(_SAMPLE))
        return b"".join(out)


def _sample_of(name: str, tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    numbers = flat[::max(1, flat.numel() // 1024)].float().cpu().numpy()
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + bytes(numbers.tobytes())
