#!/usr/bin/env bash
# Make .venv once from the lock: scripts/setup.sh [VENV]. A stamp names the lock it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
want=$(cat requirements.lock requirements-examples.lock pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ -f "$venv/.shardwright-lock" ] && [ "$(cat "$venv/.shardwright-lock")" = "$want" ]; then exit 0; fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $python is older than 3.11; set PYTHON to a newer one" >&2
  exit 2
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing python3-venv" >&2
    apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >&2
  else
    echo "setup: Python's venv module is missing; install python3-venv" >&2
    exit 2
  fi
fi
echo "setup: making $venv from requirements.lock" >&2
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Byte code is written at first import: compiling all of torch here costs more than it saves.
pip install -qq --no-compile -r requirements.lock
pip install -qq --no-compile --no-deps -r requirements-examples.lock
pip install -qq --no-deps --no-build-isolation --editable .
printf '%s' "$want" >"$venv/.shardwright-lock"
echo "setup: done" >&2
