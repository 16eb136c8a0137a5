"""torchrun that ends with the process that started it, so that no orphan keeps a run directory.

When its parent is killed, the kernel kills it, and the kernel kills its workers in turn: nothing has to run for it.
Its workers get a fresh store in every attempt. torchrun's default is one store for all attempts: restarted gloo workers
can then read the addresses of the killed ones from it and wait for peers that no longer exist.
"""

from __future__ import annotations

import os
import sys

from shardwright.runtime.launch.process import die_with_parent, tie_children

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""What every torchrun of this program needs in its environment, whichever engine starts it."""


def main() -> None:
    """Hand over to torchrun's own command line."""
    die_with_parent()
    tie_children()
    os.environ.update(FRESH_STORE)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except SignalException as stopped:  # asked to stop, and the workers have been told: no fault to trace
        sys.exit(128 + int(stopped.sigval))


if __name__ == "__main__":
    main()
