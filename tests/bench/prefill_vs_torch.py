"""Dense prefill attention of PyTorch on the GPU it runs on: what prefill_bench is compared with.

32 query heads, 8 KV heads, d = 128, bf16, no mask, Gaussian data; median of ten calls by events.
"""
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_milliseconds(call):
    for _ in range(3):
        call()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main():
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for tokens, keys in ((4096, 131072), (1024, 131072), (4096, 524288)):
        q = torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, 8, keys, 128, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION),
                              ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                time = median_milliseconds(
                    lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
            print(f"{tokens:5} x {keys:7} {name:6} {time:8.3f} ms "
                  f"{4 * 32 * tokens * keys * 128 / time * 1e-9:7.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
