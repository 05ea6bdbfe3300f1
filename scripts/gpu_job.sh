#!/usr/bin/env bash
# Runs one job on a GPU, unattended, in at most four minutes: a short table last, everything under $OUT.
#
#   scripts/gpu_job.sh balloon     training with the automatic budget beside a balloon of plain memory
#   scripts/gpu_job.sh 64k         the row of 64k tokens, with torchao, TRL and transformers beside the engine
#   scripts/gpu_job.sh peers       the same peers on other workloads
#   scripts/gpu_job.sh language    the language model, also with its optimizer in backward hooks
#   scripts/gpu_job.sh workloads   decoding, compiled models, vision transformer, ConvNeXt, graph network
#   scripts/gpu_job.sh traces      records traces of decoding, 64k tokens and a compiled model
#   scripts/gpu_job.sh cuda        costs and rates of managed memory (bench_cuda.py)
#
# torch_uvm is built, in place or installed. PYTHON is the Python that has torch (python3). Wheels in .whl
# (torchao, TRL) are installed without their dependencies. Every program has its limit of managed memory, and
# refuses to start unless that and 6 GiB are free.
set -euo pipefail
cd "$(dirname "$0")/.."
job=${1:?a job is named: see the head of this file}
mkdir -p "${OUT:-build/gpu}"
out=$(cd "${OUT:-build/gpu}" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset TORCH_UVM TORCH_UVM_CONF PYTORCH_ENABLE_UNIFIED_MEMORY
if compgen -G '.whl/*.whl' > /dev/null; then
  "$python" -m pip install --quiet --no-deps --no-index .whl/*.whl || true # a row says what is missing
fi

residency() { # NAME, then arguments
  local name=$1
  shift
  "$python" benchmarks/bench_residency.py --seconds 215 --timeout 60 --warm-up 6 --steps 8 \
    --json "$out/$name.json" "$@" > "$out/$name.txt" 2>&1 || true
  grep -v 'not measured' "$out/$name.txt"
}

case $job in
balloon)
  timeout 220 "$python" tests/_balloon.py "$out/balloon.json" 2>&1 | tee "$out/balloon.txt"
  ;;
64k) residency residency_64k --only '^64k' ;;
peers) residency residency_peers --only '^(2k tokens|16k|LoRA).*(CPUOffload|OffloadAct|checkpoint offload)' ;;
language) residency residency_language --only '^language model(, optimizer in backward)?: ' ;;
workloads)
  residency residency_workloads --only '^(decoding|language model, (compiled|CUDA)|vision|ConvNeXt|graph)'
  ;;
traces)
  mkdir -p "$out/traces"
  cp benchmarks/traces/index.json "$out/traces/" # the new ones are added to it
  timeout 235 "$python" benchmarks/record_traces.py --out "$out/traces" \
    --only decoding --only 64k --only 'language model, compiled' 2>&1 | tee "$out/traces.txt"
  ;;
cuda)
  TORCH_UVM_CONF=limit:8GiB timeout 235 "$python" benchmarks/bench_cuda.py --json "$out/cuda.json" \
    > "$out/cuda.txt" 2>&1 || true
  tail -70 "$out/cuda.txt"
  ;;
*)
  echo "$job is no job; see the head of $0" >&2
  exit 2
  ;;
esac
