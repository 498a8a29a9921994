#!/usr/bin/env bash
# Makes the virtual environment at $1 with everything that building, testing and the demo need, and installs woodfrog
# into it in place. Uses what the system has (a C++20 compiler, Python >= 3.10 with venv); where apt is there and we are
# root, missing compilers are installed from the distribution.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:-.venv}"

need=()
command -v g++ >/dev/null || need+=(g++)
python3 -c 'import venv, ensurepip' 2>/dev/null || need+=(python3-venv)
[ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || need+=(python3-dev)
if [ ${#need[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -q && apt-get install -q -y --no-install-recommends "${need[@]}"
    else
        echo "woodfrog: please install: ${need[*]}" >&2
        exit 1
    fi
fi

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
pip=("$venv/bin/python" -m pip -q --disable-pip-version-check)
"${pip[@]}" install "scikit-build-core>=0.11,<2" "nanobind>=2.4,<4" \
    "nvidia-cuda-crt>=13.0,<13.1" "nvidia-cuda-nvcc>=13.0,<13.1" "nvidia-cuda-profiler-api>=13.0,<13.1" \
    "nvidia-cuda-runtime>=13.0,<13.1" "nvidia-nvvm>=13.0,<13.1" \
    "cmake>=3.26,<5" "ninja>=1.11,<2"
CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-2}" PATH="$PWD/$venv/bin:$PATH" \
    "${pip[@]}" install --no-build-isolation -C cmake.define.WOODFROG_WERROR=ON -C cmake.define.WOODFROG_KERNELS=ON -e '.[test]'
