#!/usr/bin/env bash
# Runs a search server for runs on this or other machines.
#
#   launch/serve_search.sh --config=configs/serve_search.py
#
# JAX_PLATFORMS (default: cpu) is where a dense index is held; leave the
# accelerators to the runs, or give the server one of its own. After SIGTERM it
# answers the requests that it has, and ends. --dry-run, first, prints the
# command.
set -euo pipefail
cd "$(dirname "$0")/.."

command=(python -m searchrl.main)
if [[ ${1:-} == --dry-run ]]; then
  shift
  echo "${command[@]}" "$@"
  exit
fi
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
ulimit -n "$(ulimit -H -n)"  # a file for each connection
exec "${command[@]}" "$@"
