#!/usr/bin/env python3
"""A corpus on a Slurm cluster of two nodes on this machine: a task is requeued, another cancelled and submitted again.

  tests/cluster/slurm_test.py build/cpu/tools

As root on Debian; installs Slurm and MUNGE if they are not there. Runs examples/slurm/build.sbatch over twelve pieces
of a novel. Not part of ctest.
"""
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from corpus import MODEL, ROOT, Corpus

CONFIG = """ClusterName=sqz
SlurmctldHost={host}
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
KillWait=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=16818-16819 CPUs=1
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def install() -> None:
    if shutil.which("slurmctld") and shutil.which("slurmd") and shutil.which("munged"):
        return
    subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "slurmctld", "slurmd", "slurm-client",
                    "munge"], check=True, stdout=subprocess.DEVNULL)


def start(folder: pathlib.Path) -> list[subprocess.Popen]:
    """The daemons, in the foreground of their processes: MUNGE, the controller, two nodes."""
    for name in ("munge", "state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o600)
    (folder / "munge").chmod(0o755)
    (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), folder=folder))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = folder / "munge"
    commands = [["munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
                 f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
                ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    daemons = []
    for command in commands:
        daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(2)
    return daemons


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def states(job: str) -> dict[str, str]:
    """By task of the array."""
    lines = output("squeue", "-h", "-r", "-j", job, "-o", "%K %T").splitlines()
    return dict(line.split() for line in lines if " " in line)


def wait(job: str, condition, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition(states(job)):
        assert time.monotonic() < end, states(job)
        time.sleep(0.5)


def main() -> int:
    install()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        corpus = Corpus(folder, sys.argv[1], 12, 8000)
        daemons = start(folder)
        try:
            os.environ["PATH"] = f"{corpus.tool.parent}:{os.environ['PATH']}"
            os.chdir(folder)

            def submit(tasks: str) -> str:
                return output("sbatch", "--parsable", f"--array={tasks}", "--cpus-per-task=1", "--mem=0",
                              str(ROOT / "examples/slurm/build.sbatch"), str(MODEL), str(corpus.manifest),
                              str(corpus.out))

            os.environ["SHARDS"] = "4"
            job = submit("0-3")
            wait(job, lambda all: all.get("0") == "RUNNING" and all.get("1") == "RUNNING")
            time.sleep(2)
            subprocess.run(["scontrol", "requeue", f"{job}_0"], check=True)
            subprocess.run(["scancel", f"{job}_1"], check=True)
            print("requeued task 0, cancelled task 1", flush=True)
            wait(job, lambda all: not all)
            built = len(list(corpus.out.rglob("*.sqz")))
            assert built < 12, "the cancelled task had documents left"
            again = submit("1")
            wait(again, lambda all: not all)
            print(f"{built} indexes before task 1 was submitted again, {time.monotonic() - begin:.0f} s", flush=True)
            corpus.check()
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()
    print(f"passed after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
