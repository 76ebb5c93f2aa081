#!/usr/bin/env bash
# The project's commands. What they need is installed into .venv on the first run; no root needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'TEXT'
./run.sh           train the sample (the same as ./run.sh sample)
./run.sh sample NAME
                   another one of sample_code: linear_toy, causal_lm, resnet18, transformer_lm,
                   mixed_precision, contrastive
./run.sh test      format, lint, types, then the first tier of the tests, in 4 minutes on two cores
./run.sh test all  the same with all tests, in 15 minutes; the second tier is what tests/second_tier.txt lists
./run.sh test ARGUMENTS
                   the same with the tests that pytest chooses by these arguments, in whichever tier
./run.sh quick     the tests that tests/quick.txt lists, in 3 to 4 minutes on one core; more arguments go to pytest.
                   With PYTHON=python3.12 or MINDSPORE=2.7.2 or both: in an environment of its own, with these
./run.sh check     format, lint and types alone
./run.sh docs      the pages of docs/ and the reference of the API, into build/docs
./run.sh bench [NAME]
                   a program of benchmarks: peers (the default; installs PyTorch and Accelerate into .venv-peers),
                   step, eager, contrastive, language_model, distributed, semi_auto, long_run, first_window, import_time, structure;
                   more arguments go to it
./run.sh clients [NAME]
                   networks of mindformers, mindcv, mindone, mindocr, mindyolo and the models repository in their own
                   trainers, with this accumulation and with theirs; installs them into .venv-clients; more
                   arguments go to clients/run.py
./run.sh mutations break the package in one place after the other, and see which test of the first tier fails
./run.sh faults    kill a training 50 times and see that nothing is lost; --kills N for another number
./run.sh help      this text

Environment of the samples, with defaults:
  EPOCHS=10                how often the first one goes through the images
  DATA_PATH=               folder with MNIST or Fashion-MNIST, raw or .gz; without it the installed
                           package dataset-fashion-mnist, else the subset in sample_code/data
  DATA=                    folder with CIFAR-10, binary version, for resnet18
  WORKER_NUM=2             all workers (processes) of the job
  LOCAL_WORKER_NUM=        those on this machine, by default all
  NODE_RANK=0              number of this machine, from 0
  DEVICE_TARGET=CPU        CPU, GPU or Ascend
  MASTER_ADDR=127.0.0.1    where the workers meet: an address of machine 0
  MASTER_PORT=             by default a free port
  STOP_SECONDS=30          how long workers may take to save their state after a SIGTERM

With several machines MASTER_ADDR and MASTER_PORT are needed, see docs/distributed.md.
TEXT
}

fail() {
  echo "Error: $*" >&2
  exit 1
}

find_python() {
  local python without_venv=""
  for python in python3.11 python3.10 python3.12 python3; do
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null || continue
    "$python" -c 'import ensurepip, venv' 2>/dev/null && echo "$python" && return
    without_venv=$python
  done
  [[ -z $without_venv ]] || fail "$without_venv has no venv module. Install it (Debian: apt install $without_venv-venv)."
  fail "no Python 3.10, 3.11 or 3.12 found. Install one with its venv module (Debian: apt install python3.11-venv)."
}

# make_venv FOLDER: an environment with pip, if there is none.
make_venv() {
  ! "$1/bin/python" -m pip --version &>/dev/null || return 0
  local python
  python=${PYTHON:-$(find_python)}
  echo "Creating $1 with $("$python" --version)."
  "$python" -m venv --clear "$1"
}

# prepare NAMES [REQUIREMENT]: an environment with the package, these extras and dependency groups (pinned, test) and
# what else is required. Quick when what is built is as it was last time.
prepare() {
  local wanted name extras="" groups=() stamp=$venv/installed-$1
  for name in ${1//,/ }; do
    if [[ $name == pinned || $name == test ]]; then groups+=(--group "$name"); else extras+=,$name; fi
  done
  make_venv "$venv"
  # A new version of the package is installed as one: `env` prints that of the installation.
  wanted=$(cat pyproject.toml setup.py ms_gradaccum/__init__.py | cksum)
  if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    echo "Installing MindSpore and what else is needed into $venv. This takes a few minutes, once."
    local install=("$venv/bin/python" -m pip install --no-input --disable-pip-version-check --quiet)
    "${install[@]}" "pip>=25.1"  # the first that knows dependency groups
    PYTHONWARNINGS=ignore "${install[@]}" -e ".${extras:+[${extras:1}]}" "${groups[@]}" "${@:2}"
    echo "$wanted" >"$stamp"
  fi
  export PATH=$PWD/$venv/bin:$PATH
}

# prepare_versions: for PYTHON and MINDSPORE an environment of their own, without them the one that all else uses.
prepare_versions() {
  if [[ -z ${PYTHON:-}${MINDSPORE:-} ]]; then
    prepare pinned,test
    return
  fi
  local version
  PYTHON=${PYTHON:-$(find_python)}
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  venv=.venv-$version-${MINDSPORE:-pinned}
  if [[ -z ${MINDSPORE:-} ]]; then prepare pinned,test; else prepare test "mindspore==$MINDSPORE"; fi
}

# What the benchmark compares with has an environment of its own, and is left out if it cannot be installed.
prepare_peers() {
  local wanted stamp=.venv-peers/installed
  make_venv .venv-peers
  wanted=$(cksum <benchmarks/requirements.txt)
  if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    echo "Installing PyTorch and Accelerate into .venv-peers. This takes a few minutes, once."
    .venv-peers/bin/python -m pip install --no-input --disable-pip-version-check --quiet \
      -r benchmarks/requirements.txt && echo "$wanted" >"$stamp"
  fi
}

# The projects whose trainers train with this package have an environment of their own: their pins are not ours.
prepare_clients() {
  local wanted name address commit folder source stamp=.venv-clients/installed
  make_venv .venv-clients
  wanted=$(cat pyproject.toml setup.py ms_gradaccum/__init__.py clients/*.txt | cksum)
  if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    echo "Installing what clients/*.txt names into .venv-clients. This takes a few minutes, once."
    local install=(.venv-clients/bin/python -m pip install --no-input --disable-pip-version-check --quiet)
    PYTHONWARNINGS=ignore "${install[@]}" -e . -r clients/requirements.txt
    "${install[@]}" --no-deps -r clients/no_deps.txt
    while read -r name address commit folder; do
      source=.venv-clients/sources/$name
      rm -rf "$source"
      git clone --quiet --filter=blob:none --no-checkout "$address" "$source"
      git -C "$source" sparse-checkout set $folder
      git -C "$source" checkout --quiet "$commit"
    done < <(grep -v '^#' clients/sources.txt)
    echo "$wanted" >"$stamp"
  fi
}

check() {
  ruff format --check .
  ruff check .
  mypy
}

# How tests run: quicker, with the same results.
set_up_tests() {
  # One core for each: MindSpore's threads would otherwise fight over them.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # Each process that a test starts would otherwise compile the package's sources anew.
  unset PYTHONDONTWRITEBYTECODE
  # Compiling frees what it allocates at once: with more kept at hand, on large pages, it takes a seventh less time.
  # oneDNN takes 256 KiB for the code of each product and fills little of it. Apart from the large pages, the rest is
  # never touched: otherwise a process grows to 4 GB, and the system clears them for as long as many tests take.
  local malloc=glibc.malloc.tcache_count=65535:glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=131072
  export GLIBC_TUNABLES=${GLIBC_TUNABLES:-$malloc}
}

# run_sample [NAME [ARGUMENT...]]: its run.sh, or its program in one process.
run_sample() {
  local folder=sample_code/${1:-distributed_gradient_accumulation} extras=pinned
  [[ -f $folder/train.py ]] || fail "there is no sample '$1'."
  ! grep -qs '\.png' "$folder/run.sh" || extras=pinned,plot
  prepare "$extras"
  if [[ -f $folder/run.sh ]]; then exec bash "$folder/run.sh" "${@:2}"; fi
  exec python "$folder/train.py" "${@:2}"
}

command=${1:-sample} venv=.venv
[[ $# -eq 0 ]] || shift
case $command in
  sample) run_sample "$@" ;;
  test)
    prepare pinned,test
    check
    set_up_tests
    case ${1:-} in
      "") set -- -m "not second_tier" ;;
      all) shift ;;
    esac
    # Three at a time, since some only wait.
    pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
    ;;
  quick)
    prepare_versions
    set_up_tests
    exec pytest @tests/quick.txt "$@"
    ;;
  check)
    prepare pinned,test
    check
    ;;
  docs)
    prepare pinned,test
    sphinx-build --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
    echo "Built build/docs/README.html."
    ;;
  bench)
    benchmark=peers extras=pinned
    if [[ -f benchmarks/${1:-}.py ]]; then
      benchmark=$1
      shift
    fi
    ! grep -q '\.png' "benchmarks/$benchmark.py" || extras=pinned,plot
    prepare "$extras"
    [[ $benchmark != peers ]] || prepare_peers || echo "They cannot be installed, see above: their rows are missing."
    exec python "benchmarks/$benchmark.py" "$@"
    ;;
  clients)
    prepare_clients
    exec .venv-clients/bin/python clients/run.py "$@"
    ;;
  mutations)
    prepare pinned,test
    set_up_tests
    exec python tests/support/mutations.py "$@"
    ;;
  faults)
    prepare pinned
    exec python tests/distributed/faults.py "$@"
    ;;
  help | -h | --help) usage ;;
  *)
    usage >&2
    fail "there is no command '$command'."
    ;;
esac
