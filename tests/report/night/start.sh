#!/usr/bin/env bash
# Starts this run again by hand: bash start.sh
# It uses the files in this folder as they are. To go on from the newest checkpoint instead:
#   dstrain run --set resume=auto
# Secrets are not here: the ranks read them from a file that only you can read.
set -euo pipefail
cd /home/me/demo/output

# what another launcher may have left behind, and secrets, which must not show up in the command line of other nodes
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT

export DS_ACCELERATOR=cpu
export DS_ENV_FILE=/home/me/demo/output/environment
export PYTHONPATH=/home/me/dstrain
export PYTHONSAFEPATH=1

exec \
  /home/me/venv/bin/python3 \
  -P \
  -m \
  deepspeed.launcher.runner \
  --hostfile \
  /home/me/demo/output/hostfile \
  --no_ssh \
  --node_rank \
  0 \
  --master_addr \
  127.0.0.1 \
  --master_port \
  29500 \
  --enable_each_rank_log \
  /home/me/demo/output/logs \
  --no_local_rank \
  --module \
  dstrain.train \
  /home/me/demo/output
