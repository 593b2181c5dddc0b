"""libsqz from Python: the C interface over ctypes, tensors over DLPack.

Works with whatever speaks DLPack: numpy arrays and torch tensors on the CPU, torch tensors on a GPU. Nothing is
copied. The library is found through SQZ_LIBRARY or the system's search path.

    index = sqz.Index("book.sqz")
    index.upload(0)                                          # once, for sessions on a GPU
    session = sqz.Session(index, budget=0.125, device=0)     # device=None: the CPU
    session.attend(layer, q, out, lse, stream=torch.cuda.current_stream().cuda_stream)

q and out are [tokens, query heads, dim], lse [tokens, query heads] float32: see sqz.h, which is the contract.
"""

import ctypes as c
import os

try:
    _lib = c.CDLL(os.environ.get("SQZ_LIBRARY", "libsqz.so.0"))
except OSError as error:
    raise ImportError(f"libsqz cannot be loaded: {error}. Install it, or set SQZ_LIBRARY to the path of "
                      "libsqz.so.0") from None
_lib.sqz_last_error.restype = c.c_char_p


class Error(RuntimeError):
    def __init__(self, status):
        super().__init__(_lib.sqz_last_error().decode())
        self.status = status


def _check(status):
    if status != 0:
        raise Error(status)


class _Struct(c.Structure):
    """A struct of sqz.h: struct_size is set, what is not given is zero, the default."""

    def __init__(self, **fields):
        unknown = fields.keys() - dict(self._fields_)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(struct_size=c.sizeof(type(self)), **fields)

    def __repr__(self):
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name, _ in self._fields_[1:] if name != "reserved")
        return f"{type(self).__name__}({fields})"


class IndexInfo(_Struct):
    _fields_ = [
        ("struct_size", c.c_uint32), ("format_version", c.c_int32), ("tokens", c.c_int64), ("sink", c.c_int64),
        ("tail", c.c_int64), ("layers", c.c_int64), ("query_heads", c.c_int64), ("kv_heads", c.c_int64),
        ("head_dim", c.c_int64), ("levels", c.c_int64), ("attention_scale", c.c_double), ("file_bytes", c.c_uint64),
        ("has_kv", c.c_int32), ("partition", c.c_int32), ("producer", c.c_char_p), ("architecture", c.c_char_p),
        ("model_fingerprint", c.c_char_p), ("tokenizer_hash", c.c_char_p), ("tokens_hash", c.c_char_p),
        ("page_size", c.c_int64), ("dtype_code", c.c_int32), ("dtype_bits", c.c_int32),
    ]


class UploadOptions(_Struct):
    _fields_ = [
        ("struct_size", c.c_uint32), ("device_id", c.c_int32), ("no_keys_values", c.c_int32), ("background", c.c_int32),
        ("threads", c.c_int32), ("reserved", c.c_int32),
    ]


class SessionOptions(_Struct):
    _fields_ = [
        ("struct_size", c.c_uint32), ("device_type", c.c_int32), ("device_id", c.c_int32), ("selector", c.c_int32),
        ("rule", c.c_int32), ("group", c.c_int32), ("residual", c.c_int32), ("levels", c.c_int32),
        ("budget", c.c_double), ("keep", c.c_double), ("thresholds", c.POINTER(c.c_double)), ("block", c.c_int64),
        ("max_tokens", c.c_int64), ("threads", c.c_int32), ("dense_layers", c.c_int32),
        ("max_request_tokens", c.c_int64),
        ("layer_scales", c.POINTER(c.c_double)), ("layer_scale_count", c.c_int64), ("uniform_layers", c.c_int32),
        ("reserved", c.c_int32),
    ]


class _AttendArgs(_Struct):
    _fields_ = [
        ("struct_size", c.c_uint32), ("reserved", c.c_int32), ("layer", c.c_int64), ("q", c.c_void_p),
        ("out", c.c_void_p), ("lse", c.c_void_p), ("positions", c.POINTER(c.c_int64)), ("indptr", c.POINTER(c.c_int64)),
        ("requests", c.c_int64), ("stream", c.c_void_p), ("cache", c.c_void_p),
        ("q_before_rope", c.c_void_p),
    ]


class _Run(c.Structure):
    _fields_ = [("first", c.c_uint32), ("length", c.c_uint32)]


class Stats(_Struct):
    _fields_ = [
        ("struct_size", c.c_uint32), ("dense_fallback", c.c_int32), ("asked_budget", c.c_double),
        ("delivered_budget", c.c_double), ("asked_keep", c.c_double), ("delivered_keep", c.c_double),
        ("selections", c.c_uint64), ("keys_read", c.c_uint64), ("keys_possible", c.c_uint64),
        ("bytes_read", c.c_uint64), ("bytes_dense", c.c_uint64), ("least_budget", c.c_double),
    ]


_pointer_of = c.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = c.c_void_p
_pointer_of.argtypes = [c.py_object, c.c_char_p]


def _capsule(tensor):
    """A sqz_tensor is laid out like DLPack's; the capsule keeps it alive."""
    on_cpu = tensor.__dlpack_device__()[0] == 1
    # On a GPU the caller's stream orders the work; -1 asks the producer not to.
    return tensor.__dlpack__() if on_cpu else tensor.__dlpack__(stream=-1)


def _numbers(values):
    return None if values is None else (c.c_int64 * len(values))(*values)


def _attend_args(layer, q, out, lse, positions, indptr, stream):
    """The arguments, and what must live as long as they are used."""
    capsules = [None if t is None else _capsule(t) for t in (q, out, lse)]
    q_at, out_at, lse_at = (None if one is None else _pointer_of(one, b"dltensor") for one in capsules)
    args = _AttendArgs(layer=layer, q=q_at, out=out_at, lse=lse_at, positions=_numbers(positions),
                       indptr=_numbers(indptr), requests=0 if indptr is None else len(indptr) - 1, stream=stream)
    return args, capsules


class Index:
    def __init__(self, path, read=False):
        self.handle = c.c_void_p()
        _check(_lib.sqz_index_open(os.fsencode(path), int(read), c.byref(self.handle)))

    def describe(self):
        info = IndexInfo()
        info.index = self  # whose strings it borrows
        _check(_lib.sqz_index_describe(self.handle, c.byref(info)))
        return info

    def upload(self, device=0, **options):
        _check(_lib.sqz_index_upload(self.handle, c.byref(UploadOptions(device_id=device, **options))))

    def __del__(self, close=_lib.sqz_index_close):  # when the interpreter ends, _lib may be gone before
        close(self.handle)


class Session:
    """Keyword arguments are the fields of sqz_session_options; device: a CUDA device, or None."""

    def __init__(self, index, device=None, **options):
        self.handle = c.c_void_p()
        self._index = index
        if device is not None:
            options.update(device_type=2, device_id=device)
        _check(_lib.sqz_session_create(index.handle, c.byref(SessionOptions(**options)), c.byref(self.handle)))

    def attend(self, layer, q, out, lse, positions=None, indptr=None, stream=None):
        """Fills out and lse. positions and indptr are sequences of integers."""
        args, _capsules = _attend_args(layer, q, out, lse, positions, indptr, stream)
        _check(_lib.sqz_attend(self.handle, c.byref(args)))

    def select(self, layer, q, indptr=None, stream=None):
        """What attend() would read for the first block of q: for each KV head a list of (first slot, slots)."""
        args, _capsules = _attend_args(layer, q, None, None, None, indptr, stream)
        heads = self._index.describe().kv_heads
        starts, count = (c.c_int64 * (heads + 1))(), c.c_int64()
        runs = (_Run * 1)()
        for _ in range(2):  # the first call may only say how many there are
            status = _lib.sqz_select(self.handle, c.byref(args), runs, c.c_int64(len(runs)), starts, c.byref(count))
            if status != 1 or count.value <= len(runs):
                break
            runs = (_Run * count.value)()
        _check(status)
        return [[(run.first, run.length) for run in runs[starts[h]:starts[h + 1]]] for h in range(heads)]

    def reset_stats(self):
        _check(_lib.sqz_session_reset_stats(self.handle))

    def stats(self, layer=-1):
        stats = Stats()
        _check(_lib.sqz_session_stats(self.handle, c.c_int64(layer), c.byref(stats)))
        return stats

    def __del__(self, destroy=_lib.sqz_session_destroy):
        destroy(self.handle)
