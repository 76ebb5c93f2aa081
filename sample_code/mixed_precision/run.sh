#!/usr/bin/env bash
# Train in float32 and in float16, compare the accuracies, and draw both runs in one plot. Reports and plot: log_output.
#
#   METRICS=log_output/precision    folder for the reports and the plot
#
# Arguments go to train.py.
set -euo pipefail

sample=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
metrics=${METRICS:-log_output/precision}

rm -f "$metrics"/fp{32,16}.jsonl # of an earlier run
for precision in fp32 fp16; do
  python "$sample/train.py" --precision "$precision" --metrics "$metrics/$precision.jsonl" "$@"
done
python "$sample/compare.py" "$metrics"/fp{32,16}.jsonl "$metrics/precision.png"
