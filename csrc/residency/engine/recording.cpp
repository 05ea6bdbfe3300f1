// Recording traces of accesses (docs/annex.md).
#include <memory>
#include <utility>
#include <vector>

#include "residency/engine/engine.h"

namespace torch_uvm {

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
        recorder->ran(timed.number, 1, 1e3 * timed.ms);
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

void Engine::let_host_get_ahead(const Device& device) noexcept {
  const AccessRecorder::Counts& counts = state_.recorder->counts();
  const std::uint64_t loop = device.loops.step_length();
  if (counts.holds == 0 && loop != 0 && counts.operators >= 2 * loop && counts.transfers == 0) {
    state_.operator_timer->hold_from_now_on();
    state_.recorder->held(1e3 * OperatorTimer::kHoldMs);
  }
}

} // namespace torch_uvm
