#!/usr/bin/env bash
# Make the virtual environment $1 and install this project into it with the extras $2 (comma separated), and with the
# extra $3, if given, where this platform has packages for it.
# Run again it does nothing unless pyproject.toml, constraints.txt or the extras have changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extras=$2
optional=${3:-}
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  say "kafila needs Python 3.11 or newer; $python is $("$python" --version 2>&1 || echo missing)." \
      "Name another one with: make PYTHON=python3.12 ..."
  exit 1
}

if ! [ -x "$venv/bin/python" ]; then
  say "making a virtual environment in $venv"
  if ! "$python" -m venv "$venv" 2>/dev/null; then
    # Debian ships venv's ensurepip as a package of its own.
    rm -rf "$venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq && apt-get install -qq -y python3-venv >/dev/null
      "$python" -m venv "$venv"
    else
      say "$python cannot make virtual environments; on Debian or Ubuntu: sudo apt-get install python3-venv"
      exit 1
    fi
  fi
fi

wanted=$(cat pyproject.toml constraints.txt | cksum)

install() { # the extras $1, unless they are there; pip's further options
  local extras=$1 stamp
  shift
  stamp="$venv/.installed-$(printf '%s' "$extras" | tr -c 'a-z0-9' '-')"
  if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    say "installing kafila[$extras] (a few minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" --editable ".[$extras]" \
      -c constraints.txt || return
    printf '%s' "$wanted" >"$stamp"
  fi
}

install "$extras"
# Only wheels: where there is none, pip would try to build it, which takes a compiler and an hour.
if [ -n "$optional" ] && ! install "$optional" --only-binary mlx,mlx-cpu,mlx-metal; then
  say "kafila[$optional] has no packages for this platform; its tests will be skipped"
fi
