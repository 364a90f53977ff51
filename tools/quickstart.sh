#!/usr/bin/env bash
# Usage: bash tools/quickstart.sh [key=value ...]
#
# Makes the environment (once) and aligns the tiny generator that ships with this package, on the CPU, with no download
# of weights. The run lands in runs/quickstart. Any key of configs/align/tiny_nft.yaml can be overridden:
#   bash tools/quickstart.sh name=second seed=1
# The environment is .venv in the checkout, or the folder that ARVIDEO_VENV names.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in -h | --help) grep '^#\( \|$\)' "${BASH_SOURCE[0]}" | cut -c3- && exit ;; esac

source "$here/env.sh"
make_environment
cd "$ROOT"
say "arvideo align configs/align/tiny_nft.yaml name=quickstart $*"
exec arvideo align configs/align/tiny_nft.yaml name=quickstart "$@"
