# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh; changes nothing by itself.
# make_environment [dev]  leaves a right Python environment in $VENV and its commands first on the PATH.
#
# The environment is in .venv beside this checkout's pyproject.toml, or where $ARVIDEO_VENV says. A stamp in it tells
# what it was made from, so that it is used again while that holds; a marker tells a half-made one, which is made anew.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ARVIDEO_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
STAMP="$VENV/.arvideo-stamp"   # line 1: fingerprint; line 2: base or dev
MAKING="$VENV/.arvideo-making" # the process that makes it

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "error: $*"
  exit 1
}

make_environment() {
  local extra="${1:-base}"
  if [ -f "$MAKING" ]; then
    kill -0 "$(cat "$MAKING")" 2>/dev/null &&
      fail "process $(cat "$MAKING") is making $VENV; wait for it, or remove that folder"
    say "removing the half-made environment in $VENV"
    rm -rf "$VENV"
  elif [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
    fail "$VENV is no Python environment and not empty; set ARVIDEO_VENV to another folder, or empty this one"
  elif [ "$(sed -n 2p "$STAMP" 2>/dev/null)" = dev ]; then
    extra=dev # what was there stays there
  fi

  if ! ready "$extra"; then
    # Dependencies changed, or the folder moved: often pip alone mends it. If not, start again, but only what is ours.
    if [ -d "$VENV/bin" ] && runs; then
      say "bringing the environment in $VENV up to date"
      local ours=no
      [ -f "$STAMP" ] && ours=yes
      install "$extra"
      if ! healthy "$extra"; then
        [ $ours = yes ] || fail "$VENV does not work even after pip ran ($(broken "$extra" 2>&1 | tail -n 1)); remove it"
        rm -rf "$VENV"
      fi
    elif [ -f "$STAMP" ]; then
      say "removing the environment in $VENV: its Python is gone"
      rm -rf "$VENV"
    elif [ -f "$VENV/pyvenv.cfg" ]; then
      fail "$VENV has no working Python >= 3.10 and was not made by this script; remove it"
    fi
    if [ ! -d "$VENV/bin" ]; then
      create
      install "$extra"
      if ! healthy "$extra" && grep -q '^include-system-site-packages = true' "$VENV/pyvenv.cfg"; then
        say "the packages that are there already do not fit ($(broken "$extra" 2>&1 | tail -n 1)); doing without them"
        rm -rf "$VENV"
        create alone
        install "$extra"
      fi
      healthy "$extra" || fail "the environment in $VENV was made, but does not work: $(broken "$extra" 2>&1 | tail -n 1)"
    fi
    printf '%s\n%s\n' "$(fingerprint)" "$extra" >"$STAMP"
    rm -f "$MAKING"
  fi
  export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
  unset PYTHONHOME
}

# True if the environment was made from this pyproject.toml, here, by this Python, and still imports.
ready() {
  [ -f "$STAMP" ] && runs && [ "$(sed -n 1p "$STAMP")" = "$(fingerprint)" ] &&
    { [ "$1" = base ] || [ "$(sed -n 2p "$STAMP")" = dev ]; } && healthy "$1"
}

# The environment's Python, from a folder where no file of ours can be taken for an installed package.
py() { (cd / && "$VENV/bin/python" "$@"); }

runs() { py -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

fingerprint() {
  py - "$ROOT" "$VENV" <<'PY'
import hashlib, pathlib, sys
made_from = [pathlib.Path(sys.argv[1], "pyproject.toml").read_text("utf-8"), sys.version, *sys.argv[1:]]
print(hashlib.sha256("\n".join(made_from).encode()).hexdigest())
PY
}

healthy() { broken "$1" >/dev/null 2>&1; }

# Import what breaks when versions do not fit (torchvision with another torch), look for the rest: seconds.
broken() {
  py - "$1" <<'PY'
import importlib.util, sys
import torch, torchvision, cv2, imageio_ffmpeg
names = "accelerate diffusers omegaconf open_clip peft rich safetensors tensorboard transformers arvideo_rl rewards samplers"
dev = " pytest ruff mypy" if sys.argv[1] == "dev" else ""
missing = [name for name in (names + dev).split() if importlib.util.find_spec(name) is None]
sys.exit(f"no module named {', '.join(missing)}" if missing else 0)
PY
}

create() {
  local python name flag="" size="2 GB"
  for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    python="$(command -v "$name")" && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
    python=""
  done
  [ -n "$python" ] || fail "Python 3.10 or newer is needed, found $(python3 -V 2>/dev/null || echo none); install one"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python cannot make environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
  [ "$(uname -sm)" != "Linux x86_64" ] || size="7 GB" # there pip's torch brings the CUDA libraries
  if [ "${1:-}" != alone ] && lends_torch "$python"; then
    flag=--system-site-packages
    size="1 GB, with the torch that is there already"
  fi
  say "making the environment in $VENV (one time, some minutes, about $size)"
  { mkdir -p "$VENV" && echo $$ >"$MAKING" && "$python" -m venv $flag "$VENV"; } || fail "could not make $VENV"
}

# True if the torch and torchvision of a Python work, are new enough, and can be seen from an environment made with it.
lends_torch() {
  (cd / && "$1" - "$ROOT/pyproject.toml") >/dev/null 2>&1 <<'PY'
import re, sys
if sys.prefix != sys.base_prefix:
    sys.exit(1)  # itself an environment: what it holds is not passed on
import torch, torchvision
needed = re.search(r'"torch>=([\d.]+)', open(sys.argv[1], encoding="utf-8").read())[1]
as_numbers = lambda version: [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2]]
sys.exit(as_numbers(torch.__version__) < as_numbers(needed))
PY
}

install() {
  local what="."
  [ "$1" = base ] || what=".[$1]"
  rm -f "$STAMP"
  (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -e "$what") ||
    fail "pip could not install arvideo-rl in $VENV; its words are above"
}
