"""libsqz over ctypes: where it is, its structs and its functions. sqz.h is the contract."""

import ctypes as c
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _path() -> str:
    """SQZ_LIBRARY, else the library in the wheel, else the system's."""
    inside = Path(__file__).with_name("libsqz.so")
    return os.environ.get("SQZ_LIBRARY") or (str(inside) if inside.exists() else "libsqz.so.0.2")


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
        for name, value in fields.items():
            if isinstance(value, int) and (getattr(self, name) or 0) != value:
                raise ValueError(f"{name}: found {value}, which is out of range")


_CTYPES = {"int32": c.c_int32, "int64": c.c_int64, "uint8": c.c_uint8, "uint16": c.c_uint16, "uint32": c.c_uint32,
           "uint64": c.c_uint64, "double": c.c_double, "text": c.c_char_p, "pointer": c.c_void_p,
           "int64s": c.POINTER(c.c_int64), "doubles": c.POINTER(c.c_double)}


def _fields(*declarations: str) -> list[tuple[str, Any]]:
    """Fields in their order, by type: "int64 tokens sink tail"."""
    return [(name, _CTYPES[kind]) for kind, *names in map(str.split, declarations) for name in names]


class IndexInfo(Struct):
    c_name = "sqz_index_info"
    _fields_ = _fields(
        "uint32 struct_size", "int32 format_version",
        "int64 tokens sink tail layers query_heads kv_heads head_dim levels", "double attention_scale",
        "uint64 file_bytes", "int32 partition dtype_code",
        "text producer architecture model_fingerprint tokenizer_hash tokens_hash", "int64 page_size",
        "int32 dtype_bits composes", "text context_id after")


class LayerInfo(Struct):
    c_name = "sqz_layer_info"
    _fields_ = _fields("uint32 struct_size", "int32 kind",
                       "int64 query_heads kv_heads head_dim value_dim window chunk of states", "double attention_scale")


class UploadOptions(Struct):
    c_name = "sqz_upload_options"
    _fields_ = _fields("uint32 struct_size", "int32 device_id background threads",
                       "int64 first_kv_head kv_heads")


class SessionOptions(Struct):
    c_name = "sqz_session_options"
    _fields_ = _fields(
        "uint32 struct_size", "int32 device_type device_id selector rule levels uniform_layers",
        "double budget keep", "doubles thresholds", "int64 block max_tokens", "int32 threads dense_layers", "int64 max_request_tokens",
        "doubles layer_scales", "int64 layer_scale_count first_kv_head kv_heads", "int32 max_contexts",
        "int64 device_requests device_tokens")


class AttendArgs(Struct):
    c_name = "sqz_attend_args"
    _fields_ = _fields("uint32 struct_size", "int64 layer", "pointer q out lse positions indptr",
                       "int64 requests", "pointer stream q_before_rope contexts", "int64 contexts_each",
                       "pointer device_positions device_contexts")


class Stats(Struct):
    c_name = "sqz_stats"
    _fields_ = _fields(
        "uint32 struct_size", "int32 dense_fallback", "double asked_budget delivered_budget asked_keep delivered_keep",
        "uint64 selections keys_read keys_possible bytes_read bytes_dense", "double least_budget", "text route")


class Run(c.Structure):
    c_name = "sqz_run"
    _fields_ = _fields("uint32 first length")


class Context(c.Structure):
    c_name = "sqz_context"
    _fields_ = _fields("int32 slot skip", "int64 offset")


class Tensor(c.Structure):
    c_name = "sqz_tensor"
    _fields_ = _fields("pointer data", "int32 device_type device_id ndim", "uint8 dtype_code dtype_bits",
                       "uint16 dtype_lanes", "int64s shape strides", "uint64 byte_offset")


# Functions that return a sqz_status, and their arguments: p a pointer, i an int32, l an int64.
FUNCTIONS = {
    "sqz_index_open": "pip", "sqz_index_describe": "pp", "sqz_index_describe_layer": "plp", "sqz_index_state": "pllpp",
    "sqz_index_verify": "p", "sqz_index_upload": "pp", "sqz_index_unload": "pi",
    "sqz_session_create": "ppp", "sqz_session_put": "plp", "sqz_attend": "pp",
    "sqz_merge_states_with": "pppppp", "sqz_select": "ppplpp", "sqz_session_stats": "pllp",
    "sqz_session_reset_stats": "p",
}
_TYPES = {"p": c.c_void_p, "i": c.c_int32, "l": c.c_int64}


def _load(path: str) -> c.CDLL:
    try:
        library = c.CDLL(path)
        for name, arguments in FUNCTIONS.items():
            getattr(library, name).argtypes = [_TYPES[kind] for kind in arguments]
        for name in ("sqz_index_close", "sqz_session_destroy"):
            getattr(library, name).argtypes = [c.c_void_p]
            getattr(library, name).restype = None
        for name in ("sqz_last_error", "sqz_version", "sqz_selector_name"):
            getattr(library, name).restype = c.c_char_p
    except OSError as error:
        raise ImportError(f"libsqz cannot be loaded: {error}. Install it, or set SQZ_LIBRARY to the path of "
                          "libsqz.so.0.2") from None
    except AttributeError as error:
        raise ImportError(f"libsqz is too old for this module: {error}. Set SQZ_LIBRARY to the path of a newer "
                          "libsqz.so.0.2") from None
    return library


lib = _load(_path())
version: str = lib.sqz_version().decode()


class Error(RuntimeError):
    """A failure that the library reports: its sentence, and its sqz_status as `status`."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message or lib.sqz_last_error().decode(errors="backslashreplace"))
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, str(self))


INVALID_ARGUMENT = 1


def check(status: int) -> None:
    """Raises Error unless the status is SQZ_OK."""
    if status != 0:
        raise Error(status)


def choice(name: str, value: str, choices: Mapping[str, int]) -> int:
    """The number that the library has for a name such as "budget"."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: found {value!r}, expected a text")
    if value not in choices:
        raise ValueError(f"{name}: found {value!r}, expected {', '.join(choices)}")
    return choices[value]
