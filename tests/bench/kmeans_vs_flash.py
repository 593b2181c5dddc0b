"""flash-kmeans on the shapes of kmeans_bench, for a run beside it: kmeans_vs_flash.py

Spherical k-means of random bf16 points, 10 iterations, median of several runs. Also gives the mean
cosine of points and their centroids, the objective. Needs torch with CUDA, triton and flash-kmeans.
"""
import sys

try:
    import torch
    from flash_kmeans.kmeans_triton_impl import batch_kmeans_Cosine
except ImportError as error:
    sys.exit(f"kmeans_vs_flash: {error}")
if not torch.cuda.is_available():
    sys.exit("kmeans_vs_flash: no CUDA device")

SHAPES = [(64, 32768, 128, 1638), (64, 131072, 128, 1311), (64, 131072, 128, 6554),
          (8, 524288, 128, 26214)]


def milliseconds(work, runs):
    times = []
    for _ in range(runs + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[runs // 2]


def objective(points, labels, centroids):
    total = 0.0
    for head in range(points.shape[0]):
        unit = torch.nn.functional.normalize(points[head].float(), dim=-1)
        total += (unit * centroids[head].float()[labels[head].long()]).sum(-1).mean().item()
    return total / points.shape[0]


def main():
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for heads, count, dim, clusters in SHAPES:
        points = torch.randn(heads, count, dim, device="cuda", dtype=torch.bfloat16)
        iterations = 10
        out = []

        def work():
            out[:] = batch_kmeans_Cosine(points, clusters, max_iters=iterations, tol=-1.0)

        time = milliseconds(work, 3)
        labels, centroids, done = out
        flop = 2.0 * heads * count * clusters * dim * iterations
        print(f"flash-kmeans {heads:4d} heads x {count:7d} x d{dim:<3d} C {clusters:6d} "
              f"{done} it  {time:9.3f} ms ({flop / time / 1e9:5.1f} TFLOP/s)  objective "
              f"{objective(points, labels, centroids):.6f}", flush=True)
        del points, labels, centroids
        out.clear()


main()
