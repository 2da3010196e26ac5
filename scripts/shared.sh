# Functions of the set-up scripts, which source this file in the root of the checkout.
# shellcheck shell=bash

CPU_TORCH=requirements/cpu.txt
CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
QUIET=-qq # otherwise pip warns about every package that a mirror lacks
if [ -t 2 ]; then QUIET=; fi

say() { echo "setup: $*" >&2; }
fail() { say "$1"; say "$2"; exit 1; }

fingerprint() { # PYTHON FILE...: hash of the files, this folder's path and stdin
  local python=$1; shift
  { cat "$@"; pwd; cat; } \
    | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

has_package() { "$1" -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' "$2" 2>/dev/null; }

configured_torch_is_cpu() { # PYTHON
  # A dry run of pip, because the default index may be unreachable.
  local plan answer=1; plan=$(mktemp)
  if "$1" -m pip install --quiet --dry-run --ignore-installed --no-deps \
      --only-binary :all: --retries 1 --timeout 30 --report "$plan" -r "$CPU_TORCH" </dev/null 2>/dev/null
  then "$1" scripts/is_cpu_build.py "$plan" && answer=0
  fi
  rm -f "$plan"
  return "$answer"
}

torch_of_cpu_index() { # PYTHON
  say "torch: trying the CPU builds at $CPU_INDEX"
  "$1" -m pip install $QUIET --no-deps --only-binary :all: --retries 0 --timeout 10 \
    --index-url "$CPU_INDEX" -r "$CPU_TORCH" </dev/null
}
