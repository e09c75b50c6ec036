#!/usr/bin/env bash
# One process of a run, for launchers that go by exit codes.
#
#   launch/run.sh [--dry-run] --config=configs/grpo.py --workdir=runs/grpo
#
# Passes SIGTERM (and Ctrl-C, as one) on to Python, which saves after the step
# and leaves. The exit code is Python's: 0 if the job is done; 75 if a signal
# stopped it before that: start it again; 70 is the watchdog's, above 128 a
# signal's (134: a peer is lost): start all processes again. No restart helps
# after any other code.
set -euo pipefail
cd "$(dirname "$0")/.."

command=(python -m searchrl.main)
if [[ ${1:-} == --dry-run ]]; then
  shift
  printf "%s" "${command[*]}"
  printf " %q" "$@"
  echo
  exit
fi
workdir=
for flag in "$@"; do
  case $flag in --workdir=*) workdir=${flag#*=} ;; esac
done
if [[ -z $workdir ]]; then
  echo "run.sh must be given --workdir=, on a file system that all processes" \
    "share. To print help or a plan, use python -m searchrl.main." >&2
  exit 2
fi

signals=0
child=
hand_on() {
  signals=$((signals + 1))
  [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true
}
trap hand_on TERM INT
"${command[@]}" "$@" &
child=$!
while :; do
  seen=$signals
  code=0
  wait "$child" || code=$?
  ((signals > seen)) || break  # else a signal ended `wait`, and not the child
done
exit "$code"
