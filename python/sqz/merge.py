"""Joining attention over the fixed context with attention over what follows."""

from sqz._library import check, lib
from sqz._tensors import Borrowed, DLPackTensor, stream_of


def merge_states(out_a: DLPackTensor, lse_a: DLPackTensor, out_b: DLPackTensor, lse_b: DLPackTensor,
                 stream: int | None = None) -> None:
    """Merges two states of the same queries over disjoint keys, exactly and in place into a.

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), and lse is the logarithm of the denominator.
    out: [tokens, heads, head_dim] float32, float16 or bfloat16, both the same. lse: [tokens, heads] float32, natural
    logarithm, any positive strides. On a GPU it is done on `stream`, as Session.attend() says.
    """
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    borrowed = [Borrowed(name, tensor) for name, tensor in tensors.items()]
    check(lib.sqz_merge_states_on(*(one.at for one in borrowed), stream_of(out_a) if stream is None else stream))
