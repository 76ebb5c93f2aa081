#!/usr/bin/env bash
# Train the sample in two processes and show what each of them printed. Settings: see the launcher's run.sh.
set -euo pipefail

sample=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$sample/../distributed_gradient_accumulation/run.sh" "$sample/train.py" >/dev/null
grep -h -e '^rank' -e '^without' log_output/worker_*.log
