#!/usr/bin/env bash
# Train with 32 lines per update, cut in several ways, and draw all losses in one plot. Logs: log_output.
#
#   LOSSES=log_output/losses    folder for the losses and the plot
#   SEEDS=1                     seeds to train with; several, as in "1 2 3", become a band
#
# Arguments go to train.py.
set -euo pipefail

sample=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
losses=${LOSSES:-log_output/losses}

# train NAME PROCESSES ACCUMULATION_STEPS ROWS [ARGUMENT...]
train() {
  local name=$1 processes=$2
  local program=("$sample/train.py" --accumulation-steps "$3" --batch-size "$4" --seed "$seed")
  program+=(--losses "$losses/seed$seed/$name.jsonl" "${@:5}")
  echo "$name, seed $seed:"
  if [[ $processes -eq 1 ]]; then
    python "${program[@]}"
  else
    WORKER_NUM=$processes bash "$sample/../distributed_gradient_accumulation/run.sh" "${program[@]}"
  fi
}

rm -f "$losses"/seed*/*.jsonl # of an earlier run
for seed in ${SEEDS:-1}; do
  train 1x1x32 1 1 32 "$@"
  train 1x4x8 1 4 8 "$@"
  train 2x2x8 2 2 8 "$@"
  train 2x4x4 2 4 4 "$@"
  train "mean of means 2x4x4" 2 4 4 --mean-of-means "$@"
done
python "$sample/plot.py" "$losses" "$losses/losses.png"
