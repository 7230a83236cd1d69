#!/usr/bin/env bash
# All that docs/measured.md says of the Triton backend on a GPU: `benchmarks/everything.sh times FOLDER` in 6 minutes, alone
# on the GPU; `benchmarks/everything.sh checks FOLDER [CHECKOUT OF FLA]` in 3, several at a time.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:?times or checks} out=${2:?a folder for the results} fla=${3:-}
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:-.}

times() {
    python benchmarks/first_call.py --backend triton --json "$out/first_call.json"
    python -m kda bench --backend triton --shape h64-8k --shape h64-8x1k --shape h8-32k --direction forward --direction step \
        --save "$out/h200-triton.json"
    python -m kda bench --backend triton --shape h64-1k --graph --direction forward --direction step --save "$out/h200-triton-graph.json"
    python -m kda bench --backend triton --shape h64-8k --shape h64-8x1k --regime slow --disable-recompute --direction forward \
        --direction step --save "$out/h200-triton-kept.json"
    python benchmarks/configs.py --gate softplus --kernel state --warps 4 --stages 3 --BK 128 --json "$out/softplus.json"
    python benchmarks/decode.py --json "$out/decode.json"
    python benchmarks/launch.py --json "$out/launch.json"
}

checks() {
    python benchmarks/sanitized.py                                       # builds what the others run
    [ -z "$fla" ] || python benchmarks/fla_tests.py "$fla" -q -n 5 > "$out/fla.log" 2>&1 &
    python -m pytest -q -n 9 tests/gpu > "$out/tests.log" 2>&1 &
    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool python benchmarks/sanitized.py > "$out/$tool.log" 2>&1 &
    done
    wait
    python -m pytest -q tests/gpu -k "int32" > "$out/large.log" 2>&1            # these want the GPU's memory for themselves
    tail -n 4 "$out"/*.log
}

$what
