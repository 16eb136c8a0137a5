#!/usr/bin/env bash
# A Slurm of one controller and two nodes on this host, for tests: start DIR | stop DIR.
# `start` installs Debian's packages if they are missing (root), and prints the SLURM_CONF to export.
set -euo pipefail
action=${1:?start or stop} dir=$(realpath -m "${2:?folder}")
host=$(hostname -s)

if [ "$action" = stop ]; then
  for pid in "$dir"/slurmd.n1.pid "$dir"/slurmd.n2.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
    if [ -f "$pid" ]; then kill "$(cat "$pid")" 2>/dev/null || true; fi
  done
  exit 0
fi

if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm: slurmctld and munged are missing; install slurm-wlm and munge" >&2
    exit 3
  fi
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 >&2
fi

mkdir -p "$dir"/{state,log,spool.n1,spool.n2} /run/munge
chown munge: /run/munge
if [ ! -S /run/munge/munge.socket.2 ] || ! munge -n >/dev/null 2>&1; then
  touch "$dir/munged.pid" && chown munge: "$dir/munged.pid" && chmod a+x "$dir"
  setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --force
  cp /run/munge/munged.pid "$dir/munged.pid" 2>/dev/null || true
fi
# Ports of their own for every folder, so that two of these can run side by side.
base=$((17000 + $(printf '%s' "$dir" | cksum | cut -d' ' -f1) % 900 * 3))
cat >"$dir/slurm.conf" <<CONF
ClusterName=onehost
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
SlurmctldPort=$base
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=60
KillWait=30
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((base + 1)) CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((base + 2)) CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=ci Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF="$dir/slurm.conf"
slurmctld && slurmd -N n1 && slurmd -N n2
for _ in $(seq 60); do
  [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null | tr -d ' ')" = 2 ] && break
  sleep 0.5
done
sinfo --noheader --Node --format='%N %T' >&2
echo "$SLURM_CONF"
