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


class Borrowed:
    """A sqz_tensor over someone's memory, which stays there as long as this lives. `at`: its address."""

    def __init__(self, name: str, tensor: Any) -> None:
        torch = torch_of(tensor)
        if (torch is not None and (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided and
                not tensor.requires_grad and (kind := _dtypes(torch).get(tensor.dtype))):
            self._of_torch(tensor, kind)
            return
        require(name, tensor)
        try:
            on_cpu = tensor.__dlpack_device__()[0] == CPU
            # On a GPU the caller's stream orders the work; -1 asks the producer not to.
            with _current_device(tensor):
                self._capsule = tensor.__dlpack__() if on_cpu else tensor.__dlpack__(stream=-1)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
        self.at: int = _pointer_of(self._capsule, b"dltensor")
        view = _library.Tensor.from_address(self.at)
        self.shape: tuple[int, ...] = tuple(view.shape[:view.ndim])

    def _of_torch(self, tensor: Any, kind: int) -> None:
        """What its DLPack export has, without the time that takes: an engine calls once a layer. A struct sqz_tensor in
        words of 8 bytes, then its shape and strides."""
        self.shape, self._kept = tuple(tensor.shape), tensor
        rank, device = len(self.shape), CUDA | tensor.get_device() << 32 if tensor.is_cuda else CPU
        words = (c.c_int64 * (6 + 2 * rank))(tensor.data_ptr(), device, rank | kind << 32, 0, 0, 0,
                                             *self.shape, *tensor.stride())
        self.at = c.addressof(words)
        words[3], words[4] = self.at + 48, self.at + 48 + 8 * rank
        self._words = words


@functools.cache
def _dtypes(torch: Any) -> dict[Any, int]:
    """DLPack's code, bits and lanes of torch's types in one number."""
    return {torch.float32: 2 | 32 << 8 | 1 << 16, torch.float16: 2 | 16 << 8 | 1 << 16,
            torch.bfloat16: 4 | 16 << 8 | 1 << 16}


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
    return torch.empty(shape, dtype=torch.float32 if float32 else like.dtype, device=like.device)


def stream_of(tensor: Any) -> int | None:
    """The stream on which torch works with this tensor; None, the default stream, for other tensors."""
    torch = torch_of(tensor)
    return torch.cuda.current_stream(tensor.device).cuda_stream if torch is not None and tensor.is_cuda else None


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
