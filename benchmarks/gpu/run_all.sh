#!/usr/bin/env bash
# Test and measure culm on the GPUs of this machine, one step after the other.
#
#   benchmarks/gpu/run_all.sh [--out DIR] [--limit SECONDS] [--full] [--cpu] [--dependencies FILE.tar.gz] [STEP...]
#
# A step that fails does not stop the others. Each result is saved in DIR (default: gpu-results) when its step ends, with
# the log beside it; a step whose result is there already is skipped, so that the same command continues after an
# interruption. Steps that would probably end after --limit seconds are left for the next call. At the end all rows are
# in DIR/all.json, and everything is in DIR/results.tar.gz.
#
# --full: as many rounds as published figures need; otherwise --quick. --cpu: try this script without a GPU.
# Steps: facts tests nccl doctor traces pauses, and the rows of `culm bench gpu`. Default: all, the shortest and most
# important first. Rows whose workers share a GPU use MPS slices, if nvidia-cuda-mps-control is there; tests and pauses
# run without MPS, because there a process that is killed during a kernel ends all others.
set -uo pipefail
cd "$(dirname "$0")/../.."

out=gpu-results limit=100000 effort=--quick device=cuda dependencies=""
steps=()
while (($#)); do
    case $1 in
    --out) out=$2 && shift ;;
    --limit) limit=$2 && shift ;;
    --full) effort="" ;;
    --cpu) device=cpu ;;
    --dependencies) dependencies=$2 && shift ;;
    -*) echo "run_all.sh: unknown option $1" >&2 && exit 2 ;;
    *) steps+=("$1") ;;
    esac
    shift
done
((${#steps[@]})) || steps=(facts nccl tests doctor plain 1f1b-4 2x2 1f1b-2 traces reroute zb-4 pause-reroute 1f1b-8
    shadow-lazy shadow zb-8 2x4 pause-shadow plain-large large-4 large-8)

mkdir -p "$out"
out=$(realpath "$out")
began=$SECONDS
if [[ -n $dependencies ]]; then
    packages=${TMPDIR:-/tmp}/culm-dependencies
    mkdir -p "$packages" && tar -C "$packages" -xzf "$dependencies" || exit 1
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$packages
fi
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
culm=(python3 -m culm)

mps=${TMPDIR:-/tmp}/culm-mps

start_mps() {
    [[ $device == cuda ]] && command -v nvidia-cuda-mps-control >/dev/null || return
    export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if ! nvidia-cuda-mps-control -d; then
        echo "run_all.sh: MPS does not start: workers take turns on a GPU" >&2
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
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
    python3 - <<'PYTHON'
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

# Gradient sums over NCCL, with and without a loss: the part that is most likely to differ between machines.
nccl() {
    python3 -m pytest -q -rA -m gpu -p no:cacheprovider tests/runtime/test_gpu.py -k nccl
}

tests() {
    python3 -m pytest -q -rA -m gpu -p no:cacheprovider tests/device tests/runtime/test_gpu.py -k "not nccl"
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
    "${culm[@]}" bench gpu --json --rows "$1" --device $device $effort >"$out/$1.part" || return
    mv "$out/$1.part" "$out/$1.json"
    cat "$out/$1.json"
}

# Seconds that a step is expected to take, and after which it is stopped.
expected() {
    local factor=1
    [[ -z $effort ]] && factor=4
    case $1 in
    facts) echo 20 60 ;;
    nccl) echo 60 180 ;;
    tests) echo 240 540 ;;
    doctor | traces) echo 60 240 ;;
    pause-*) echo 150 540 ;;
    *-8 | 2x4 | *large*) echo $((80 * factor)) 540 ;;
    *) echo $((60 * factor)) 540 ;;
    esac
}

run_step() {
    case $1 in
    facts | nccl | tests | doctor | traces) "$1" ;;
    *) row "$1" ;;
    esac
}

export -f facts nccl tests doctor traces row run_step
for step in "${steps[@]}"; do
    if [[ -e $out/$step.done ]]; then
        echo "== $step: done before"
        continue
    fi
    read -r usual longest < <(expected "$step")
    left=$((limit - (SECONDS - began)))
    if ((usual > left)); then
        echo "== $step: left out, it takes about $usual s and $left s are left"
        continue
    fi
    echo "== $step"
    before=$SECONDS
    case $step in
    facts | nccl | tests | doctor | traces | plain* | pause-*) ;;
    *) start_mps ;;
    esac
    out=$out device=$device effort=$effort culm_words="${culm[*]}" timeout --kill-after=10 \
        $((left < longest ? left : longest)) bash -c 'culm=($culm_words); run_step "$1"' _ "$step" \
        >"$out/$step.log" 2>&1
    status=$?
    stop_mps
    tail -n 12 "$out/$step.log"
    if ((status == 0)); then
        touch "$out/$step.done"
    fi
    echo "== $step: $( ((status)) && echo "FAILED ($status)" || echo ok), $((SECONDS - before)) s"
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
archive=$(mktemp)
tar -C "$out" --exclude=results.tar.gz -czf "$archive" . && mv "$archive" "$out/results.tar.gz"
ls "$out"/*.done 2>/dev/null | xargs -rn1 basename
