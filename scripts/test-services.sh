#!/usr/bin/env bash
# Debian's packages that some tests run for real: a browser, PostgreSQL, Slurm. Tests of what is missing skip and say so.
set -euo pipefail
declare -A needs=([chromium]=chromium [pg_ctlcluster]=postgresql [slurmctld]=slurm-wlm [munged]=munge [tc]=iproute2)
wanted=()
for command in "${!needs[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$command" >/dev/null || wanted+=("${needs[$command]}")
done
[ ${#wanted[@]} = 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "test services: missing ${wanted[*]}; the tests that need them will skip" >&2
  exit 0
fi
echo "test services: installing ${wanted[*]}" >&2
apt-get update -qq >&2
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" fonts-dejavu-core >&2
