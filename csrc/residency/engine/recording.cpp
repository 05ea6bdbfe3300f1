// Recording traces of accesses (docs/annex.md).
#include <memory>
#include <utility>
#include <vector>

#include "residency/engine/engine.h"

namespace torch_uvm {

namespace {

/// How long the device waits, so that the host gets ahead: longer than the host takes for most steps, and for what
/// takes it longest (60 ms for a library's plan on a slow host). A driver queues about a thousand kernels, and the host
/// waits for room then.
constexpr double kHoldUs = 100e3;
/// A program that waits for the device after each operator never gets ahead.
constexpr std::uint64_t kMaxHolds = 40;

} // namespace

void Engine::start_recording(const std::string& path) {
  wake_idle_devices();
  const Lock lock(*this);
  if (state_.recorder) {
    throw InvalidArgument("accesses are being recorded already; stop that first");
  }
  std::vector<std::size_t> budgets;
  for (const Device& device : state_.devices) {
    budgets.push_back(device.budget.value_or(0));
  }
  if (!is_awake()) {
    throw InvalidArgument("accesses are seen on devices with a budget only; set one before recording");
  }
  auto recorder = std::make_unique<AccessRecorder>(path, budgets);
  state_.operator_timer =
      std::make_unique<OperatorTimer>(state_.runtime, [recorder = recorder.get()](const OperatorTimer::Timed& timed) {
        recorder->ran(timed.first, timed.operators, timed.us);
      });
  state_.recorder = std::move(recorder);
  for (const auto& [id, record] : state_.records) {
    if (record->announced) {
      state_.recorder->storage(id, record->device, record->bytes, record->points_at == Side::kDevice);
    }
  }
}

void Engine::stop_recording() {
  std::string error;
  {
    const Lock lock(*this);
    if (!state_.recorder) {
      return;
    }
    state_.transfers.end_recording(state_.statistics);
    state_.operator_timer.reset();
    error = state_.recorder->close();
    state_.recorder.reset();
  }
  if (!error.empty()) {
    throw RuntimeFailure(error);
  }
}

// Where the device waits for the host's next kernel, the time of a group has the host's part. Two iterations are
// recorded at the program's own pace. From then on the device is made to wait whenever it has caught up with the host,
// so that it works without gaps behind that. With transfers this would change what is recorded.
void Engine::let_host_get_ahead(const Device& device) noexcept {
  const AccessRecorder::Counts& counts = state_.recorder->counts();
  const std::uint64_t loop = device.loops.step_length();
  if (loop == 0 || counts.operators < 2 * loop || counts.transfers != 0 || counts.holds >= kMaxHolds) {
    return;
  }
  try {
    if (!state_.runtime.query_stream(device.last_stream)) {
      return;
    }
    state_.operator_timer->end_group();
    const EngineState::Untimed untimed(state_, device.last_stream);
    state_.runtime.delay(kHoldUs, device.last_stream);
    state_.recorder->held(kHoldUs);
  } catch (...) {
    ++state_.failures;
  }
}

} // namespace torch_uvm
