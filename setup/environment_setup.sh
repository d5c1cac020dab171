#!/usr/bin/env bash
# Prepares the workshop's Python environment: finds a Python that is new enough and starts
# environment_setup.py on it. environment_setup.md covers clusters, containers and machines without
# a network. Written for bash 3.2 (macOS) and later.
set -euo pipefail

setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
named="" venv=$setup/../.venv previous=""
for word in "$@"; do
  case $previous in --python) named=$word ;; --venv) venv=$word ;; esac
  previous=$word
done

# All programs of a name, as pyenv has a shim for each Python, active or not. The environment's own
# Python comes last, for a shell without the module that brought the one it was built on.
candidates() {
  if [[ -n $named ]]; then type -aP "$named"; return; fi
  type -aP python3 python3.14 python3.13 python3.12 python3.11 python3.10
  echo "$venv/bin/python"
}

new_enough='import sys
if sys.version_info < (3, 10): sys.exit("Python %d.%d is too old" % sys.version_info[:2])'
refused=${named:+"no program $named"}
while IFS= read -r python; do
  if error=$("$python" -c "$new_enough" 2>&1); then
    exec "$python" "$setup/environment_setup.py" "$@" </dev/null
  fi
  [[ ! -x $python ]] || refused="$python: ${error%%$'\n'*}"
done < <(candidates)
echo "environment_setup.sh: no Python 3.10 or newer${refused:+ ($refused)}: install one, load its" \
  "module, or name one with --python" >&2
exit 1
