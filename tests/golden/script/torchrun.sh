#!/usr/bin/env bash
# Starts this run with torchrun in place of DeepSpeed's launcher, on nodes that see the same folders:
#   bash THIS prepare    prepares the run directory; once, on any node
#   bash THIS            after that, on every node, in any order: they find each other at the address below (c10d)
# SIGUSR1 or SIGTERM on any node saves a checkpoint at the end of the running step, and all nodes leave with exit code 75;
# started again, they go on from there.
# Secrets are not here. `prepare` takes them from your environment into a file that only you can read, and the ranks read
# them there: HF_TOKEN SWANLAB_API_KEY.
set -euo pipefail

python=/opt/dstrain/bin/python
job=/shared/qwen/job.yaml
out=/shared/qwen/output
master=${MASTER_ADDR:-gpu01}
port=${MASTER_PORT:-29500}
# how often torchrun starts the ranks again after a failure; they go on from the newest checkpoint
restarts=${RESTARTS:-0}
# further words about the job, such as --set learning_rate=1e-5
words=( --set seed=7 )

if [ "${1-}" = prepare ]; then
  cd /shared/qwen
  # writes what the ranks read: the job with absolute paths, the DeepSpeed configuration, facts, and .secrets (0600)
  exec "$python" -P -m dstrain.cli script prepare "$job" --nodes 2 --gpus 16 \
    ${words[@]+"${words[@]}"} --set resume=auto
fi
if [ -z "$master" ]; then
  echo "MASTER_ADDR is not set: the name or address of one node, the same on all" >&2
  exit 2
fi

cd "$out"
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT HF_TOKEN SWANLAB_API_KEY
export NCCL_DEBUG=WARN
export PATH=/opt/dstrain/bin:$PATH

# A signal goes to the ranks, which save and leave together. torchrun itself would give them 30 seconds, and SIGKILL.
run= told= code=0
tell() {
  told=1
  for process in /proc/[0-9]*; do
    if [ -n "$run" ] && grep -qs "^PPid:[[:space:]]*$run\$" "$process/status"; then
      kill -s USR1 "${process#/proc/}" 2>/dev/null || true
    fi
  done
}
trap tell USR1 TERM
torchrun_to_its_end() {
  "$@" &
  run=$!
  while :; do
    told= code=0
    wait "$run" || code=$?
    [ -n "$told" ] || break
  done
  # ranks that left early end well; summary.json is there only after the last step
  if [ "$code" -eq 0 ] && [ ! -e "$out/summary.json" ]; then
    code=75
  fi
  exit "$code"
}
torchrun_to_its_end "$python" -P -m torch.distributed.run --nnodes 2 --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$master:$port" --rdzv-id qwen --max-restarts "$restarts" \
  -m dstrain.train "$out"
