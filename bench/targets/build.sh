#!/usr/bin/env bash
# Builds the benchmark targets written in C++ and CUDA C++ into build/bench (or the folder given as first argument).
#
# Needs nvcc (NVCC=… overrides the one on PATH) and a C++20 compiler; no GPU and no driver: programs that call the
# driver directly are linked against an empty library with the driver's name, made here from the symbols they use.
# A target is built again only when one of its sources is newer. Exits 1 if any target could not be built, after
# having tried all of them.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-$here/../../build/bench}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)

nvcc=${NVCC:-}
if [[ -z $nvcc ]]; then
    nvcc=$(command -v nvcc || true)
    [[ -z $nvcc && -x /usr/local/cuda/bin/nvcc ]] && nvcc=/usr/local/cuda/bin/nvcc
fi
if [[ -z $nvcc ]]; then
    echo "build.sh: no nvcc found; put it on PATH or name it in NVCC. Nothing was built." >&2
    exit 1
fi
cxx=${CXX:-g++}

# The toolkit's own folders. nvcc may be a wrapper far from them, so it is asked itself (`--dryrun` prints its TOP).
top=$("$nvcc" --dryrun -c -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
include=
library=
for cuda in "$top" "${CUDA_HOME:-}" "$(dirname "$nvcc")/.." "$(dirname "$(readlink -f "$nvcc")")/.." /usr/local/cuda; do
    [[ -n $cuda && -d $cuda ]] || continue
    for folder in "$cuda/include" "$cuda"/targets/*/include; do
        [[ -z $include && -f $folder/cuda.h ]] && include=$(cd "$folder" && pwd)
    done
    for folder in "$cuda/lib64" "$cuda/lib" "$cuda"/targets/*/lib; do
        [[ -z $library ]] && compgen -G "$folder/libcudart.so*" > /dev/null && library=$(cd "$folder" && pwd)
    done
done
if [[ -z $include || -z $library ]]; then
    echo "build.sh: no cuda.h or no libcudart near $nvcc; install the CUDA toolkit or set NVCC. Nothing was built." >&2
    exit 1
fi

# Machine code for Hopper, and PTX for everything later (and for the simulated GPU).
architectures=(-gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90)
# WERROR=1 is for those who change the targets; elsewhere a newer compiler's new warning must not stop a measurement.
warnings=(-Wall -Wextra ${WERROR:+-Werror})
failed=()

# fresh TARGET SOURCE... : true if TARGET is there and no source is newer
fresh() {
    local target=$1 source
    shift
    [[ -f $target ]] || return 1
    for source in "$@"; do [[ $source -nt $target ]] && return 1; done
    return 0
}

# driver_target NAME [KERNELS] [FOLDER] [SOURCE...] : NAME.cpp on the driver API, with the PTX of KERNELS.cu inside
driver_target() {
    local name=$1 kernels=${2:-} folder=${3:-$here} ptx=() sources more
    more=("${@:4}")
    sources=("$folder/$name.cpp" "$here/driver_support.hpp" "$here/protocol.hpp" "${more[@]}")
    [[ -n $kernels ]] && sources+=("$here/$kernels.cu")
    fresh "$out/$name" "${sources[@]}" && return 0
    if [[ -n $kernels ]]; then
        "$nvcc" -std=c++20 -arch=compute_90 -ptx -o "$out/$kernels.ptx" "$here/$kernels.cu" || return 1
        ptx=("-DTARGET_PTX=\"$out/$kernels.ptx\"")
    fi
    "$cxx" -std=c++20 -O2 -g "${warnings[@]}" -isystem "$include" -I"$here" "${ptx[@]}" -c -o "$out/$name.o" \
        "$folder/$name.cpp" ||
        return 1
    # The loader resolves the real driver at start: the stand-in only has to carry its name.
    mkdir -p "$out/link-$name" || return 1
    nm -u "$out/$name.o" | awk '$2 ~ /^cu[A-Z]/ { print "void " $2 "(void) {}" }' > "$out/link-$name/driver.c" || return 1
    "${CC:-gcc}" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$out/link-$name/libcuda.so" "$out/link-$name/driver.c" ||
        return 1
    "$cxx" -std=c++20 -O2 "${warnings[@]}" -o "$out/$name.new" "$out/$name.o" "${more[@]}" -L"$out/link-$name" -lcuda || return 1
    mv "$out/$name.new" "$out/$name"
}

# runtime_target NAME KIND : NAME.cu on the CUDA runtime, linked "shared" or "static"
runtime_target() {
    local name=$1 kind=$2
    fresh "$out/$name" "$here/$name.cu" "$here/runtime_support.hpp" "$here/protocol.hpp" && return 0
    "$nvcc" -std=c++20 -O2 "${architectures[@]}" -Xcompiler=-Wall,-Wextra -cudart "$kind" \
        -Xlinker -rpath -Xlinker "$library" -L"$library" -o "$out/$name.new" "$here/$name.cu" || return 1
    mv "$out/$name.new" "$out/$name"
}

# switch_library : libdriver_calls.so, which targets load to compare calls with and without interposer
switch_library() {
    local sources=("$here/driver_calls.cpp" "$here/../../native/interpose/elf_lookup.cpp")
    fresh "$out/libdriver_calls.so" "${sources[@]}" && return 0
    "$cxx" -std=c++20 -O2 -g -fPIC -shared "${warnings[@]}" -o "$out/libdriver_calls.so.new" "${sources[@]}" -ldl || return 1
    mv "$out/libdriver_calls.so.new" "$out/libdriver_calls.so"
}

build() {
    local name=$2
    if "$@"; then echo "built $out/$name"; else failed+=("$name"); fi
}

build driver_target driver_api driver_api_kernels
build driver_target fill_state fill_state_kernels
build driver_target launch_loop launch_loop_kernels "$here" "$here/../../native/interpose/elf_lookup.cpp"
build driver_target alloc_churn
build driver_target handover_calls
build driver_target allocation_calls "" "$here/../../tests/gpu/programs"
build switch_library driver_calls
build runtime_target md shared
build runtime_target heat static

if ((${#failed[@]})); then
    echo "build.sh: could not build: ${failed[*]} (the compiler's messages are above; the others are there)" >&2
    exit 1
fi
