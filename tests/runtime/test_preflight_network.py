"""The preflight's bandwidth against a link whose rate is known: two network namespaces and a token bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RANKS = Path(__file__).resolve().parent / "ranks"
MEGABIT = 50
NET = "10.77.31"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a veth pair, both directions shaped to MEGABIT."""
    if os.geteuid() != 0 or subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces need root and iproute2")
    names = tuple(f"sw{os.getpid()}{side}" for side in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "swva", "netns", names[0], "type", "veth", "peer", "name", "swvb", "netns", names[1])
        for number, (name, link) in enumerate(zip(names, ("swva", "swvb"), strict=True), start=1):
            ip("-n", name, "addr", "add", f"{NET}.{number}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape = f"qdisc add dev {link} root tbf rate {MEGABIT}mbit burst 64kb latency 50ms"
            subprocess.run(["ip", "netns", "exec", name, "tc", *shape.split()], check=True, capture_output=True)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_bandwidth_of_a_shaped_link_within_15_percent(two_hosts: tuple[str, str]) -> None:
    started = []
    for rank, (name, link) in enumerate(zip(two_hosts, ("swva", "swvb"), strict=True)):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": f"{NET}.1", "MASTER_PORT": "29611"}
        env |= {"GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
        words = ["ip", "netns", "exec", name, "timeout", "-k", "5", "200", sys.executable, str(RANKS / "bandwidth.py")]
        started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    told, _ = started[0].communicate(timeout=220)
    started[1].communicate(timeout=30)
    assert [one.returncode for one in started] == [0, 0]
    results = {one["name"]: one for one in map(json.loads, told.splitlines())}
    assert results["collectives-correct"]["passed"]
    shaped = MEGABIT * 1e6 / 8
    for name in ("pair-bandwidth", "all-reduce-bandwidth"):
        assert results[name]["value"] == pytest.approx(shaped, rel=0.15), (name, results[name])
