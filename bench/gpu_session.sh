#!/usr/bin/env bash
# One session of tests and benchmarks on a machine with a GPU, from a bare checkout to results, under a time budget.
#
#   STAGES="build machine doctor smoke matrix data_path cycle overhead incremental shadow concurrent interference switch coldstart driver_path handover sharing trace store multi_gpu multi_gpu_tp multi_gpu_share" BUDGET_S=570 OUT=folder bash bench/gpu_session.sh
#
# It installs woodfrog from this checkout into a virtual environment that sees the machine's own Python packages;
# missing packages may be carried as wheels in .carry/wheels, CRIU's prefix and an S3 server in .carry/tools.tar.xz
# (prepare_carry.sh). Every stage runs under a time limit and none stops those that follow. Results are JSON files in $OUT, everything else goes into
# $OUT/logs.tar.gz, and a short table is printed last. QUICK=1 makes every stage small; MATRIX_S, CYCLE_S … are the most
# seconds of a stage, MATRIX_ARGS, CYCLE_ARGS … more options for it.
#
# It must never leave a process behind: what it starts carries WOODFROG_BENCH_SESSION in its environment and is found
# by that at the end. It changes no setting of the GPU.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
repository=$PWD
carry=${CARRY:-$repository/.carry}
begin_s=$SECONDS
stages=${STAGES:-build machine doctor smoke matrix data_path cycle overhead}
budget_s=${BUDGET_S:-570}
out=${OUT:-$repository/build/bench-out}
mkdir -p "$out" || exit 1
export OUT=$out
work=$repository/build/bench-work
logs=$work/logs
rm -rf "$work"
mkdir -p "$logs" || exit 1
quick=()
[[ ${QUICK:-0} == 1 ]] && quick=(--quick)

export WOODFROG_BENCH_SESSION="session-$$-$(date +%s)"
runtime=$work/runtime
# A Unix socket's path has at most 107 characters (unix(7)), and the sockets' own names need some of them.
((${#runtime} > 80)) && runtime=$(mktemp -d /tmp/woodfrog-bench.XXXXXX)
export WOODFROG_RUNTIME_DIR=${WOODFROG_RUNTIME_DIR:-$runtime}
export PYTHONUNBUFFERED=1
mkdir -p -m 700 "$WOODFROG_RUNTIME_DIR"
if [[ -z ${WOODFROG_COMMIT:-} ]]; then
    WOODFROG_COMMIT=$(git describe --always --dirty --abbrev=12 --exclude='*' 2> /dev/null || echo unknown)
fi
export WOODFROG_COMMIT

# A target has a descriptor for each of its allocations while it is handed over: many more than the usual limit.
ulimit -n 1048576 2> /dev/null || ulimit -n "$(ulimit -Hn)"
# HOST_HUGE_PAGES=1: the host arena is shared memory, and this lets it have huge pages. It is the machine's setting, so
# it is asked for, and what it was before comes back at the end.
shmem_setting=/sys/kernel/mm/transparent_hugepage/shmem_enabled
shmem_before=
if [[ ${HOST_HUGE_PAGES:-0} == 1 && -w $shmem_setting ]]; then
    shmem_before=$(sed -n 's/.*\[\(.*\)\].*/\1/p' "$shmem_setting")
    echo advise > "$shmem_setting" || shmem_before=
fi

left_s() { echo $((budget_s - (SECONDS - begin_s))); }
say() { printf '[%4d s] %s\n' $((SECONDS - begin_s)) "$*"; }

report=$work/stages.txt
: > "$report"

# stage NAME LIMIT_S COMMAND... : runs it under the smaller of its limit and what is left; its output goes to a log
stage() {
    local name=$1 limit_s=$2 left rc start_s=$SECONDS
    shift 2
    left=$(($(left_s) - 15)) # for the end of the session
    if ((left < 5)); then
        say "$name: not run, the time is used up"
        printf '%s %s %s\n' "$name" "not-run" 0 >> "$report"
        return 0
    fi
    ((limit_s < left)) && left=$limit_s
    say "$name (at most $left s)"
    WOODFROG_BENCH_STAGE=$WOODFROG_BENCH_SESSION-$name timeout --kill-after=10 "$left" "$@" \
        > "$logs/$name.log" 2>&1 < /dev/null
    rc=$?
    # What a stage left behind would disturb the next one. The daemon has a stage of its own, and stays.
    [[ $name == daemon ]] || end_processes "WOODFROG_BENCH_STAGE=$WOODFROG_BENCH_SESSION-$name"
    printf '%s %s %s\n' "$name" "$rc" $((SECONDS - start_s)) >> "$report"
    say "$name: exit status $rc after $((SECONDS - start_s)) s"
    ((rc == 0)) || tail -n 25 "$logs/$name.log"
    return 0
}

# end_processes MARK: ends every process that has MARK in its environment, this shell and its own children apart.
# Targets that were restored from an image have the environment they were started with.
end_processes() {
    local mark=$1 environ pid round
    for round in TERM KILL; do
        local victims=()
        # -z: the environment is NUL-separated. A process that ends meanwhile is no trouble.
        for environ in $(grep -lzxF -- "$mark" /proc/[0-9]*/environ 2> /dev/null); do
            pid=${environ#/proc/}
            pid=${pid%/environ}
            [[ $pid == "$$" || $pid == "$BASHPID" ]] || victims+=("$pid")
        done
        ((${#victims[@]})) || return 0
        # Every round signals; the wait between them ends as soon as all are gone.
        kill -s "$round" "${victims[@]}" 2> /dev/null
        for _ in $(seq 50); do
            local alive=0
            for pid in "${victims[@]}"; do
                [[ -d /proc/$pid ]] && ! grep -q '^State:.Z' "/proc/$pid/status" 2> /dev/null && alive=1
            done
            ((alive)) || break
            sleep 0.1
        done
    done
}

store_mounted=0
finish() {
    trap - EXIT INT TERM
    if [[ -x $python ]]; then
        timeout 20 "$python" -m woodfrog daemon stop > "$logs/daemon-stop.log" 2>&1 < /dev/null
    fi
    end_processes "WOODFROG_BENCH_SESSION=$WOODFROG_BENCH_SESSION"
    [[ -n $shmem_before ]] && echo "$shmem_before" > "$shmem_setting"
    ((store_mounted)) && umount -l "$work/store" 2> /dev/null
    cp -f "$WOODFROG_RUNTIME_DIR"/*.log "$logs/" 2> /dev/null
    find "$work" -maxdepth 1 -name '*.out' -size -4M -exec cp -f {} "$logs/" \; 2> /dev/null
    [[ -d $WOODFROG_RUNTIME_DIR/logs ]] && cp -rf "$WOODFROG_RUNTIME_DIR/logs" "$logs/targets" 2> /dev/null
    # Of a long log the end is what is wanted.
    find "$logs" -type f -size +8M -exec sh -c 'tail -c 4194304 "$1" > "$1.end" && mv "$1.end" "$1"' sh {} \; 2> /dev/null
    tar -C "$work" -czf "$out/logs.tar.gz" logs stages.txt 2> /dev/null
    rm -rf "$work/store"
    print_table
}

print_table() {
    echo
    echo "stage          status  seconds"
    while read -r name status seconds; do printf '%-14s %-7s %s\n' "$name" "$status" "$seconds"; done < "$report"
    python3 - "$out" << 'PYTHON'
import json, pathlib, sys

for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    try:
        summary = json.loads(path.read_text()).get("summary")
    except (OSError, ValueError) as failure:
        print(f"{path.name}: cannot be read: {failure}")
        continue
    if summary:
        print(path.name + ": " + ", ".join(f"{k} {v:.4g}" if isinstance(v, (int, float)) else f"{k} {v}" for k, v in summary.items()))
PYTHON
}

venv=$repository/build/bench-venv # outlives a session: a second one on the same machine leaves `build` out
python=$venv/bin/python
[[ -n ${PYTHON:-} ]] && python=$PYTHON # an interpreter that has woodfrog already: leave the stage `build` out then
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ── build ────────────────────────────────────────────────────────────────────────────────────────────────────────

build() {
    set -e
    python3 -c 'import sys, sysconfig, pathlib
print(sys.version)
header = pathlib.Path(sysconfig.get_path("include")) / "Python.h"
print(header, "is there" if header.exists() else "is MISSING")'
    [[ -x $python ]] || python3 -m venv --without-pip "$venv"
    # The environment sees the packages of the Python that made it, also where that is a virtual environment itself
    # (which --system-site-packages would pass over).
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 -c 'import site; print("\n".join(site.getsitepackages()))' > "$site/parent.pth"
    if compgen -G "$carry/wheels/*.whl" > /dev/null; then
        python3 -m pip --python "$python" install -q --no-index --no-deps --no-cache-dir --ignore-installed \
            "$carry"/wheels/*.whl
    fi
    "$python" -c 'import cmake; print("cmake", cmake.__version__)' || true
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) PATH="$venv/bin:$(python3 -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH" \
        python3 -m pip --python "$python" install -v --no-index --no-build-isolation --no-deps --no-cache-dir \
        -C build-dir="$repository/build/bench-native" -C cmake.define.WOODFROG_SIMGPU=OFF -C cmake.define.WOODFROG_WERROR=OFF -e "$repository"
    "$python" -c 'import woodfrog; from woodfrog._native import paths, transfer; print(paths.interposer(), transfer.driver_version())'
    # A package that this machine lacks would stop every stage, one after the other.
    "$python" -c 'import importlib, pkgutil, woodfrog
for module in pkgutil.walk_packages(woodfrog.__path__, "woodfrog."):
    if not module.name.startswith(("woodfrog.demo", "woodfrog._native.lib")) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)'
}

if [[ " $stages " == *" build "* ]]; then
    bench/targets/build.sh "$repository/build/bench" > "$logs/targets.log" 2>&1 < /dev/null &
    targets_build=$!
    export -f build
    export repository carry venv python work
    stage build 300 bash -c build
    [[ $(tail -n 1 "$report") == "build 0 "* ]] || { say "nothing can be run: the build failed"; exit 1; }
    wait "$targets_build" || { say "some targets could not be built:"; tail -n 15 "$logs/targets.log"; }
fi
export PATH="$venv/bin:$PATH"

tools=$repository/build/bench-tools # outlives a session, as the environment does
if [[ -f $carry/tools.tar.xz && ! $tools -nt $carry/tools.tar.xz ]]; then
    rm -rf "$tools"
    mkdir -p "$tools"
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$carry/tools.tar.xz" "$tools" ||
        say "$carry/tools.tar.xz could not be unpacked"
    touch "$tools"
fi
[[ -x $carry/criu/bin/criu ]] && export WOODFROG_CRIU=$carry/criu/bin/criu
[[ -x $tools/criu/bin/criu ]] && export WOODFROG_CRIU=$tools/criu/bin/criu
export PATH="$PATH:$tools/bin"

# Images in memory where that can be had: the disk of the machine is not what is measured, and it may be small.
# STORE_HUGE=within_size: in huge pages, as `woodfrog doctor` advises for /dev/shm.
export WOODFROG_STORE=$work/store
mkdir -p -m 700 "$WOODFROG_STORE"
if [[ $(id -u) == 0 ]] && mount -t tmpfs -o "size=${STORE_SIZE:-80g},huge=${STORE_HUGE:-never},mode=0700" woodfrog-bench "$WOODFROG_STORE" 2> "$logs/mount.log"; then
    store_mounted=1
else
    say "images go to the disk: no tmpfs could be mounted"
fi

# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────

if [[ ! -x $python ]]; then
    say "nothing can be run: there is no $python; let the stage build go first, or name an interpreter in PYTHON"
    exit 1
fi
# Memory first, then the daemon: a machine whose memory grows with its use would seem too small to it. Its arena is
# given by name, since half of the memory would be half of too little there.
daemon_started=0
start_daemon() {
    ((daemon_started)) && return 0
    daemon_started=1
    export WOODFROG_ARENA=${ARENA:-40G} # also of daemons that benches start again
    stage daemon 60 "$python" -m woodfrog daemon start
}

# bench SCRIPT SECONDS FOR_THE_END [OPTION...] : the stage $name, for at most NAME_S seconds (SECONDS if that is not set); it
# begins nothing more FOR_THE_END seconds before. NAME_ARGS are further options.
bench() {
    local script=$1 seconds=${name^^}_S arguments=${name^^}_ARGS
    local limit_s=${!seconds:-$2} reserve_s=$3
    shift 3
    # shellcheck disable=SC2086 # options are words
    stage "$name" "$limit_s" "$python" "bench/$script.py" "${quick[@]}" --work "$work" "$@" \
        --budget-s "$((limit_s - reserve_s))" ${!arguments:-}
}

for name in $stages; do
    [[ $name == build || $name == machine || $name == interference ]] || start_daemon
    case $name in
        build) ;;
        machine) stage machine 60 "$python" bench/machine.py "${quick[@]}" --work "$work" --warm-gib "${WARM_GIB:-100}" ${MACHINE_ARGS:-} ;;
        doctor)
            stage doctor 60 bash -c '"$0" -m woodfrog doctor; "$0" -m woodfrog doctor --json > "$OUT/doctor.json"' "$python"
            cat "$logs/doctor.log"
            ;;
        smoke) stage smoke 150 "$python" -m pytest tests/gpu -q --maxfail=3 --timeout=120 -p no:cacheprovider -k "not pytorch" ;;
        matrix) bench targets_matrix 300 40 ;;
        data_path) bench data_path 110 30 ;;
        cycle) bench cycle 400 40 ;;
        overhead) bench overhead 300 40 ;;
        hash)
            # What the kernels compute first: a rate of wrong digests is worth nothing.
            stage hash_right 120 "$python" -m pytest -q --timeout=110 -p no:cacheprovider -k "not two_gpus" \
                tests/sim/transfer/inside/check_hashing.py tests/sim/transfer/inside/check_chunk_drain.py
            bench hash 120 20
            ;;
        incremental) bench incremental 450 60 ;;
        shadow) bench shadow 300 30 ;;
        concurrent) bench concurrent_drain 480 80 ;;
        interference) bench interference 110 10 ;; # no daemon: the training is a plain one
        switch) bench switch 170 15 ;; # it keeps of that what the driver's part needs
        multi_gpu) bench multi_gpu 300 30 ;;
        multi_gpu_tp) bench multi_gpu 200 30 --program tp_generate ;;
        multi_gpu_share) bench multi_gpu 200 30 --program share_tensors ;;
        coldstart) bench coldstart 300 20 ;;
        driver_path) bench driver_path 330 80 ;;
        handover) bench handover 80 20 ;;
        sharing) bench sharing 280 30 ;;
        trace)
            # What the driver does to a process of ours that is none of woodfrog's, and to PyTorch, as pages.
            stage trace "${TRACE_S:-200}" env python="$python" work="$work" bash -c '
                traced() { "$python" -m woodfrog trace --json --html "$OUT/$1.html" "${@:2}" > "$OUT/$1.json" || failed=1; }
                failed=0
                traced trace_state --after 8s -- "${WOODFROG_BENCH_BINARIES:-build/bench}/fill_state" --state-gib "${TRACE_GIB:-16}" --log "$work/trace.jsonl"
                traced trace_helped --help-driver --after 8s -- "${WOODFROG_BENCH_BINARIES:-build/bench}/fill_state" --state-gib "${TRACE_GIB:-16}" --log "$work/trace.jsonl"
                [[ ${QUICK:-0} == 1 ]] ||
                    traced trace_torch --after 15s -- "$python" bench/targets/train_gpt2.py --steps 1000000 --state-gib 0.5 --log "$work/trace.jsonl"
                exit "$failed"
                '
            ;;
        store) bench store 280 60 --disk "${STORE_DISK:-$repository/build/bench-disk}" ;;
        *) say "there is no stage $name" ;;
    esac
done
