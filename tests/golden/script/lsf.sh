#!/usr/bin/env bash
#BSUB -J qwen
#BSUB -n 128
#BSUB -R "span[ptile=64]"
#BSUB -gpu "num=8:mode=shared:j_exclusive=yes"
#BSUB -M 524288MB
#BSUB -W 12:00
#BSUB -q gpu
#BSUB -P nlp
#BSUB -U dl
#BSUB -o /shared/qwen/output/logs/lsf-%J-%I.out
#BSUB -r
#BSUB -Q "75"

# Submit this with `bsub <`; `bsub -J "name[1-4]" <` makes several runs, each with its own output folder and port.
# 180 seconds before the time is up a checkpoint is saved at the end of the running step, and the job ends with
# exit code 75, at which LSF queues it again (-Q); it goes on from there. `bkill` ends it.
# Secrets are not here. bsub hands your environment on to the job, with HF_TOKEN SWANLAB_API_KEY.
set -euo pipefail

python=/opt/dstrain/bin/python
job=/shared/qwen/job.yaml
out=/shared/qwen/output
# further words for `dstrain run`; in an array for example: --set seed="$LSB_JOBINDEX"
words=( --set seed=7 )
seconds=43020

[ "${LSB_JOBINDEX:-0}" -eq 0 ] || out=$out/task-$LSB_JOBINDEX
export PATH=/opt/dstrain/bin:$PATH
cd /shared/qwen

# the run gets the signals of this shell, and has the last word: `wait` returns at each of them
run= told= code=0
tell() {
  told=1
  [ -z "$run" ] || kill -s "$1" "$run" 2>/dev/null || true
}
to_its_end() {
  while :; do
    told= code=0
    wait "$run" || code=$?
    [ -n "$told" ] || break
  done
}
trap 'tell USR1' USR1
trap 'tell TERM' TERM

mkdir -p "$out"
"$python" -P -m dstrain.cli hostfile write --from lsf --slots 8 -o "$out/hostfile.job"
timeout --foreground --preserve-status --signal=USR1 "$seconds" \
  "$python" -P -m dstrain.cli run "$job" --launcher ssh --hostfile "$out/hostfile.job" \
  --master-port $((20000 + (LSB_JOBID + ${LSB_JOBINDEX:-0}) % 10000)) \
  --save-on-term ${words[@]+"${words[@]}"} --set resume=auto --set output_dir="$out" &
run=$!
to_its_end

exit "$code"
