#!/usr/bin/env bash
# A search server, apart from the runs that ask it.
#
#   launch/serve_search.sh --config=configs/serve_search.py
#
# JAX_PLATFORMS (default: cpu) says where a dense index lies; leave the
# accelerators to the runs, or give the server one of its own. SIGTERM ends it
# when what was asked is answered. --dry-run, first, prints the command.
set -euo pipefail
cd "$(dirname "$0")/.."

command=(python -m searchrl.main)
if [[ ${1:-} == --dry-run ]]; then
  shift
  echo "${command[@]}" "$@"
  exit
fi
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
ulimit -n "$(ulimit -H -n)"  # a file a connection
exec "${command[@]}" "$@"
