#!/usr/bin/env bash
# Train in float32 and in float16, compare the accuracies, and draw both runs in one plot. Reports and plot: log_output.
#
#   METRICS=log_output/precision    folder for the reports and the plot
#   SEEDS=1                         seeds to train with; several, as in "1 2 3", become a band
#
# Arguments go to train.py.
set -euo pipefail

sample=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
metrics=${METRICS:-log_output/precision}

rm -f "$metrics"/seed*/*.jsonl # of an earlier run
for seed in ${SEEDS:-1}; do
  for precision in fp32 fp16; do
    python "$sample/train.py" --precision "$precision" --seed "$seed" \
      --metrics "$metrics/seed$seed/$precision.jsonl" "$@"
  done
done
python "$sample/compare.py" "$metrics" "$metrics/precision.png"
