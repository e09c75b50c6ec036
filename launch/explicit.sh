#!/usr/bin/env bash
# Starts one process of many, on hosts that you log in to or that a launcher of
# your own starts. On every host, with its own number:
#
#   JAX_COORDINATOR_ADDRESS=host0:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \
#       launch/explicit.sh --config=configs/grpo.py --workdir=/shared/runs/grpo
#
# The address is that of process 0, with any free port; it has to be reachable
# from the others, and from nobody else. --dry-run, first, prints the command.
set -euo pipefail

: "${JAX_COORDINATOR_ADDRESS:?host:port of process 0}"
: "${JAX_NUM_PROCESSES:?how many processes there are}"
: "${JAX_PROCESS_ID:?the number of this one, from 0}"
export JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID
exec "$(dirname "$0")/run.sh" "$@"
