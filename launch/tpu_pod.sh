#!/usr/bin/env bash
# Creates a Cloud TPU slice of one or more hosts, runs on it, and deletes it.
#
#   export NAME=my-tpu ZONE=us-west4-a TYPE=v5litepod-16 SPOT=1
#   export REPO=https://example.com/searchrl.git
#   launch/tpu_pod.sh create     # asks for the slice; does nothing if it exists
#   launch/tpu_pod.sh status     # ACTIVE: it is yours, and costs
#   launch/tpu_pod.sh setup      # clones and installs on every host
#   launch/tpu_pod.sh run --config=configs/grpo.py --workdir=/mnt/runs/grpo
#   launch/tpu_pod.sh stop       # SIGTERM: saves after the step, and leaves
#   launch/tpu_pod.sh delete
#
# --dry-run, first, prints what would be run. The workdir has to be on a file
# system that all hosts share: MOUNT is a command that `setup` runs on each, as
# 'sudo mount 10.0.0.2:/runs /mnt/runs' for Filestore. RUNTIME is the image.
# Project and account are gcloud's; no key is read or stored here. The output of
# worker i goes to LOGS/i.log. LIBTPU_INIT_ARGS here count more than the flags of
# the compiler that the README gives for a chip. REVISION is the branch, tag or
# commit of REPO that `setup` checks out, by default the newest of its main branch.
set -euo pipefail
here=$(dirname "$0")

dry=0
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
verb=${1:?create, status, setup, run, stop or delete}
shift
: "${NAME:?of the queued resource and its node}" "${ZONE:?such as us-west4-a}"
type=${TYPE:-v5litepod-16}
runtime=${RUNTIME:-v2-alpha-tpuv5-lite}
logs=${LOGS:-logs/$NAME}
compiler=
if [[ $type == v6e-* ]]; then
  compiler='--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'
  compiler+=' --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true'
  compiler+=' --xla_enable_async_all_gather=true'
fi
compiler+=${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS}

do_it() {
  if ((dry)); then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

resource() {
  do_it gcloud compute tpus queued-resources "$1" "$NAME" --zone="$ZONE" \
      "${@:2}"
}

on_all() {
  do_it gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \
      --command="$1" "${@:2}"
}

case $verb in
  create)
    if ((dry)) || ! resource describe >/dev/null 2>&1; then
      resource create --node-id="$NAME" --accelerator-type="$type" \
          --runtime-version="$runtime" ${SPOT:+--spot}
    fi
    ;;
  status)
    resource describe --format='value(state.state)'
    ;;
  setup)
    : "${REPO:?git address that the hosts can clone}"
    clone="[ -d searchrl ] || git clone $(printf %q "$REPO") searchrl"
    checkout="git -C searchrl fetch origin $(printf %q "${REVISION:-HEAD}")"
    checkout+=' && git -C searchrl checkout --quiet --detach FETCH_HEAD'
    install='python3 -m pip install --quiet uv && cd searchrl'
    install+=' && python3 -m uv venv --allow-existing --python 3.12 .venv'
    install+=" && python3 -m uv pip install --quiet -e '.[tpu]'"
    on_all "${MOUNT:+($MOUNT) && }($clone) && $checkout && $install"
    ;;
  run)
    ((dry)) || mkdir -p "$logs"
    flags=$(printf '%q ' "$@")
    start='cd searchrl && . .venv/bin/activate'
    if [[ $compiler ]]; then
      start+=" && export LIBTPU_INIT_ARGS=$(printf %q "$compiler")"
    fi
    start+=" && echo \$\$ >~/searchrl.pid"
    on_all "$start && exec launch/run.sh $flags" --output-directory="$logs"
    if ((dry)); then
      echo "on each host: $("$here/run.sh" --dry-run "$@")"
    fi
    ;;
  stop)
    # shellcheck disable=SC2016  # expanded on the hosts
    on_all 'kill -TERM "$(cat ~/searchrl.pid)"'
    ;;
  delete)
    resource delete --force --quiet
    ;;
  *)
    echo "$verb must be create, status, setup, run, stop or delete." >&2
    exit 2
    ;;
esac
