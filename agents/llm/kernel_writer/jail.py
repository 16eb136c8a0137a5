"""The first thing that runs in the sandbox: it shuts itself in, then runs a module of ours."""

from __future__ import annotations

import os
import runpy
import sys

from shardwright.agents.llm.kernel_writer.sandbox import NO_SANDBOX, shut_in


def main() -> None:
    packed = os.environ.pop("SHARDWRIGHT_JAIL")
    module = sys.argv[1]
    try:
        shut_in(packed)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_SANDBOX)
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
