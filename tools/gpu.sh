#!/usr/bin/env bash
# Everything on a machine with a GPU: build from source, all tests (the CUDA ones run there), the
# demo, the benchmarks. Takes the Python on PATH with its torch as it is and installs nothing.
#
#     tools/gpu.sh [test|bench|demo]...      default: all
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BRIM_PYTHON=${BRIM_PYTHON:-$(command -v python3)} PYTHONUNBUFFERED=1
# A compiler that links libstdc++ statically would bring a second one into the process.
export CXX=${BRIM_CXX:-/usr/bin/g++}
status=0
for part in "${@:-test demo bench}"; do
  for name in $part; do
    case $name in
      test) ./dev test || status=1 ;;
      demo) ./dev demo || status=1 ;;
      bench) ./dev bench || status=1 ;;
      *) echo "tools/gpu.sh: unknown part '$name': test, demo or bench" >&2; exit 2 ;;
    esac
  done
done
exit $status
