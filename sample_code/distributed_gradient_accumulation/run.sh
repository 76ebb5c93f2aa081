#!/usr/bin/env bash
# Train the sample under msrun. The logs are written to log_output in the folder that this is called from.
#
#   EPOCHS, DATA_PATH           see train.py and ../data/find_data.py
#   WORKER_NUM                  number of processes, default 1
#   DEVICE_TARGET               CPU (default), GPU or Ascend
#   MASTER_ADDR, MASTER_PORT    where the processes meet, default a free port of this machine
set -euo pipefail

sample=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
workers=${WORKER_NUM:-1}
logs=log_output
job=$$-$RANDOM
export DEVICE_TARGET=${DEVICE_TARGET:-CPU}
export GLOG_v=${GLOG_v:-3} # MindSpore's errors alone: joining the others takes it 30 lines of warnings

free_port() {
  python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# A log cannot know that it is shown on a terminal, nor how wide that is.
show_live_bar_on_terminal() {
  [[ -t 1 ]] || return 0
  export MS_GRADACCUM_LIVE_BAR=1 COLUMNS LINES
  read -r LINES COLUMNS < <(stty size </dev/tty) || { LINES=24 COLUMNS=80; }
}

start_workers() {
  local port=${MASTER_PORT:-$(free_port)}
  mkdir -p "$logs"
  rm -f "$logs"/{worker_*,scheduler,msrun}.log
  # msrun would show every worker's log. It is told of a worker that does not exist, and rank 0's is shown below.
  MS_GRADACCUM_JOB=$job msrun --worker_num="$workers" --local_worker_num="$workers" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="$port" \
    --log_dir="$logs" --join=True --tail_worker_log="$workers" --cluster_time_out=60 \
    "$sample/train.py" &>"$logs/msrun.log" &
  msrun=$!
  tail --pid="$msrun" -n +1 -s 0.2 -F "$logs/worker_0.log" 2>/dev/null | show &
  viewer=$!
}

# Copies lines, and the bar, which has no end of line, as it comes; but not what MindSpore says as it ends.
show() {
  local text kept="" status=0
  until [[ $status -eq 1 ]]; do
    status=0
    IFS= read -r -t 0.2 text || status=$?
    text=$kept$text kept=""
    if [[ $status -gt 1 && $text == '['* ]]; then
      kept=$text # the start of a line of MindSpore's; the rest is still to come
    elif [[ $text != '[INFO] '* ]]; then
      printf '%s' "$text"
      [[ $status -ne 0 ]] || echo
    fi
  done
}

# When a worker fails, msrun ends the others and then waits for its scheduler, which takes 40 s to notice.
wait_for_workers() {
  while kill -0 "$msrun" 2>/dev/null; do
    ! grep -qs "exit with exception" "$logs/msrun.log" || return 1
    sleep 0.5
  done
  wait "$msrun"
}

show_failed_workers() {
  local log
  for log in $(grep -ls Traceback "$logs"/worker_*.log || ls "$logs"/worker_*.log "$logs/msrun.log"); do
    printf '\nLast lines of %s:\n' "$log"
    tail -n 15 "$log"
  done
}

# Workers lead sessions of their own, so ending a process group would miss them. Their environment tells.
end_all_processes() {
  # (grep's status also tells of processes that ended while it looked.)
  { grep -lsxzF "MS_GRADACCUM_JOB=$job" /proc/[0-9]*/environ || true; } | tr -dc '0-9\n' |
    xargs -r kill -KILL 2>/dev/null || true
}

command -v msrun >/dev/null || {
  echo "Error: msrun not found. Install MindSpore, or use run.sh at the top of the repository." >&2
  exit 1
}
python "$sample/../data/find_data.py" >/dev/null # says what is wrong with DATA_PATH, and unpacks .gz once for all
show_live_bar_on_terminal
trap 'end_all_processes; wait 2>/dev/null' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
start_workers
status=0
wait_for_workers || status=$?
end_all_processes
wait "$msrun" "$viewer" 2>/dev/null || true
if [[ -n ${MS_GRADACCUM_LIVE_BAR-} ]]; then
  sed -i 's/.*\r//' "$logs"/worker_0.log # the bar was for the terminal, the log keeps the lines
fi
[[ $status -eq 0 ]] || show_failed_workers >&2
exit "$status"
