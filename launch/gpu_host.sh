#!/usr/bin/env bash
# Runs on one host with GPUs: one process for each, or fewer with equal shares.
#
#   launch/gpu_host.sh --config=configs/grpo.py --workdir=runs/grpo
#   launch/gpu_host.sh --processes=1 \
#       --config=configs/grpo.py --workdir=runs/grpo
#
# Processes sample and search independently of each other. The GPUs of one wait
# for each other at every token, but share an index that is on the devices.
# GPUS (default: all that nvidia-smi lists) may be 0: then each process has the
# CPU. PORT is the coordinator's. --dry-run, first, prints the commands.
set -euo pipefail
here=$(dirname "$0")

dry=()
if [[ ${1:-} == --dry-run ]]; then
  dry=(--dry-run)
  shift
fi
# Sends while it computes, and makes one CUDA graph of a decode's loop; what
# XLA_FLAGS say already counts more.
flags='--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_command_buffer=+WHILE'
export XLA_FLAGS="$flags ${XLA_FLAGS:-}"
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
processes=$((gpus ? gpus : 1))
if [[ ${1:-} == --processes=* ]]; then
  processes=${1#*=}
  shift
fi
if [[ ! $processes =~ ^[1-9][0-9]*$ ]]; then
  echo "--processes must be a whole number above 0, but is '$processes'." >&2
  exit 2
fi
if ((processes == 1)); then
  exec "$here/run.sh" "${dry[@]}" "$@"
fi

if ((gpus % processes)); then
  echo "$processes processes must divide $gpus GPUs." >&2
  exit 2
fi
each=$((gpus / processes))
export JAX_COORDINATOR_ADDRESS=127.0.0.1:${PORT:-$((20000 + RANDOM % 10000))}
export JAX_NUM_PROCESSES=$processes

children=()
signals=0
hand_on() {
  signals=$((signals + 1))
  kill -TERM "${children[@]}" 2>/dev/null || true
}
trap hand_on TERM INT
for ((i = 0; i < processes; i++)); do
  devices=
  if ((each)); then
    devices=$(seq -s, $((i * each)) $((i * each + each - 1)))
  fi
  if ((${#dry[@]})); then
    echo "CUDA_VISIBLE_DEVICES=$devices JAX_PROCESS_ID=$i" \
        "$("$here/run.sh" --dry-run "$@")"
    continue
  fi
  CUDA_VISIBLE_DEVICES=$devices JAX_PROCESS_ID=$i "$here/explicit.sh" "$@" &
  children+=($!)
done

worst=0  # a lost process ends the others, too, after a while
for child in "${children[@]}"; do
  while :; do
    seen=$signals
    code=0
    wait "$child" || code=$?
    ((signals > seen)) || break  # else a signal ended `wait`, and not the child
  done
  if ((code > worst)); then
    worst=$code
  fi
done
exit "$worst"
