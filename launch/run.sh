#!/usr/bin/env bash
# One process of a run, for launchers that go by exit codes.
#
#   launch/run.sh [--dry-run] --config=configs/grpo.py --workdir=runs/grpo
#
# Hands SIGTERM (and Ctrl-C, as one) on to Python, which saves after the step
# and leaves. Ends
# with 0 if the job is done; with 75 if it was told to stop before that: start
# it again. Other codes are Python's: 70 is the watchdog's, above 128 a signal's
# (134: a peer is lost): start all processes again. The rest no restart mends.
set -euo pipefail
cd "$(dirname "$0")/.."

command=(python -m searchrl.main)
if [[ ${1:-} == --dry-run ]]; then
  shift
  echo "${command[@]}" "$@"
  exit
fi
workdir=
for flag in "$@"; do
  case $flag in --workdir=*) workdir=${flag#*=} ;; esac
done
: "${workdir:?give --workdir=, on a file system that all processes share}"

told=0
child=
hand_on() {
  told=$((told + 1))
  [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true
}
trap hand_on TERM INT
"${command[@]}" "$@" &
child=$!
while :; do
  seen=$told
  code=0
  wait "$child" || code=$?
  ((told > seen)) || break  # else a signal ended `wait`, and not the child
done
if ((code == 0 && told)) && [[ ! -e $workdir/summary.txt ]]; then
  code=75
fi
exit "$code"
