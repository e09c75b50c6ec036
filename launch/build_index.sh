#!/usr/bin/env bash
# Builds an index of a corpus: vectors, and the search structures over them. One
# process, or one on each of several hosts; each encodes its share.
#
#   launch/build_index.sh --config=configs/build_index.py --workdir=/shared/e5 \
#       --config.corpus=wiki.jsonl --config.encoder.path=intfloat/e5-base-v2
#
# On several hosts set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
# JAX_PROCESS_ID on each, as for launch/explicit.sh; the workdir is on a file
# system that all share. The same command goes on after a kill; finished shards
# are kept.
# --dry-run, first, prints the command.
set -euo pipefail
cd "$(dirname "$0")/.."

command=(python -m searchrl.main)
if [[ ${1:-} == --dry-run ]]; then
  shift
  echo "${command[@]}" "$@"
  exit
fi
ulimit -n "$(ulimit -H -n)"  # a file for each shard
exec "${command[@]}" "$@"
