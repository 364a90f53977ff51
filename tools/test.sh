#!/usr/bin/env bash
# Usage: bash tools/test.sh [pytest arguments]
#
# Makes the environment (once), then runs ruff, mypy and pytest, and stops at the first that finds something. No network
# is used after the environment is made. Without arguments the tests are shared out, file by file, among as many processes
# as there are cores, four at most. Slow tests are left out; choose them with -m slow:
#   bash tools/test.sh tests/test_media.py -k gif
#   bash tools/test.sh -m slow
# The environment is .venv in the checkout, or the folder that ARVIDEO_VENV names.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in -h | --help) grep '^#\( \|$\)' "${BASH_SOURCE[0]}" | cut -c3- && exit ;; esac

source "$here/env.sh"
make_environment dev
cd "$ROOT"
export HF_HUB_OFFLINE=1       # a test that needs a download is a defect
export OMP_WAIT_POLICY=PASSIVE # idle threads of one process must not take the cores of another

step() {
  say "$*"
  "$@"
}
step ruff check --output-format concise .
step mypy arvideo_rl rewards samplers
if [ $# -eq 0 ]; then
  export OMP_NUM_THREADS=1 # a process, a core
  set -- -n logical --maxprocesses 4 --dist loadfile
fi
step python -m pytest "$@"
