"""flash-kmeans beside sqz-bench kmeans on four shapes, in one run.

  kmeans_vs_flash.py --sqz-bench build/cuda/tools/sqz-bench

Spherical k-means of random bf16 points, 10 iterations; flash-kmeans and ours take turns, shape by shape. A
time is the median of several runs. flash-kmeans does 10 assignments, so the ratio is that to ours with 10;
the time that counts, with the final labelling, stands beside it. Also the mean cosine of points and their
centroids, the objective. Needs torch with CUDA, triton and flash-kmeans.
"""
import argparse
import json
import subprocess
import sys

try:
    import torch
    from flash_kmeans.kmeans_triton_impl import batch_kmeans_Cosine
    import flash_kmeans
except ImportError as error:
    sys.exit(f"kmeans_vs_flash: {error}")
from gpu_clock import GpuClock

SHAPES = [(256, 131072, 128, 0.05), (256, 131072, 128, 0.01), (8, 524288, 128, 0.05), (64, 32768, 128, 0.05)]
ITERATIONS = 10


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


def flash(heads, count, dim, clusters, runs):
    points = torch.randn(heads, count, dim, device="cuda", dtype=torch.bfloat16)
    out = []

    def work():
        out[:] = batch_kmeans_Cosine(points, clusters, max_iters=ITERATIONS, tol=-1.0)

    with GpuClock() as clock:
        time = milliseconds(work, runs)
    labels, centroids, done = out
    assert done == ITERATIONS, done
    return time, objective(points, labels, centroids), clock.text()


def ours(program, heads, count, dim, fraction, iterations):
    """The benchmark's row, with one assignment after the last iteration."""
    command = [program, "kmeans", "--device=cuda", f"--kv-heads={heads}", f"--tokens={count}", f"--head-dim={dim}",
               f"--clusters={fraction}", f"--iterations={iterations}", "--benchmark_filter=kernels",
               "--benchmark_format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)["benchmarks"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sqz-bench", required=True, help="the program, built with SQZ_CUDA")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of flash-kmeans")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kmeans_vs_flash: no CUDA device")
    torch.manual_seed(0)
    version = getattr(flash_kmeans, "__version__", "of unknown version")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash-kmeans {version}", flush=True)
    for heads, count, dim, fraction in SHAPES:
        clusters = round(fraction * count)
        whole = ours(args.sqz_bench, heads, count, dim, fraction, ITERATIONS)
        equal = ours(args.sqz_bench, heads, count, dim, fraction, ITERATIONS - 1)
        time, cosine, clock = flash(heads, count, dim, clusters, args.runs)
        torch.cuda.empty_cache()
        flop = 2.0 * heads * count * clusters * dim * ITERATIONS
        print(f"{heads} heads x {count} x d{dim}, C {clusters}")
        for name, row in (("sqz", whole), ("sqz, 10 assignments", equal)):
            print(f"  {name:20} {row['real_time']:9.2f} ms  {row['flop_per_s'] * 1e-12:6.1f} TFLOP/s  mean cosine "
                  f"{row['mean_cosine']:.5f}")
        print(f"  {'flash-kmeans':20} {time:9.2f} ms  {flop / time * 1e-9:6.1f} TFLOP/s  mean cosine "
              f"{cosine:.5f}  {clock}")
        print(f"  flash-kmeans / sqz: {time / equal['real_time']:.2f} with 10 assignments each, "
              f"{time / whole['real_time']:.2f} with our final labelling", flush=True)


if __name__ == "__main__":
    main()
