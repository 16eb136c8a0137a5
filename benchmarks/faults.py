"""The fault drill: one run of examples/tiny-moe on two ranks meets fifteen faults and must end as an unbroken run.

``python benchmarks/faults.py --seed 0`` (root, Linux: it works in a network namespace and on a small tmpfs of its own).
Faults: SIGKILL of a random rank after 10 random steps, the loopback down for 5 s, a second start in the same run
directory, a full disk during a save, SIGTERM, a flipped bit in the newest save. Counted: steps lost beyond the newest
whole save, adapters that differ from the unbroken run's, exit codes other than documented.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
INSIDE = "SHARDWRIGHT_FAULTS_INSIDE"
KILLS, STEPS, SAVE_EVERY = 10, 80, 2
TMPFS_BYTES = 8 << 20
BALLAST_LEAVES = 100 << 10
NETWORK_DOWN_S = 5.0
PATIENCE_S = 300.0
ADAPTER_TOLERANCE = 1e-5
"""fp32 on one machine; sums over two ranks may be added in another order after a restart."""


@dataclass
class Count:
    """What the drill reports."""

    faults: int = 0
    lost_steps_beyond_save: int = 0
    wrong_exit_codes: int = 0
    wrong_adapters: int = 0
    told: list[str] = field(default_factory=list)

    def fault(self, text: str, *, lost: int = 0, code: tuple[int, int] | None = None) -> None:
        """One fault: steps lost beyond the save, and (found, documented) exit code."""
        self.faults += 1
        self.lost_steps_beyond_save += max(0, lost)
        self.wrong_exit_codes += code is not None and code[0] != code[1]
        self.told.append(text)
        sys.stderr.write(f"fault {self.faults}: {text}\n")


class Drill:
    """The run that is tormented."""

    def __init__(self, work: Path, seed: int) -> None:
        self.random, self.work, self.count = random.Random(seed), work, Count()
        self.run_dir, self.checkpoint, self.plan = work / "run", work / "inputs" / "checkpoint", work / "plan.json"
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Inputs, an approved plan, an unbroken run, and a small disk for the saves of the other."""
        inputs = self.work / "inputs"
        if not (self.work / "unbroken" / "adapter").is_dir():
            self.make_inputs(inputs)
        (self.run_dir / "checkpoints").mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "faults", str(self.run_dir / "checkpoints")]
        subprocess.run(mount, check=True)

    def make_inputs(self, inputs: Path) -> None:
        """Checkpoint, data, recipe, approved plan, and the run that nothing happens to."""
        subprocess.run([sys.executable, str(ROOT / "examples/tiny-moe/build.py"), "--out", str(inputs)], check=True)
        recipe = yaml.safe_load((inputs / "recipe.yaml").read_text())
        recipe["schedule"] |= {"steps": STEPS, "save_every_steps": SAVE_EVERY, "warmup_steps": 1}
        (inputs / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        options = {"engine": "local", "max_restarts": KILLS + 5}
        (self.work / "launch.yaml").write_text(yaml.safe_dump(options))
        words = ["plan", self.checkpoint, "--cluster", "cpu-2", "--recipe", inputs / "recipe.yaml", "-o", self.plan]
        require(cli(*words, "--trials", "4"), 0)
        require(cli("review", self.plan, "--approve", "--actor", "fault-drill"), 0)
        require(cli(*self.words(self.work / "unbroken")), 0)

    def words(self, run_dir: Path) -> list[object]:
        given = ["--checkpoint", self.checkpoint, "--data-root", self.work / "inputs", "--run-dir", run_dir]
        return ["apply", self.plan, *given, "--launch", self.work / "launch.yaml"]

    def start(self) -> None:
        with open(self.work / "apply.log", "ab") as log:
            self.process = subprocess.Popen(command(*self.words(self.run_dir)), stdout=log, stderr=log)

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def steps_done(self) -> int:
        """Newest step in the metrics."""
        path, newest = self.run_dir / "metrics.jsonl", 0
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            try:
                newest = max(newest, json.loads(line)["step"])
            except ValueError:
                continue
        return newest

    def newest_save(self) -> int:
        names = [entry.name for entry in (self.run_dir / "checkpoints").glob("step-*")]
        return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)

    def resumed(self) -> list[int]:
        path = self.run_dir / "run.json"
        return json.loads(path.read_bytes())["resumed_from_steps"] if path.is_file() else []

    def advance(self) -> None:
        """Let it train a random few steps from where it is."""
        wanted = min(STEPS - 6, self.steps_done() + self.random.randint(1, 4))
        self.wait(lambda: self.steps_done() >= wanted)

    def wait(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if self.process is not None and self.process.poll() is not None:
                raise SystemExit(f"the run ended early with {self.process.returncode}: {self.work / 'apply.log'}")
            if time.monotonic() > deadline:
                raise SystemExit("the run does not advance")
            time.sleep(0.005)

    def workers(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"-u" in words and str(self.run_dir).encode() in words:
                    found.append(int(entry.name))
        return sorted(found)

    def went_on(self, before: list[int], save: int) -> int:
        """Steps lost beyond a save, once the run has resumed again."""
        self.wait(lambda: len(self.resumed()) > len(before))
        return save - self.resumed()[-1]

    def kill_a_rank(self) -> None:
        self.advance()
        self.wait(lambda: len(self.workers()) == 2 and self.newest_save() > 0)
        before, step, save = self.resumed(), self.steps_done(), self.newest_save()
        victim = self.random.choice(self.workers())
        os.kill(victim, signal.SIGKILL)
        lost = self.went_on(before, save)
        self.count.fault(f"SIGKILL of a rank after step {step}; went on from step {self.resumed()[-1]}", lost=lost)

    def lose_the_network(self) -> None:
        self.advance()
        before = self.resumed()
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        time.sleep(NETWORK_DOWN_S)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        save = self.newest_save()
        at = self.steps_done()
        self.wait(lambda: self.steps_done() > at or len(self.resumed()) > len(before))
        again = len(self.resumed()) > len(before)
        lost = save - self.resumed()[-1] if again else 0
        self.count.fault(f"network down for {NETWORK_DOWN_S:g} s; " + ("resumed" if again else "went on"), lost=lost)

    def start_twice(self) -> None:
        """While the first is held still in mid-run: starting the command line may take longer than the steps left."""
        self.advance()
        self.wait(lambda: len(self.workers()) == 2)
        held = self.workers()
        for worker in held:
            os.kill(worker, signal.SIGSTOP)
        done = cli(*self.words(self.run_dir))
        for worker in held:
            os.kill(worker, signal.SIGCONT)
        refused = "run/locked" in done.stderr or "run-dir-in-use" in done.stderr
        self.count.fault(f"second start refused: {refused}", code=(done.returncode if refused else -1, 1))

    def fill_the_disk(self) -> None:
        self.advance()
        self.wait(lambda: self.newest_save() > 0)
        folder = self.run_dir / "checkpoints"
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        (folder / "ballast").write_bytes(bytes(max(0, free - BALLAST_LEAVES)))
        code = self.ended()
        failure = json.loads((self.run_dir / "failure.json").read_bytes())
        save, before = self.newest_save(), self.resumed()
        (folder / "ballast").unlink()
        self.start()
        lost = self.went_on(before, save)
        full = failure["code"] == "run/disk-full"
        self.count.fault(f"disk full during a save: {failure['code']}", lost=lost, code=(code if full else -1, 1))

    def terminate(self) -> int:
        """SIGTERM; returns the step of the save that it made."""
        self.advance()
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.ended()
        done, save = self.steps_done(), self.newest_save()
        self.count.fault(f"SIGTERM after step {done}; saved step {save}", lost=done - save, code=(code, 130))
        return save

    def damage_the_newest(self) -> None:
        """While it is stopped: one bit of the newest save. The save before it must be taken, and that be told."""
        newest = self.newest_save()
        folder = self.run_dir / "checkpoints" / f"step-{newest}"
        victim = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
        data = bytearray(victim.read_bytes())
        data[self.random.randrange(len(data))] ^= 1
        victim.write_bytes(bytes(data))
        whole = [int(one.name[5:]) for one in folder.parent.glob("step-*") if one.name[5:].isdigit() and one != folder]
        before = self.resumed()
        self.start()
        lost = self.went_on(before, max(whole))
        told = any(f"step-{newest} is damaged" in line for line in self.record()["warnings"])
        self.count.fault(f"newest save damaged; told: {told}", lost=lost, code=(0 if told else -1, 0))

    def record(self) -> dict:
        return json.loads((self.run_dir / "run.json").read_bytes())

    def finish(self) -> None:
        """To the end; then compare with the unbroken run."""
        from safetensors.numpy import load_file

        code = self.ended()
        self.count.wrong_exit_codes += code != 0
        sides = [
            load_file(folder / "adapter/adapter_model.safetensors") for folder in (self.run_dir, self.work / "unbroken")
        ]
        same = sides[0].keys() == sides[1].keys()
        worst = max(float(abs(value - sides[1][name]).max()) for name, value in sides[0].items()) if same else 1.0
        steps = [one["step"] for one in self.record()["steps"]]
        right = same and worst <= ADAPTER_TOLERANCE and self.record()["status"] == "exported"
        self.count.wrong_adapters += not (right and steps == list(range(1, STEPS + 1)))
        sys.stderr.write(f"adapter differs from the unbroken run's by at most {worst:.1e}; exit code {code}\n")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "shardwright.workflows.cli.main", *map(str, words)]


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, check=False)


def require(done: subprocess.CompletedProcess[str], code: int) -> None:
    if done.returncode != code:
        raise SystemExit(f"preparation failed with {done.returncode}:\n{done.stderr[-3000:]}")


def drill(work: Path, seed: int, kills: int = KILLS) -> Count:
    """All faults, in one run.

    Args:
        kills: how often a random rank is killed.
    """
    torment = Drill(work, seed)
    torment.prepare()
    try:
        torment.start()
        for _ in range(kills):
            torment.kill_a_rank()
        torment.lose_the_network()
        torment.start_twice()
        torment.fill_the_disk()
        torment.terminate()
        torment.damage_the_newest()
        torment.finish()
    finally:
        if torment.process is not None and torment.process.poll() is None:
            torment.process.kill()
            torment.process.wait()
        subprocess.run(["umount", "-l", str(torment.run_dir / "checkpoints")], check=False)
    return torment.count


def main() -> int:
    """Run the drill and add its line to ``benchmarks/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder of result files [default: benchmarks/results]")
    parser.add_argument(
        "--work",
        type=Path,
        default=None,
        help="keep the runs in this folder; inputs and the unbroken run that are there are used again",
    )
    parser.add_argument(
        "--kills", type=int, default=KILLS, help=f"kills of a rank; fewer than {KILLS} are a rehearsal, without a line"
    )
    options = parser.parse_args()
    if os.environ.get(INSIDE) != "1":
        # A network and a mount table of its own: the loopback that goes down is nobody else's.
        inner = 'ip link set lo up && exec "$0" "$@"'
        words = ["unshare", "--net", "--mount", "sh", "-c", inner, sys.executable, *sys.argv]
        return subprocess.run(words, env={**os.environ, INSIDE: "1"}, check=False).returncode
    from lines import RESULTS, append, line

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        count = drill(work, options.seed, options.kills)
    metrics = {
        "faults": count.faults,
        "lost_steps_beyond_save": count.lost_steps_beyond_save,
        "wrong_adapters": count.wrong_adapters,
        "wrong_exit_codes": count.wrong_exit_codes,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.kills >= KILLS:
        made = line({"bench": "faults", "case": "faults/drill", "unit": "count", "metrics": metrics})
        append([made], options.out or RESULTS)
    sys.stdout.write(json.dumps(metrics, indent=2) + "\n")
    return int(bool(count.lost_steps_beyond_save or count.wrong_adapters or count.wrong_exit_codes))


if __name__ == "__main__":
    sys.exit(main())
