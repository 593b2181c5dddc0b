"""Tensors of numpy, torch and others through DLPack: borrowed, never copied."""

import ctypes as c
import functools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeAlias

import numpy as np

from sqz import _library


class DLPackTensor(Protocol):
    """A numpy array, a torch tensor, or another that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


Integers: TypeAlias = Sequence[int] | np.ndarray[Any, Any] | DLPackTensor
Device: TypeAlias = Any  # a number, "cpu", "cuda", "cuda:1" or a torch.device

_pointer_of = c.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = c.c_void_p
_pointer_of.argtypes = [c.py_object, c.c_char_p]

CPU, CUDA = 1, 2  # DLPack's numbers


def require(name: str, tensor: Any) -> None:
    """TypeError unless it is a tensor."""
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"{name}: found {type(tensor).__name__}, expected a numpy array, a torch tensor or another "
                        "that speaks DLPack")


def borrow(**tensors: Any) -> tuple[list[int], list[Any]]:
    """Addresses of sqz_tensors over someone's memory, 0 for None, and what must live as long as they and the tensors are
    used."""
    block = (c.c_uint8 * (_SIZE * len(tensors)))()
    at, places, kept = c.addressof(block), list[int](), list[Any]((block,))
    for name, tensor in tensors.items():
        if tensor is None:
            places.append(0)
            continue
        if (write := _writer(tensor.__class__)) and not tensor.requires_grad:
            try:
                write(tensor, at)
                places.append(at)
                at += _SIZE
                continue
            except RuntimeError:
                pass  # __dlpack__() says why
        kept.append(_capsule(name, tensor))
        places.append(_pointer_of(kept[-1], b"dltensor"))
    return places, kept


_SIZE = c.sizeof(_library.Tensor)


@functools.cache
def _writer(kind: type) -> Any:
    """torch's function that writes a sqz_tensor, without the time that a capsule takes: an engine calls once a layer.
    None for other kinds, and before torch 2.10."""
    torch, exchange = sys.modules.get("torch"), getattr(kind, "__dlpack_c_exchange_api__", None)
    if torch is None or exchange is None or not issubclass(kind, torch.Tensor):
        return None
    table = (c.c_void_p * 6).from_address(_pointer_of(exchange, b"dlpack_exchange_api"))  # a DLPackExchangeAPI
    version, function = (table[0] or 0) & 0xffffffff, table[5]
    return c.PYFUNCTYPE(c.c_int, c.py_object, c.c_void_p)(function) if version == 1 and function else None


def _capsule(name: str, tensor: Any) -> Any:
    require(name, tensor)
    try:
        on_cpu = tensor.__dlpack_device__()[0] == CPU
        # On a GPU the caller's stream orders the work; -1 asks the producer not to.
        with _current_device(tensor):
            return tensor.__dlpack__() if on_cpu else tensor.__dlpack__(stream=-1)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def torch_of(tensor: Any) -> Any:
    """The module torch if the tensor is torch's; nobody else needs it imported."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(tensor, torch.Tensor) else None


def _current_device(tensor: Any) -> Any:
    """A context in which the tensor's GPU is torch's current one: torch exports tensors of no other."""
    torch = torch_of(tensor)
    if torch is None or not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


# safetensors' names by those of numpy and torch.
_NAMES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16",
          "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64",
          "float64": "F64"}


def dtype_name(tensor: Any) -> str:
    """A tensor's type as safetensors has it; its own name if there is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def borrowed_view(view: "_library.Tensor", owner: Any) -> Any:
    """The memory of a sqz_tensor, which `owner` keeps: a tensor of torch if that is imported, else an array of numpy
    (bfloat16 as uint16)."""
    kind = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}[view.dtype_code]
    name, shape = kind if kind == "bool" else f"{kind}{view.dtype_bits}", tuple(view.shape[:view.ndim])
    size = view.dtype_bits // 8
    for count in shape:
        size *= count
    torch = sys.modules.get("torch")
    if size == 0:
        return np.empty(shape, name.replace("bfloat", "uint")) if torch is None else torch.empty(shape, dtype=getattr(torch, name))
    memory = (c.c_uint8 * size).from_address(view.data)
    memory.owner = owner
    if torch is None:
        return np.frombuffer(memory, name.replace("bfloat", "uint")).reshape(shape)
    return torch.frombuffer(memory, dtype=getattr(torch, name)).reshape(shape)


def empty(name: str, like: Any, shape: tuple[int, ...], float32: bool = False) -> Any:
    """A tensor of the same kind and device, of its dtype or float32."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, np.float32 if float32 else like.dtype)
    torch = torch_of(like)
    if torch is None:
        raise TypeError(f"{name}: found None, expected a tensor: {type(like).__name__} is not of numpy or torch")
    return like.new_empty(shape, dtype=torch.float32 if float32 else None)


def shape_at(address: int) -> tuple[int, ...]:
    """Gives the shape of a sqz_tensor, and () if there is none."""
    if not address:
        return ()
    view = _library.Tensor.from_address(address)
    return tuple(view.shape[:view.ndim])


def stream_of(tensor: Any) -> int | None:
    """The stream on which torch works with this tensor; None, the default stream, for other tensors."""
    torch = torch_of(tensor)
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if torch is not None and tensor.is_cuda else None


def capturing(tensor: Any) -> bool:
    """Whether torch captures a graph on the tensor's GPU."""
    return bool(tensor.is_cuda and torch_of(tensor).cuda.is_current_stream_capturing())


def integers(name: str, values: Integers) -> np.ndarray[Any, Any]:
    """Numbers in host memory as the library reads them, int64."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name}: found {array.dtype} of shape {list(array.shape)}, expected a sequence of integers")
    return np.ascontiguousarray(array, np.int64)


def on_gpu(name: str, numbers: Any) -> Any:
    """A tensor of torch in the memory of a GPU, where the library reads it, or None for numbers in host memory."""
    if torch_of(numbers) is None or not numbers.is_cuda:
        return None
    if str(numbers.dtype) != "torch.int64" or numbers.dim() != 1 or not numbers.is_contiguous():
        raise ValueError(f"{name}: found {numbers.dtype} {list(numbers.shape)} on a GPU, expected contiguous int64 [tokens]")
    return numbers


def device_of(device: Any) -> tuple[int, int]:
    """(type, number) as in DLPack of None, "cpu", a number, "cuda", "cuda:1" or a torch.device."""
    if device is None or str(device) in ("cpu", "cpu:0"):
        return CPU, 0
    text = str(device).removeprefix("cuda:") if not isinstance(device, bool) else ""
    if text == "cuda":
        return CUDA, 0
    if not text.isdecimal():
        raise ValueError(f'device: found {device!r}, expected "cpu", "cuda", "cuda:1" or a number')
    return CUDA, int(text)
