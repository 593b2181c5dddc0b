"""What a GPU's clocks and power were while something ran, by nvidia-smi every 20 ms."""
import statistics
import subprocess


class GpuClock:
    """with GpuClock() as clock: ...; clock.text() afterwards."""

    def __init__(self, device=0):
        self.command = ["nvidia-smi", f"--id={device}", "-lms", "20", "--format=csv,noheader,nounits",
                        "--query-gpu=clocks.sm,clocks.mem,power.draw"]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        rows = [line.split(",") for line in self.process.communicate()[0].splitlines()]
        self.rows = [[float(x) for x in row] for row in rows
                     if len(row) == 3 and all(x.strip().replace(".", "", 1).isdigit() for x in row)]

    def text(self):
        if not self.rows:
            return "clocks not read"
        sm, memory, watts = (statistics.median(column) for column in zip(*self.rows))
        return f"SM {sm:.0f} MHz, memory {memory:.0f} MHz, {watts:.0f} W"
