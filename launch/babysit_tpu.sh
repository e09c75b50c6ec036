#!/usr/bin/env bash
# Runs on a TPU slice until the run is done: creates the slice, waits for it,
# runs, and after a preemption or a lost host does so again; the run resumes.
#
#   export NAME=my-tpu ZONE=us-west4-a TYPE=v5litepod-16 SPOT=1
#   export REPO=https://example.com/searchrl.git
#   launch/babysit_tpu.sh --config=configs/grpo.py --workdir=/mnt/runs/grpo
#
# The variables are those of tpu_pod.sh. The workdir must outlive the slice. All
# rounds run the commit that REVISION names when the first one starts, if this
# machine can read REPO. A failed creation or deletion is tried again, and counts
# as a restart. Gives up after MAX_RESTARTS (100), or after three runs in a row
# that end within QUICK_SECS (300), for which restarts are no help. The slice
# remains when the run is done: delete it. --dry-run, first, prints one round.
set -euo pipefail
pod=$(dirname "$0")/tpu_pod.sh

if [[ ${1:-} == --dry-run ]]; then
  shift
  "$pod" --dry-run create
  "$pod" --dry-run status
  "$pod" --dry-run setup
  "$pod" --dry-run run "$@"
  exit
fi

: "${REPO:?git address that the hosts can clone}"
repository=$(mktemp -d)
trap 'rm -rf "$repository"' EXIT
export GIT_DIR=$repository GIT_TERMINAL_PROMPT=0
git init --quiet --bare
if git fetch --quiet --depth 1 "$REPO" "${REVISION:-HEAD}"; then
  REVISION=$(git rev-parse 'FETCH_HEAD^{commit}')
  export REVISION
else
  echo "This machine cannot read $REPO, so a later round may run newer code." >&2
fi
unset GIT_DIR
restarts=0
quick=0

change() {  # $1: create or delete. If it fails, the loop tries it again.
  "$pod" "$1" || {
    restarts=$((restarts + 1))
    echo "launch/tpu_pod.sh $1 has failed for $NAME and is tried again." >&2
  }
}

while ((restarts < ${MAX_RESTARTS:-100} && quick < 3)); do
  state=$("$pod" status 2>/dev/null || echo NONE)
  case $state in
    ACTIVE)
      began=$SECONDS
      if "$pod" setup && "$pod" run "$@"; then
        echo "Done. $NAME still costs: launch/tpu_pod.sh delete"
        exit 0
      fi
      restarts=$((restarts + 1))
      if ((SECONDS - began < ${QUICK_SECS:-300})); then
        quick=$((quick + 1))
      else
        quick=0
      fi
      echo "The run ended before it was done, for the ${restarts}th time."
      ;;
    NONE)  # or gcloud failed, and then `create` finds the slice
      change create
      ;;
    SUSPENDED | FAILED)  # preempted, or never granted; delete it first
      change delete
      ;;
    *)
      echo "$NAME is $state."
      ;;
  esac
  sleep "${POLL_SECS:-60}"
done
echo "Gives up on $NAME, which may still cost: launch/tpu_pod.sh delete" >&2
exit 1
