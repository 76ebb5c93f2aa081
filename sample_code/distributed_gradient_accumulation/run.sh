#!/usr/bin/env bash
# Train the sample, or another program, under msrun. The logs are written to log_output in the folder that this is
# called from.
#
# Usage: bash run.sh [PROGRAM [ARGUMENT...]]      by default train.py beside this file
#
#   EPOCHS, DATA_PATH           see train.py and ../data/find_data.py
#   WORKER_NUM                  all workers (processes) of the job, default 2
#   LOCAL_WORKER_NUM            those on this machine, default all; the same on each machine
#   NODE_RANK                   number of this machine, from 0 (default); machine 0 has the address MASTER_ADDR
#   DEVICE_TARGET               CPU (default), GPU or Ascend
#   MASTER_ADDR, MASTER_PORT    where the workers meet, default a free port of this machine; needed with several
#   STOP_SECONDS                how long workers may take to save their state after a SIGTERM, default 30
set -euo pipefail

sample=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=("$sample/train.py")
workers=${WORKER_NUM:-2}
local_workers=${LOCAL_WORKER_NUM:-$workers}
stop_seconds=${STOP_SECONDS:-30}
node=${NODE_RANK:-0}
address=${MASTER_ADDR:-127.0.0.1}
logs=log_output
job=$$-$RANDOM
failed_worker='s/.*Worker process ([0-9]+) exit with exception.*code: (-?[0-9]+).*/\1 \2/p'
declare -A rank_of=() # by process id
export DEVICE_TARGET=${DEVICE_TARGET:-CPU}
export GLOG_v=${GLOG_v:-3} # MindSpore's errors alone: joining the others takes it 30 lines of warnings

fail() {
  echo "Error: $*" >&2
  exit 1
}

check_number() {
  [[ $3 =~ ^(0|[1-9][0-9]{0,4})$ && $3 -ge $2 ]] || fail "$1 must be a whole number of at least $2, but got '$3'."
}

check_workers() {
  check_number WORKER_NUM 1 "$workers"
  check_number LOCAL_WORKER_NUM 1 "$local_workers"
  check_number NODE_RANK 0 "$node"
  check_number STOP_SECONDS 0 "$stop_seconds"
  # msrun counts the ranks of a machine from NODE_RANK times LOCAL_WORKER_NUM.
  [[ $((workers % local_workers)) -eq 0 ]] ||
    fail "LOCAL_WORKER_NUM must divide WORKER_NUM=$workers, but got $local_workers."
  [[ $node -lt $((workers / local_workers)) ]] ||
    fail "NODE_RANK must be below $((workers / local_workers)), the number of machines, but got $node."
  [[ $local_workers -eq $workers || (-n ${MASTER_ADDR-} && -n ${MASTER_PORT-}) ]] ||
    fail "with several machines (LOCAL_WORKER_NUM=$local_workers of WORKER_NUM=$workers)" \
      "set MASTER_ADDR to the address of machine 0 and MASTER_PORT to a free port of it, the same on each machine."
}

# list_devices TOOL ARGUMENTS: what a vendor's tool prints, into `listed`.
list_devices() {
  command -v "$1" >/dev/null || fail "DEVICE_TARGET=$DEVICE_TARGET, but $1, which counts the devices, is not on PATH."
  listed=$("$@" 2>&1) || fail "DEVICE_TARGET=$DEVICE_TARGET, but '$*' failed: $listed"
}

check_devices() {
  local listed count
  case $DEVICE_TARGET in
    CPU) return ;;
    GPU)
      list_devices nvidia-smi -L
      count=$(grep -c '^GPU ' <<<"$listed" || true)
      ;;
    Ascend)
      list_devices npu-smi info -l
      count=$(awk '/Chip Count/ {chips += $NF} END {print chips + 0}' <<<"$listed")
      ;;
    *) fail "DEVICE_TARGET must be CPU, GPU or Ascend, but got '$DEVICE_TARGET'." ;;
  esac
  [[ $count -ge $local_workers ]] ||
    fail "$local_workers workers on this machine need as many devices, but it has $count ($DEVICE_TARGET)." \
      "Lower LOCAL_WORKER_NUM or WORKER_NUM, or use DEVICE_TARGET=CPU."
}

# Sets `port`. Machine 0 listens there; one that it cannot have would only show after minutes.
choose_port() {
  port=${MASTER_PORT-}
  [[ $node -gt 0 ]] || port=$(python - "$address" "${port:-0}" <<'PYTHON'
import socket, sys
address, port = sys.argv[1:]
try:
    family = socket.getaddrinfo(address, None)[0][0]
    print(socket.create_server((address, int(port)), family=family).getsockname()[1])
except (OSError, OverflowError, ValueError) as error:
    sys.exit(f"Error: machine 0 cannot listen on MASTER_ADDR={address}, MASTER_PORT={port}: {error}")
PYTHON
  )
}

# A log cannot know that it is shown on a terminal, nor how wide that is.
show_live_bar_on_terminal() {
  [[ -t 1 ]] || return 0
  export MS_GRADACCUM_LIVE_BAR=1 COLUMNS LINES
  read -r LINES COLUMNS < <(stty size </dev/tty) || { LINES=24 COLUMNS=80; }
}

start_workers() {
  mkdir -p "$logs"
  rm -f "$logs"/{worker_*,scheduler,msrun}.log
  # msrun would show every worker's log. It is told of a worker that does not exist, and the first one's is shown below.
  MS_GRADACCUM_JOB=$job msrun --worker_num="$workers" --local_worker_num="$local_workers" --node_rank="$node" \
    --master_addr="$address" --master_port="$port" \
    --log_dir="$logs" --join=True --tail_worker_log="$workers" --cluster_time_out=300 \
    "${program[@]}" &>"$logs/msrun.log" &
  msrun=$!
  tail --pid="$msrun" -n +1 -s 0.2 -F "$first_log" 2>/dev/null | show &
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

# Ends the job if this shell is killed and cannot do it any more.
watch_this_shell() {
  {
    trap '' HUP INT TERM
    exec {nothing}<> <(:)
    while kill -0 $$; do read -r -t 1 -u "$nothing" || true; done
    end_all_processes
  } </dev/null &>/dev/null &
  watcher=$!
}

# When a worker fails, msrun ends the others and then waits for its scheduler, which takes 40 s to notice.
wait_for_workers() {
  while kill -0 "$msrun" 2>/dev/null; do
    ! grep -qs "exit with exception" "$logs/msrun.log" || return 1
    [[ ${#rank_of[@]} -ge $local_workers ]] || note_ranks
    sleep 0.5
  done
  wait "$msrun"
}

# msrun names a worker that fails by a process id that is gone by then.
note_ranks() {
  local process rank
  for process in $(job_processes); do
    rank=$(tr '\0' '\n' <"/proc/$process/environ" | sed -n 's/^MS_NODE_ID=//p') || continue
    [[ -z $rank ]] || rank_of[$process]=$rank
  done 2>/dev/null
}

show_failed_workers() {
  local process="" code="" rank log
  read -r process code < <(sed -En "$failed_worker" "$logs/msrun.log") || true
  rank=${rank_of[${process:-none}]-}
  [[ -z $rank ]] || echo "Error: worker $rank $(cause_of_end "$code")."
  for log in $(logs_of_failed_workers "$rank"); do
    printf '\nLast lines of %s:\n' "$log"
    tail -n 15 "$log"
  done
}

logs_of_failed_workers() {
  ls "$logs/worker_$1.log" 2>/dev/null || grep -ls Traceback "$logs"/worker_*.log || ls "$logs"/{worker_*,msrun}.log
}

cause_of_end() {
  case $1 in
    -9) echo "was killed, by someone or because memory ran out" ;;
    -*) echo "was ended by signal ${1#-}" ;;
    *) echo "ended with status $1" ;;
  esac
}

# Processes of this job. (grep's status also tells of processes that ended while it looked.)
job_processes() {
  { grep -lsxzF "MS_GRADACCUM_JOB=$job" /proc/[0-9]*/environ || true; } | tr -dc '0-9\n'
}

# job_workers: those of its processes that train.
job_workers() {
  local process
  for process in $(job_processes); do
    ! grep -qsxzF MS_ROLE=MS_WORKER "/proc/$process/environ" || echo "$process"
  done
}

# After a SIGTERM. A training with a StateCheckpoint saves its state first.
stop_workers() {
  trap '' TERM
  job_workers | xargs -r kill -TERM 2>/dev/null || true
  for ((i = 0; i < 2 * stop_seconds; i++)); do
    [[ -n $(job_workers) ]] || break
    sleep 0.5
  done
  exit 143
}

# Workers lead sessions of their own, so ending a process group would miss them. Their environment tells.
end_all_processes() {
  job_processes | xargs -r kill -KILL 2>/dev/null || true
}

check_workers
check_devices
command -v msrun >/dev/null || fail "msrun not found. Install MindSpore, or use run.sh at the top of the repository."
if [[ $# -gt 0 ]]; then
  program=("$@")
else
  python "$sample/../data/find_data.py" >/dev/null # says what is wrong with DATA_PATH, and unpacks .gz once for all
fi
choose_port
first_log=$logs/worker_$((node * local_workers)).log
show_live_bar_on_terminal
trap '{ end_all_processes; kill -KILL "$watcher"; wait; } 2>/dev/null' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap stop_workers TERM
watch_this_shell
start_workers
status=0
wait_for_workers || status=$?
# Bash reports a killed job as soon as it sees it, which may be before the wait.
{ end_all_processes; wait "$msrun" "$viewer" || true; } 2>/dev/null
if [[ -n ${MS_GRADACCUM_LIVE_BAR-} ]]; then
  sed -i 's/.*\r//' "$first_log" # the bar was for the terminal, the log keeps the lines
fi
[[ $status -eq 0 ]] || show_failed_workers >&2
exit "$status"
