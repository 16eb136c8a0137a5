"""Debian's PostgreSQL for a test: its own cluster in a folder, on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
USER = "postgres"


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A server that trusts this machine; gives its URL. Stopped and removed afterwards."""
    binaries = FOUND[-1].parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="shardwright-pg-"))
    prefix: list[str] = []
    if os.geteuid() == 0:  # the server refuses to run as root
        account = pwd.getpwnam(USER)
        os.chown(folder, account.pw_uid, account.pw_gid)
        prefix = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]

    def run(*words: str) -> None:
        subprocess.run([*prefix, *words], check=True, capture_output=True, timeout=60, cwd=folder)

    data = str(folder / "data")
    try:
        run(str(binaries / "initdb"), "-A", "trust", "-U", USER, "--no-sync", "-D", data)
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
        run(str(binaries / "pg_ctl"), "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
        yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(str(binaries / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)
