#!/usr/bin/env bash
# Everything that is to be checked on a machine with a GPU, in one call of less than nine minutes:
#
#     scripts/check_cuda.sh [STAGE...]        stages: build cpp suite bench sanitizer; without one: all
#
# Logs, the suite's JUnit XML and the benchmark's JSON, eight files, go to $OUT (build/check-cuda without it).
# A stage that fails does not keep the next ones from running; what happened is said at the end, and by the exit status.
#
# PYTHON    the Python that has torch (python3)         PYTEST_ARGS   more for the suite's pytest
# SECONDS_IN_ALL   what all stages may take (530)       WORKERS       processes of the suite (4; 1: none)
set -u -o pipefail
cd "$(dirname "$0")/.." || exit

PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/build/check-cuda}
DEADLINE=$((SECONDS + ${SECONDS_IN_ALL:-530}))
WORKERS=${WORKERS:-4}
STAGES=${*:-build cpp suite bench sanitizer}
mkdir -p "$OUT"
export OUT TORCH_UVM_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export MAX_JOBS=${MAX_JOBS:-$(nproc)}
unset TORCH_UVM TORCH_UVM_DEVICE PYTORCH_ENABLE_UNIFIED_MEMORY
# The limit of every process that sets none itself.
export TORCH_UVM_CONF=limit:4GiB
ulimit -c 0

summary=()
failed=0

wanted() { [[ " $STAGES " == *" $1 "* ]]; }
has() { "$PYTHON" -c "import $1" 2>/dev/null; }

# stage NAME LOG SECONDS COMMAND...: runs it, on to the end of $OUT/LOG.log, within SECONDS and what is left of all.
stage() {
  local name=$1 log=$OUT/$2.log most=$3 left=$((DEADLINE - SECONDS)) began=$SECONDS status
  shift 3
  if ((left < 10)); then
    summary+=("$name: NOT RUN, no time left")
    failed=1
    return 1
  fi
  echo "=== $name (at most $((most < left ? most : left)) s)"
  timeout --kill-after=5 "$((most < left ? most : left))" "$@" >>"$log" 2>&1
  status=$?
  if ((status == 0)); then
    summary+=("$name: ok, $((SECONDS - began)) s")
  else
    ((status == 124 || status == 137)) && status="$status, out of time"
    summary+=("$name: FAILED ($status), $((SECONDS - began)) s")
    failed=1
    tail -n 25 "$log"
    return 1
  fi
}

describe() {
  nvidia-smi --query-gpu=name,memory.free,driver_version --format=csv || true
  "$PYTHON" - <<'PYTHON' || true
import sys, torch
print(sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda, "GPUs", torch.cuda.device_count())
for name in ("transformers", "cupy", "triton", "xdist", "pytest_timeout", "hypothesis"):
    try:
        module = __import__(name)
        print(name, getattr(module, "__version__", "there"))
    except ImportError as error:
        print(name, "missing:", error)
PYTHON
  "${CXX:-c++}" --version | head -n 1 || true
}

# The allocator's contract over the real runtime, and the layers' own tests.
layers() {
  local home=${CUDA_HOME:-/usr/local/cuda} status=0
  cmake -S tests/cpp -B build/cpp -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo || return
  cmake --build build/cpp -j "$MAX_JOBS" || status=$?
  "${CXX:-c++}" -std=c++20 -O2 -g -Wall -Wextra -Icsrc -Itests/cpp -I"$home/include" \
    tests/gpu/contract_on_gpu.cpp csrc/cuda/{cuda_calls,cuda_hints,cuda_runtime,pinned_memory}.cpp build/cpp/liblayers.a \
    -o build/contract_on_gpu -L"$home/lib64" -Wl,-rpath,"$home/lib64" -lcudart -lpthread &&
    build/contract_on_gpu || status=$?
  "$PYTHON" -m pytest tests/test_cpp_layers.py || status=$?
  return "$status"
}
export -f layers
export PYTHON

for stage in $STAGES; do
  rm -f "$OUT/$stage.log" # those of stages that are not asked for stay
done
wanted suite && rm -f "$OUT/cases.log"
describe 2>&1 | tee -a "$OUT/build.log"

if wanted build; then
  # With what egg_info writes, the tree on PYTHONPATH is known to `import torch` as an installed package is.
  TORCH_UVM_CUDA=1 TORCH_UVM_TEST_BINDINGS=1 stage build build 180 "$PYTHON" setup.py build_ext --inplace egg_info || {
    printf '%s\n' "${summary[@]}"
    exit 1 # there is nothing to run
  }
fi
if wanted cpp; then
  stage cpp build 150 bash -c layers || true
fi

one_process=()
if has pytest_timeout; then
  one_process=(--timeout=60 --timeout-method=thread)
fi
# suite NAME SECONDS: the tests of tests/gpu that this environment selects.
suite() {
  local name=$1 most=$2 parallel=() crashed
  if ((WORKERS > 1)) && has xdist; then
    # A worker that dies is replaced, and the test it died of is named. The limit is shared between them.
    parallel=(-n "$WORKERS" --max-worker-restart=20)
  fi
  # shellcheck disable=SC2086
  stage "$name" "$name" "$most" "$PYTHON" -X faulthandler -m pytest tests/gpu "${parallel[@]}" "${one_process[@]}" \
    -o faulthandler_timeout=50 --junitxml="$OUT/$name.xml" -rfEs --tb=short ${PYTEST_ARGS:-} && return
  # Where a process died, say where in C++: the test again, by itself, under a debugger.
  crashed=$(grep -oP "crashed while running '\K[^']+" "$OUT/$name.log" | head -n 1)
  if [[ -n $crashed ]] && command -v cuda-gdb >/dev/null; then
    stage crash "$name" 60 cuda-gdb -batch -ex run -ex bt --args \
      "$PYTHON" -m pytest -p no:faulthandler -p no:timeout "$crashed" || true
  fi
}
if wanted suite; then
  suite suite 280
  # The CPU suite's cases take kernels for done when their call returns.
  CUDA_LAUNCH_BLOCKING=1 suite cases 200
  # A device's free memory says something only while no other process is at work there.
  stage alone alone 60 "$PYTHON" -m pytest tests/gpu/test_cuda_budget_driver.py --tb=short -rs || true
fi
if wanted bench; then
  stage bench bench 200 "$PYTHON" benchmarks/bench_cuda.py --json "$OUT/cuda.json" || true
fi
if wanted sanitizer; then
  if command -v compute-sanitizer >/dev/null; then
    stage sanitizer sanitizer 180 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 86 \
      "$PYTHON" -m pytest tests/gpu -m memcheck --tb=short -o faulthandler_timeout=120 || true
  else
    summary+=("sanitizer: NOT RUN, compute-sanitizer is not there")
    failed=1
  fi
fi

echo
echo "=== summary"
printf '%s\n' "${summary[@]}"
for name in build suite cases sanitizer; do
  [[ -f $OUT/$name.log ]] && echo "$name: $(grep -E '(passed|failed|skipped|error).* in [0-9]' "$OUT/$name.log" | tail -n 1)"
done
for name in suite cases; do
  [[ -f $OUT/$name.log ]] && grep -E '^(FAILED|ERROR)' "$OUT/$name.log" | cut -c1-160 | head -n 40
done
[[ -f $OUT/sanitizer.log ]] && grep -E 'ERROR SUMMARY' "$OUT/sanitizer.log" | tail -n 1
[[ -f $OUT/bench.log ]] && cat "$OUT/bench.log"
exit "$failed"
