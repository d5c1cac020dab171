#!/usr/bin/env bash
# Runs the six stages one after the other and prints what was measured.
#
# Usage: ./run_all_stages.sh [STAGE...] [options]      see --help
set -euo pipefail
unset CDPATH
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$folder/../../.." && pwd)

# Without importing it, which takes PyTorch seconds.
has_torch() {
  "$1" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("torch") is None)' 2>/dev/null
}

for candidate in ${PYTHON:+"$PYTHON"} python python3 "$root/.venv/bin/python"; do
  if has_torch "$candidate"; then
    exec "$candidate" "$folder/run_all_stages.py" "$@"
  fi
done
printf '%s\n' "error: no Python with PyTorch: run 'make setup', or name one with PYTHON=..." >&2
exit 2
