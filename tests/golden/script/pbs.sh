#!/usr/bin/env bash
#PBS -S /bin/bash
#PBS -N qwen
#PBS -l select=2:ncpus=64:ngpus=8:mem=524288mb
#PBS -l place=scatter
#PBS -l walltime=12:00:00
#PBS -q gpu
#PBS -A nlp
#PBS -j oe
#PBS -o /shared/qwen/output/logs/
#PBS -r y

# Submit this with `qsub`; `qsub -J 0-3` makes several runs, each with its own output folder and port.
# 180 seconds before the time is up a checkpoint is saved at the end of the running step, and the job ends with
# exit code 75: submit it again, and it goes on from there. A job that PBS itself queues again does so too.
# Secrets are not here, and `qsub -V` would show them to everybody in `qstat -f`: they are read from this file, which
# only you can read, one NAME=value a line; this job looks for HF_TOKEN SWANLAB_API_KEY.
secrets=/shared/qwen/output/.secrets
set -euo pipefail

python=/opt/dstrain/bin/python
job=/shared/qwen/job.yaml
out=/shared/qwen/output
# further words for `dstrain run`; in an array for example: --set seed="$PBS_ARRAY_INDEX"
words=( --set seed=7 )
seconds=43020

if [ -r "$secrets" ]; then
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in *=*) export "${line?}" ;; esac
  done <"$secrets"
fi
task=${PBS_ARRAY_INDEX:-${PBS_ARRAYID:-}}
[ -z "$task" ] || out=$out/task-$task
number=${PBS_JOBID//[!0-9]/}
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
"$python" -P -m dstrain.cli hostfile write --from pbs --slots 8 -o "$out/hostfile.job"
timeout --foreground --preserve-status --signal=USR1 "$seconds" \
  "$python" -P -m dstrain.cli run "$job" --launcher ssh --hostfile "$out/hostfile.job" \
  --master-port $((20000 + 10#$number % 10000)) \
  --save-on-term ${words[@]+"${words[@]}"} --set resume=auto --set output_dir="$out" &
run=$!
to_its_end

[ "$code" -ne 75 ] || echo "a checkpoint was saved; submit this job again to go on from it" >&2
exit "$code"
