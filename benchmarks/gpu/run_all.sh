#!/usr/bin/env bash
# Test and measure culm on the GPUs of this machine, one step after the other.
#
#   benchmarks/gpu/run_all.sh [--out DIR] [--limit SECONDS] [--full] [--cpu] [--dependencies FILE.tar.gz]
#                             [--resume RESULTS.tar.gz] [STEP...]
#
# A step that fails, or hangs until its own time is over, does not stop the others. Each result is saved in DIR (default:
# gpu-results) when its step ends, with the log beside it, and everything in DIR/results.tar.gz. A step whose result is
# there already is skipped, so that the same command continues after an interruption; on another machine, with --resume
# and the archive of the first. Steps that would probably end after --limit seconds are left for the next call. At the
# end all rows are in DIR/all.json. Exit status 1: a step failed.
#
# --full: as many rounds as published figures need; otherwise --quick. --cpu: try this script without a GPU.
# Steps: facts streams traces nccl strategies doctor, and the rows of `culm bench gpu`. Default: all, the most important first. Rows
# whose workers share a GPU use MPS slices, if nvidia-cuda-mps-control is there and works; tests and pauses run without
# MPS, because there a process that is killed during a kernel ends all others. PYTHON: the interpreter, default python3.
set -uo pipefail
cd "$(dirname "$0")/../.."

out=gpu-results limit=100000 effort=--quick device=cuda dependencies="" resume="" python=${PYTHON:-python3}
steps=()
while (($#)); do
    case $1 in
    --out) out=$2 && shift ;;
    --limit) limit=$2 && shift ;;
    --full) effort="" ;;
    --cpu) device=cpu ;;
    --dependencies) dependencies=$2 && shift ;;
    --resume) resume=$2 && shift ;;
    -*) echo "run_all.sh: unknown option $1" >&2 && exit 2 ;;
    *) steps+=("$1") ;;
    esac
    shift
done
((${#steps[@]})) || steps=(facts streams traces nccl 1f1b-4 pause-reroute zb-4 2x2 plain reroute 1f1b-2 1f1b-8
    strategies shadow shadow-lazy zb-8 2x4 doctor pause-shadow large-4 large-8 plain-large)

mkdir -p "$out"
out=$(realpath "$out")
began=$SECONDS
if [[ -n $resume ]]; then
    tar -C "$out" -xzf "$resume" || exit 1
fi
if [[ -n $dependencies ]]; then
    packages=${TMPDIR:-/tmp}/culm-dependencies
    mkdir -p "$packages" && tar -C "$packages" -xzf "$dependencies" || exit 1
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$packages
fi
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if ! problem=$("$python" -c "import torch, culm.cli, culm.runtime.worker, pytest" 2>&1); then
    echo "run_all.sh: $python cannot run culm: ${problem##*$'\n'}. Bring what is missing with --dependencies" \
        "(benchmarks/gpu/README.md), or name another interpreter in PYTHON" >&2
    exit 1
fi
culm=("$python" -m culm)

mps=${TMPDIR:-/tmp}/culm-mps

mps_works=unknown

start_mps() {
    [[ $device == cuda && $mps_works != no ]] && command -v nvidia-cuda-mps-control >/dev/null || return
    export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if nvidia-cuda-mps-control -d && { [[ $mps_works == yes ]] || computes_in_a_slice; }; then
        mps_works=yes
    else
        echo "run_all.sh: MPS does not work here (see $mps/log): workers take turns on a GPU" >&2
        mps_works=no
        stop_mps
    fi
}

computes_in_a_slice() {
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 timeout 60 "$python" -c "
import torch
assert (torch.ones(64, 64, device='cuda') @ torch.ones(64, 64, device='cuda')).sum().item() == 64**3"
}

stop_mps() {
    if [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then
        echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
}
trap stop_mps EXIT

# What this machine has, and that a GPU computes at all.
facts() {
    nvidia-smi || [[ $device == cpu ]]
    nproc
    free -g
    df -h /dev/shm
    ulimit -l
    "$python" - <<'PYTHON'
import torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, "available", torch.cuda.is_available())
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), "x", torch.cuda.device_count(), "NCCL", torch.cuda.nccl.version())
    print((torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")).sum().item(), "= 64")
    print("page-locked", torch.empty(1 << 20, pin_memory=True).is_pinned())
import culm
print("culm", culm.__version__)
PYTHON
}

run_tests() {
    "$python" -m pytest -v -rfE --tb=short -m gpu -p no:cacheprovider "$@"
}

# Streams, slabs and page locks: what everything else is built on.
streams() {
    run_tests tests/device
}

# Gradient sums over NCCL, with and without a loss: the part that is most likely to differ between machines.
nccl() {
    run_tests tests/runtime/test_gpu.py -k "nccl_sums or (nccl and reroute)"
}

# A loss changes no bit, under every strategy and optimizer.
strategies() {
    run_tests tests/runtime/test_gpu.py -k "not (nccl_sums or (nccl and reroute))"
}

doctor() {
    "${culm[@]}" doctor
}

# An undisturbed run and one with a loss: open trace.json in ui.perfetto.dev.
traces() {
    local job=benchmarks/gpu/gpu_job.py failed=0
    [[ $device == cpu ]] && job+=:on_cpu
    for kill in "" "node=1 step=4 at=1F2"; do
        local name=trace${kill:+-with-a-loss}
        rm -rf "$out/runs/$name"
        "${culm[@]}" run "$job" --pipelines 2 --stages 2 --strategy reroute ${kill:+--kill "$kill"} \
            --out "$out/runs/$name" --quiet || failed=1
        cp "$out/runs/$name/trace.json" "$out/$name.json" && cp "$out/runs/$name/summary.json" "$out/$name-summary.json"
        grep -E '"kind": ?"(reduce_fallback|ready|recovered)"' "$out/runs/$name/events.jsonl"
    done
    rm -rf "$out/runs"
    return $failed
}

row() {
    local rounds=$effort
    [[ $1 == pause-* && $device == cuda ]] && rounds=""  # ten losses
    "${culm[@]}" bench gpu --json --rows "$1" --device $device $rounds >"$out/$1.part" || return
    mv "$out/$1.part" "$out/$1.json"
    cat "$out/$1.json"
}

# Seconds that a step is expected to take, and after which it is stopped.
expected() {
    local factor=1
    [[ -z $effort ]] && factor=4
    case $1 in
    facts) echo 20 60 ;;
    streams) echo 60 180 ;;
    nccl) echo 110 300 ;;
    strategies) echo 300 540 ;;
    doctor | traces) echo 60 180 ;;
    pause-*) echo 180 420 ;;
    *-8 | 2x4 | *large*) echo $((80 * factor)) $((240 * factor)) ;;
    *) echo $((60 * factor)) $((180 * factor)) ;;
    esac
}

run_step() {
    case $1 in
    facts | streams | nccl | strategies | doctor | traces) "$1" ;;
    *) row "$1" ;;
    esac
}

export -f facts run_tests streams nccl strategies doctor traces row run_step

# Everything in one file.
save() {
    local archive
    archive=$(mktemp)
    tar -C "$out" --exclude=results.tar.gz --exclude=runs --exclude='*.part' -czf "$archive" . &&
        mv "$archive" "$out/results.tar.gz"
}

failed=0
for step in "${steps[@]}"; do
    if [[ -e $out/$step.done ]]; then
        echo "== $step: done before"
        continue
    fi
    read -r usual longest < <(expected "$step")
    [[ $device == cpu ]] && longest=$((4 * longest))  # the times are those of GPUs
    left=$((limit - (SECONDS - began)))
    if ((usual > left)); then
        echo "== $step: left out, it takes about $usual s and $left s are left"
        continue
    fi
    echo "== $step"
    before=$SECONDS
    case $step in
    facts | streams | nccl | strategies | doctor | traces | plain* | pause-*) ;;
    *) start_mps ;;
    esac
    out=$out device=$device effort=$effort python=$python culm_words="${culm[*]}" timeout --kill-after=10 \
        $((left < longest ? left : longest)) bash -c 'culm=($culm_words); run_step "$1"' _ "$step" \
        >"$out/$step.log" 2>&1
    status=$?
    stop_mps
    tail -n 12 "$out/$step.log"
    ((status)) && failed=1 || touch "$out/$step.done"
    ((status == 124 || status == 137)) && why="its time is over" || why="status $status"
    echo "== $step: $( ((status)) && echo "FAILED ($why)" || echo ok), $((SECONDS - before)) s"
    save
done

combine=()
for file in "$out"/*.json; do
    case $(basename "$file") in
    all.json | trace*) ;;
    *) [[ -s $file ]] && combine+=(--combine "$file") ;;
    esac
done
if ((${#combine[@]})); then
    "${culm[@]}" bench gpu --json "${combine[@]}" >"$out/all.part" && mv "$out/all.part" "$out/all.json"
    COLUMNS=200 "${culm[@]}" bench gpu "${combine[@]}"
fi
save
for file in "$out"/*.done; do
    [[ -e $file ]] && basename "$file"
done
exit $failed
