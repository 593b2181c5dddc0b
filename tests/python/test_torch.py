"""Tensors of torch, on the CPU and on a GPU."""

import numpy as np
import pytest

import sqz
from conftest import queries

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 2e-2), (torch.bfloat16, 5e-2)])
def test_as_numpy(heads, dtype, tolerance):
    session, q = sqz.Session(heads, selector="dense"), queries(heads.info, 3)
    expected_out, expected_lse = session.attend(1, q)
    tensor = torch.from_numpy(q).to(dtype)
    out, lse = session.attend(1, tensor)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, torch.float32, tensor.shape, tensor.shape[:2])
    np.testing.assert_allclose(out.float().numpy(), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=tolerance)
    turned = torch.empty(heads.info.query_heads, 3)
    session.attend(1, tensor, out, turned.T, positions=torch.arange(132, 135), indptr=torch.tensor([0, 3]))
    assert torch.equal(turned.T, lse)
    before = lse.clone()
    sqz.merge_states(out, lse, out.clone(), turned.T)
    torch.testing.assert_close(lse, before + np.log(2))


def test_tensors_that_need_gradients(heads):
    session, q = sqz.Session(heads, selector="dense"), torch.from_numpy(queries(heads.info, 1))
    with pytest.raises(ValueError, match="q: .*gradient"):
        session.attend(0, q.requires_grad_())


def test_a_tensor_that_is_not_on_the_device(heads):
    session = sqz.Session(heads, selector="dense")
    with pytest.raises(ValueError, match="q: "):
        session.attend(0, torch.empty(1, 4, 4, device="meta"))


def test_cache_of_the_gpus_type(index):
    session, q = sqz.Session(index, selector="dense"), torch.from_numpy(queries(index.info, 2))
    keys, values = torch.randn(2, 1, 32, 8).bfloat16()
    out, lse = session.attend(0, q, cache=sqz.KVCache(keys, values))
    logits = torch.einsum("thd,hnd->thn", q, keys.float()) * index.info.attention_scale
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(out, torch.einsum("thn,hnd->thd", logits.softmax(-1), values.float()), atol=1e-4, rtol=0)
