"""Points in a process of their own: what takes the process down costs one point.

A device that met an illegal address answers nothing more in that process, and a kernel that hangs ends with it alone.
The worker prints one line for each point that began, in order; so the first point without a line is the one that a dead
or silent worker died of, and another worker goes on behind it.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

FAILED, OUT_OF_MEMORY = "failed", "out_of_memory"
"""Metrics of a point that could not be measured."""

START_SECONDS = 60.0
"""What a worker may take before its first point, and a point beyond its own limit, which Python alone can hear."""


@dataclass(frozen=True)
class Supervised:
    """A worker's command line, how long it may be silent beyond ``START_SECONDS``, and its environment."""

    command: Sequence[str]
    silent_s: float
    say: Callable[[str], None]
    env: Mapping[str, str] | None = None

    def lines(self, cases: Sequence[str], whole_s: float) -> Iterator[str]:
        """Lines of all points that were measured or had too little memory, as they come."""
        began, left = time.perf_counter(), list(cases)
        while left:
            rest_s = whole_s - (time.perf_counter() - began)
            if rest_s <= 0:
                self.say(f"{len(left)} points not begun, {whole_s:g} s are over")
                return
            ended = False
            for text in self._worker([f"--worker={','.join(left)}", f"--limit-seconds={rest_s:.1f}"]):
                if text is None:
                    ended = True
                    break
                found = json.loads(text)
                left.remove(found["case"])
                if FAILED not in found["metrics"]:
                    yield text
            if ended:
                return
            if left:
                self.say(f"{left[0]}: its process ended or fell silent; going on behind it")
                left.pop(0)

    def run_alone(self) -> bool:
        """The command once, within the limit; whether it ended well."""
        try:
            done = subprocess.run(self.command, timeout=self.silent_s + START_SECONDS, check=False, env=self.env)
        except subprocess.TimeoutExpired:
            self.say(f"{self.command[1:3]}: stopped after {self.silent_s:g} s")
            return False
        return done.returncode == 0

    def _worker(self, further: Sequence[str]) -> Iterator[str | None]:
        """Lines of one worker; ``None`` at last where it ended well."""
        process = subprocess.Popen([*self.command, *further], stdout=subprocess.PIPE, text=True, env=self.env)
        found: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for text in process.stdout:
                found.put(text.strip())
            found.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            while True:
                text = found.get(timeout=self.silent_s + START_SECONDS)
                if text is None:
                    break
                if text.startswith("{"):
                    yield text
            if process.wait(timeout=START_SECONDS) == 0:
                yield None
        except (queue.Empty, subprocess.TimeoutExpired):
            self.say("a worker is silent; stopped")
        finally:
            process.kill()
            process.wait()
            reader.join()
