#!/usr/bin/env bash
# Starts this run by hand on several nodes, which see the same folders:
#   bash THIS            prepares the run directory here, and starts every node over ssh
#   bash THIS prepare    prepares the run directory; once, on any node
#   bash THIS RANK       after that, on each node by hand: 0 on the first host below, 1 on the second
# Ctrl-C of the first form ends all nodes. `dstrain run` does all of this too, and watches the nodes besides.
# Secrets are not here. `prepare` takes them from your environment into a file that only you can read, and the ranks read
# them there: HF_TOKEN SWANLAB_API_KEY.
set -euo pipefail

python=/opt/dstrain/bin/python
job=/shared/qwen/job.yaml
out=/shared/qwen/output
hosts=( gpu01 gpu02 )
master=gpu01
port=29500
# further words about the job, such as --set learning_rate=1e-5
words=( --set seed=7 )

prepare() {
  cd /shared/qwen
  "$python" -P -m dstrain.cli script prepare "$job" ${words[@]+"${words[@]}"} --set resume=auto
}

# one node: its number among the hosts
node() {
  cd "$out"
  unset RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT HF_TOKEN SWANLAB_API_KEY
  export NCCL_DEBUG=WARN
  export PATH=/opt/dstrain/bin:$PATH
  exec "$python" -P -m deepspeed.launcher.runner --hostfile "$out/hostfile" --no_ssh --node_rank "$1" \
    --master_addr "$master" --master_port "$port" --enable_each_rank_log "$out/logs" \
    --no_local_rank --module dstrain.train "$out"
}

# every node over ssh; -tt lets a node end when this shell does
everywhere() {
  local this nodes=() rank
  this=$(printf '%q' "$(realpath "$0")")
  trap 'kill "${nodes[@]}" 2>/dev/null || true' EXIT
  for rank in "${!hosts[@]}"; do
    ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "${hosts[rank]}" "bash $this $rank" </dev/null &
    nodes+=($!)
  done
  # `wait -n` forgets one of two nodes that end at the same time; `wait PID` knows how each of them ended
  while [ -n "${nodes[*]-}" ]; do
    for rank in "${!nodes[@]}"; do
      kill -0 "${nodes[rank]}" 2>/dev/null && continue
      wait "${nodes[rank]}" || exit
      unset "nodes[rank]"
    done
    sleep 0.5
  done
  exit 0
}

case ${1-} in
  '') (prepare); everywhere ;;
  prepare) prepare ;;
  *[!0-9]*) echo "usage: bash $0 [prepare | RANK]" >&2; exit 2 ;;
  *) node "$1" ;;
esac
