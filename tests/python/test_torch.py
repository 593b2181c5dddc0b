"""Tensors of torch, on the CPU and on a GPU."""

import numpy as np
import pytest

import sqz
from conftest import queries
from sqz import _tensors

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("old", [False, True])  # torch before 2.10
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 2e-2), (torch.bfloat16, 5e-2)])
def test_as_numpy(heads, monkeypatch, dtype, tolerance, old):
    if old:
        monkeypatch.setattr(_tensors, "_writer", lambda kind: None)
    session, q = sqz.Session(heads, selector="dense"), queries(heads.info, 3)
    expected_out, expected_lse = session.attend(1, q)
    tensor = torch.from_numpy(q).to(dtype)
    out, lse = session.attend(1, tensor, positions=torch.arange(132, 135), indptr=torch.tensor([0, 3]))
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, torch.float32, tensor.shape, tensor.shape[:2])
    np.testing.assert_allclose(out.float().numpy(), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=tolerance)
    before = lse.clone()
    sqz.merge_states(out, lse, out.clone(), before.clone())
    torch.testing.assert_close(lse, before + np.log(2))


def test_tensors_that_cannot_be_borrowed(heads):
    session, q = sqz.Session(heads, selector="dense"), torch.from_numpy(queries(heads.info, 1))
    with pytest.raises(ValueError, match="q: .*gradient"):
        session.attend(0, q.requires_grad_())
    with pytest.raises(ValueError, match="q: "):
        session.attend(0, torch.empty(1, 4, 4, device="meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu(made):
    """Beside the CPU: on a stream of torch's, in a graph, and merged there."""
    index = sqz.Index(made)
    index.upload("cuda:0", background=True)
    q = torch.from_numpy(queries(index.info, 3))
    dense = sqz.Session(index, selector="dense")
    session, on_gpu = sqz.Session(index, selector="dense", device="cuda:0"), q.cuda()

    def compare(found, q, lse_more):
        torch.cuda.synchronize()
        expected_out, expected_lse = dense.attend(0, q)
        torch.testing.assert_close(found[0].cpu(), expected_out, atol=1e-3, rtol=0)
        torch.testing.assert_close(found[1].cpu(), expected_lse + lse_more, atol=1e-3, rtol=0)

    with torch.cuda.stream(torch.cuda.Stream()):
        out, lse = session.attend(0, on_gpu, lse=torch.empty(index.info.query_heads, 3, device="cuda").T)
        sqz.merge_states(out, lse, out.clone(), lse.clone())
    compare((out, lse), q, np.log(2))
    other, graph = torch.randn_like(on_gpu), torch.cuda.CUDAGraph()
    result = torch.empty_like(out), torch.empty(lse.shape, device="cuda")
    with torch.cuda.graph(graph):
        session.attend(0, on_gpu, *result)
    on_gpu.copy_(other)
    graph.replay()
    compare(result, other.cpu(), 0)
    with pytest.raises(sqz.Error, match="q: device_type: found 1"):
        session.attend(0, q)
    session.close()
    index.unload("cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU here")
def test_on_a_gpu_that_is_not_the_current_one(made):
    index = sqz.Index(made)
    index.upload("cuda:1")
    q = torch.from_numpy(queries(index.info, 3))
    out, _ = sqz.Session(index, selector="dense", device="cuda:1").attend(0, q.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    assert torch.cuda.current_device() == 0
    expected, _ = sqz.Session(index, selector="dense").attend(0, q)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-3, rtol=0)
