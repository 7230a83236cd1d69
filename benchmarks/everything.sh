#!/usr/bin/env bash
# All that docs/results/triton.md says of the Triton backend on a GPU: `benchmarks/everything.sh times FOLDER` in 6
# minutes, alone on the GPU; `benchmarks/everything.sh checks FOLDER [CHECKOUT OF FLA]` in 3, several at a time.  And of the Hopper
# forward: `benchmarks/everything.sh hopper FOLDER`, in 5, what is least known first; all that is printed is in FOLDER.
# `benchmarks/everything.sh questions FOLDER` times what docs/ only predicts, on a Hopper GPU, in 9;
# `benchmarks/everything.sh tables FOLDER CARD [PART...]` what the tables of docs/results/sm90.md have; CARD, such as h200,
# begins the names of its files, and PARTs such as kept are those to run.  Nothing else may run beside it: kernels are
# built and results compared before each timing.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:?times, checks, hopper, questions or tables} out=${2:?a folder for the results} third=${3:-} parts=${*:4}
mkdir -p "$out"

times() {
    python -m benchmarks.first_call --backend triton --json "$out/first_call.json"
    python -m kda bench --backend triton --shape h64-8k --shape h64-8x1k --shape h8-32k --direction forward --direction step \
        --save "$out/h200-triton.json"
    python -m kda bench --backend triton --shape h64-1k --graph --direction forward --direction step --save "$out/h200-triton-graph.json"
    python -m kda bench --backend triton --shape h64-8k --shape h64-8x1k --regime slow --disable-recompute --direction forward \
        --direction step --save "$out/h200-triton-kept.json"
    python -m benchmarks.configs --gate softplus --kernel state --warps 4 --stages 3 --BK 128 --json "$out/softplus.json"
    python -m benchmarks.decode_step --heads 32,64,96 --sequences 1,4,16,64,256 --states float32 --recurrences vk,kv \
        --json "$out/decode.json"
    python -m benchmarks.decode_step --json "$out/decode_step.json"
    python -m benchmarks.launch --json "$out/launch.json"
}

run() { timeout "$2" "${@:3}" > "$out/$1.log" 2>&1; tail -n 12 "$out/$1.log"; }

questions() {
    few=(--shape h32-8k --shape h24-8k --shape h40-8k --shape h22-4k --shape h32-1k)
    run twos 60 python -m benchmarks.hopper "${few[@]}" --no-fused --json "$out/twos.json"
    run fours 60 python -m benchmarks.hopper "${few[@]}" --fused --ctas 4 --json "$out/fours.json"
    run memcheck-fours 90 compute-sanitizer --report-api-errors no --tool memcheck python -m benchmarks.hopper --shape h32-1k \
        --fused --ctas 4
    run staged 60 python -m benchmarks.hopper --shape h64-8k --fused --staged --json "$out/staged.json"
    run shares 60 python -m benchmarks.hopper --shape h64-64x128 --shape h96-8k --json "$out/shares.json"
    run softplus 60 python -m benchmarks.hopper --shape h64-8k --shape h32-8k --gate softplus --json "$out/softplus.json"
    for keep in states all; do
        run "step-$keep" 90 python -m kda bench --backend sm90 --direction step --graph --disable-recompute $keep \
            --shape h64-8k --shape h32-8k --shape h16-8k --regime slow --save "$out/step-$keep.json"
    done
    run first 60 python -m benchmarks.first_call --backend sm90 --json "$out/first_call.json"
    run host 40 python -m kda bench --host --backend sm90 --shape h64-8k
    run decode 200 python -m benchmarks.decode_variants --json "$out/decode_variants.json"
}

tables() {
    local card=${third:?the card, such as h200} few="h64-8k h96-8k h32-8k h16-8k h8-32k h64-8x1k h64-1k h12-4k"
    bench() {                                                            # NAME GATE SHAPES OPTIONS
        local shapes=() name graph=(--graph)
        [ "$1" = eager ] && graph=()
        case " ${parts:-$1} " in *" $1 "*) ;; *) return ;; esac
        for name in $3; do shapes+=(--shape "$name"); done
        run "$1" 600 python -m kda bench --backend sm90 "${graph[@]}" --repeats 40 --gate "$2" "${shapes[@]}" "${@:4}" \
            --save "$out/$card-sm90-$1.json"
    }
    bench kept bounded "$few h64-8k-64" --direction step --disable-recompute
    bench forward bounded "$few h64-mixed h4-64k h4-2k h64-8k-64" --direction forward
    bench kept-softplus softplus "h64-8k h32-8k" --direction step --disable-recompute
    bench forward-softplus softplus "h64-8k h32-8k h16-8k" --direction forward
    bench step bounded "$few" --direction step
    bench step-softplus softplus "h64-8k h32-8k" --direction step
    bench eager bounded "h64-8k h16-8k h64-1k h12-4k" --direction step --disable-recompute
}

hopper() {
    run tests 120 python -m pytest -q tests/gpu/test_sm90_forward_on_gpu.py
    run memcheck 100 compute-sanitizer --report-api-errors no --tool memcheck python -m benchmarks.sanitized sm90
    run racecheck 100 compute-sanitizer --report-api-errors no --tool racecheck python -m benchmarks.sanitized sm90 --followed
    for options in --fused --no-fused; do
        run "h64$options" 60 python -m benchmarks.hopper --shape h64-8k --shape h96-8k --shape h64-64x128 $options
    done
    run kernels 120 python -m benchmarks.hopper --json "$out/h200-sm90-kernels.json"
    run step 60 python -m kda bench --backend sm90 --against triton --shape h64-8k --shape h64-8x1k --regime slow --direction step
    run softplus 60 python -m benchmarks.hopper --shape h64-8k --gate softplus
    run first 60 python -m benchmarks.first_call --backend sm90
    run selftest 60 python -m kda selftest --backend sm90 --quick
    run graph 60 python -m kda bench --backend sm90 --shape h64-1k --graph --direction forward
    run bench 300 python -m kda bench --backend sm90 --direction forward --shape h64-8k --shape h64-8x1k --shape h64-mixed \
        --shape h8-32k --shape h16-8k --shape h64-1k --save "$out/h200-sm90.json"
}

checks() {
    python -m benchmarks.sanitized                                       # builds what the others run
    [ -z "$third" ] || python -m benchmarks.fla_tests "$third" -q -n 5 > "$out/fla.log" 2>&1 &
    python -m pytest -q -n 9 tests/gpu > "$out/tests.log" 2>&1 &
    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool python -m benchmarks.sanitized > "$out/$tool.log" 2>&1 &
    done
    wait
    python -m pytest -q tests/gpu -k "int32" > "$out/large.log" 2>&1            # these want the GPU's memory for themselves
    tail -n 4 "$out"/*.log
}

$what
