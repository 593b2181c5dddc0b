"""libsqz over ctypes: where it is, its structs and its functions. sqz.h is the contract."""

import ctypes as c
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _path() -> str:
    """SQZ_LIBRARY, else the library in the wheel, else the system's."""
    inside = Path(__file__).with_name("libsqz.so")
    return os.environ.get("SQZ_LIBRARY") or (str(inside) if inside.exists() else "libsqz.so.0")


class Struct(c.Structure):
    """A struct of sqz.h: struct_size is set, what is not given is zero, the default."""

    c_name: str

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(struct_size=c.sizeof(type(self)), **fields)
        except TypeError:
            for name, value in fields.items():
                try:
                    setattr(self, name, value)
                except TypeError:
                    raise TypeError(f"{name}: found {value!r}, expected a number") from None
            raise


class IndexInfo(Struct):
    c_name = "sqz_index_info"
    _fields_ = [
        ("struct_size", c.c_uint32), ("format_version", c.c_int32), ("tokens", c.c_int64), ("sink", c.c_int64),
        ("tail", c.c_int64), ("layers", c.c_int64), ("query_heads", c.c_int64), ("kv_heads", c.c_int64),
        ("head_dim", c.c_int64), ("levels", c.c_int64), ("attention_scale", c.c_double), ("file_bytes", c.c_uint64),
        ("has_kv", c.c_int32), ("partition", c.c_int32), ("producer", c.c_char_p), ("architecture", c.c_char_p),
        ("model_fingerprint", c.c_char_p), ("tokenizer_hash", c.c_char_p), ("tokens_hash", c.c_char_p),
        ("page_size", c.c_int64), ("dtype_code", c.c_int32), ("dtype_bits", c.c_int32),
    ]


class UploadOptions(Struct):
    c_name = "sqz_upload_options"
    _fields_ = [
        ("struct_size", c.c_uint32), ("device_id", c.c_int32), ("no_keys_values", c.c_int32), ("background", c.c_int32),
        ("threads", c.c_int32), ("reserved", c.c_int32), ("first_kv_head", c.c_int64), ("kv_heads", c.c_int64),
    ]


class SessionOptions(Struct):
    c_name = "sqz_session_options"
    _fields_ = [
        ("struct_size", c.c_uint32), ("device_type", c.c_int32), ("device_id", c.c_int32), ("selector", c.c_int32),
        ("rule", c.c_int32), ("group", c.c_int32), ("residual", c.c_int32), ("levels", c.c_int32),
        ("budget", c.c_double), ("keep", c.c_double), ("thresholds", c.POINTER(c.c_double)), ("block", c.c_int64),
        ("max_tokens", c.c_int64), ("threads", c.c_int32), ("dense_layers", c.c_int32),
        ("max_request_tokens", c.c_int64), ("layer_scales", c.POINTER(c.c_double)), ("layer_scale_count", c.c_int64),
        ("uniform_layers", c.c_int32), ("reserved", c.c_int32), ("first_kv_head", c.c_int64), ("kv_heads", c.c_int64),
        ("mass", c.c_double),
    ]


class KVCache(Struct):
    c_name = "sqz_kv_cache"
    _fields_ = [
        ("struct_size", c.c_uint32), ("page_size", c.c_int32), ("keys", c.c_void_p), ("values", c.c_void_p),
        ("token_stride", c.c_int64), ("head_stride", c.c_int64), ("page_stride", c.c_int64),
        ("block_table", c.c_void_p), ("pages", c.c_int64),
    ]


class AttendArgs(Struct):
    c_name = "sqz_attend_args"
    _fields_ = [
        ("struct_size", c.c_uint32), ("reserved", c.c_int32), ("layer", c.c_int64), ("q", c.c_void_p),
        ("out", c.c_void_p), ("lse", c.c_void_p), ("positions", c.c_void_p), ("indptr", c.c_void_p),
        ("requests", c.c_int64), ("stream", c.c_void_p), ("cache", c.c_void_p), ("q_before_rope", c.c_void_p),
        ("sessions", c.c_void_p),
    ]


class Stats(Struct):
    c_name = "sqz_stats"
    _fields_ = [
        ("struct_size", c.c_uint32), ("dense_fallback", c.c_int32), ("asked_budget", c.c_double),
        ("delivered_budget", c.c_double), ("asked_keep", c.c_double), ("delivered_keep", c.c_double),
        ("selections", c.c_uint64), ("keys_read", c.c_uint64), ("keys_possible", c.c_uint64),
        ("bytes_read", c.c_uint64), ("bytes_dense", c.c_uint64), ("least_budget", c.c_double),
        ("route", c.c_char_p), ("asked_mass", c.c_double), ("estimated_mass", c.c_double),
        ("delivered_mass", c.c_double), ("estimated_error", c.c_double),
        ("read_whole", c.c_uint64),
    ]


class Run(c.Structure):
    c_name = "sqz_run"
    _fields_ = [("first", c.c_uint32), ("length", c.c_uint32)]


class Tensor(c.Structure):
    c_name = "sqz_tensor"
    _fields_ = [
        ("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32),
        ("dtype_code", c.c_uint8), ("dtype_bits", c.c_uint8), ("dtype_lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64),
    ]


# Functions that return a sqz_status, and their arguments: p a pointer, i an int32, l an int64.
FUNCTIONS = {
    "sqz_index_open": "pip", "sqz_index_describe": "pp", "sqz_index_verify": "p", "sqz_index_upload": "pp",
    "sqz_index_unload": "pi", "sqz_session_create": "ppp", "sqz_attend": "pp", "sqz_call_create": "ppp",
    "sqz_call_run": "pl", "sqz_merge_states_on": "ppppp", "sqz_select": "ppplpp", "sqz_session_stats": "plp",
    "sqz_session_reset_stats": "p",
}
_TYPES = {"p": c.c_void_p, "i": c.c_int32, "l": c.c_int64}


def _load(path: str) -> c.CDLL:
    try:
        library = c.CDLL(path)
        for name, arguments in FUNCTIONS.items():
            getattr(library, name).argtypes = [_TYPES[kind] for kind in arguments]
        for name in ("sqz_index_close", "sqz_session_destroy", "sqz_call_destroy"):
            getattr(library, name).argtypes = [c.c_void_p]
            getattr(library, name).restype = None
        for name in ("sqz_last_error", "sqz_version", "sqz_selector_name"):
            getattr(library, name).restype = c.c_char_p
    except OSError as error:
        raise ImportError(f"libsqz cannot be loaded: {error}. Install it, or set SQZ_LIBRARY to the path of "
                          "libsqz.so.0") from None
    except AttributeError as error:
        raise ImportError(f"libsqz is too old for this module: {error}. Set SQZ_LIBRARY to the path of a newer "
                          "libsqz.so.0") from None
    return library


lib = _load(_path())
version: str = lib.sqz_version().decode()


class Error(RuntimeError):
    """A failure that the library reports: its sentence, and its sqz_status as `status`."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message or lib.sqz_last_error().decode())
        self.status = status


INVALID_ARGUMENT = 1


def check(status: int) -> None:
    """Raises Error unless the status is SQZ_OK."""
    if status != 0:
        raise Error(status)


def choice(name: str, value: str, choices: Mapping[str, int]) -> int:
    """The number that the library has for a name such as "budget"."""
    if value not in choices:
        raise ValueError(f"{name}: found {value!r}, expected {', '.join(choices)}")
    return choices[value]
