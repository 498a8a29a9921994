#!/usr/bin/env bash
# Fills .carry/ with what a GPU machine without network lacks: wheels for its Python, and CRIU's private prefix.
#
#   bench/prepare_carry.sh [PYTHON_VERSION (3.12)] [PACKAGE...]
#
# The packages are those of pyproject.toml's dependencies that common CUDA images do not bring. Run it where there is a
# network; bench/gpu_session.sh uses what it finds. It must never change anything outside .carry/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:-3.12}
shift || true
packages=("$@")
((${#packages[@]})) || packages=("blake3>=1.0,<2" "msgspec>=0.19,<1")

platforms=()
# pip matches these names exactly, so every manylinux level up to the machine's own C library is named.
for minor in 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
platforms+=(--platform "manylinux2014_$(uname -m)")

rm -rf .carry/wheels
mkdir -p .carry/wheels
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d .carry/wheels "${packages[@]}"

if [[ -x .prefix/criu/bin/criu ]]; then
    rm -rf .carry/criu
    cp -a .prefix/criu .carry/criu
else
    echo "prepare_carry.sh: no CRIU under .prefix/criu; make it with scripts/get-criu.sh and run this again" >&2
fi
du -sh .carry/* | sed 's/^/prepare_carry.sh: /'
