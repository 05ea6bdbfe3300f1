#include "residency/trace/operator_timer.h"

#include <algorithm>

#include "residency/policy/id_map.h"

namespace torch_uvm {

OperatorTimer::OperatorTimer(ManagedRuntime& runtime, Report report)
    : runtime_(runtime), report_(std::move(report)), events_(runtime, runtime.device_count(), /*timing=*/true) {}

OperatorTimer::~OperatorTimer() {
  end_group();
  report_finished();
  for (Group& group : ended_) {
    forget(group);
  }
  events_.destroy_all();
}

void OperatorTimer::begin(Stream stream, OperatorKey key) noexcept {
  const std::uint64_t pair = mix_bits(std::exchange(last_, key)) ^ key;
  const bool alone = alone_.contains(pair);
  if (group_.operators == kMaxOperators || group_.stream != stream || group_.in_place || group_.alone || alone) {
    end_group();
  }
  if (group_.operators == 0) {
    report_finished();
    group_.first = begun_;
    group_.stream = stream;
    group_.alone = alone;
    group_.began_ms = runtime_.host_ms();
    begin_part();
  }
  group_.pairs[group_.operators] = pair;
  ++begun_;
  ++group_.operators;
}

void OperatorTimer::isolate() noexcept {
  if (group_.operators > 1) {
    const Stream stream = group_.stream;
    const std::uint64_t pair = group_.pairs[--group_.operators];
    end_group();
    group_.first = begun_ - 1;
    group_.began_ms = runtime_.host_ms();
    group_.pairs[0] = pair;
    group_.operators = 1;
    group_.stream = stream;
    begin_part();
  }
  group_.in_place = true;
}

void OperatorTimer::begin_part() noexcept {
  try {
    group_.parts.reserve(group_.parts.size() + 1);
    group_.parts.emplace_back(events_.record(group_.stream), Event{});
    group_.running = true;
  } catch (...) {
    group_.failed = true;
  }
}

bool OperatorTimer::end_part(Stream stream) noexcept {
  if (!group_.running || group_.stream != stream) {
    return false;
  }
  group_.running = false;
  try {
    group_.parts.back().second = events_.record(stream);
  } catch (...) {
    group_.failed = true;
  }
  return true;
}

void OperatorTimer::end_group() noexcept {
  end_part(group_.stream);
  if (!group_.parts.empty() && !group_.failed) {
    try {
      if (runtime_.query_event(group_.parts.front().first)) { // the device keeps up
        // `isolate` ends a group amid the engine's work, so the group after it can have more of that than time.
        group_.host_ms = std::max(0.0, runtime_.host_ms() - group_.began_ms - group_.engine_ms);
      }
      ended_.push_back(group_);
      group_.parts.clear(); // those of `ended_` are the same events
    } catch (...) { // no host memory: the group is not timed
    }
  }
  forget(group_);
  group_ = Group{};
}

bool OperatorTimer::report(const Group& group) {
  for (const auto& [begin, end] : group.parts) {
    if (!runtime_.query_event(end)) {
      return false;
    }
  }
  double ms = 0;
  for (const auto& [begin, end] : group.parts) {
    ms += runtime_.elapsed_ms(begin, end);
  }
  if (group.host_ms > 0) { // the device waited for the engine's work on the host
    ms = std::min(ms, std::max(ms - group.engine_ms, group.host_ms));
  }
  if (group.operators > 1 && ms > kLongGroupMs) {
    alone_.insert(group.pairs.begin(), group.pairs.begin() + group.operators);
  }
  report_({group.first, group.operators, 1e3 * ms, 1e3 * group.host_ms, group.in_place});
  return true;
}

void OperatorTimer::report_finished() noexcept {
  while (!ended_.empty()) {
    try {
      if (!report(ended_.front())) {
        return;
      }
    } catch (...) {
      // The device has failed, or its events cannot be read: the group is not timed.
    }
    forget(ended_.front());
    ended_.pop_front();
  }
}

void OperatorTimer::forget(Group& group) noexcept {
  for (const auto& [begin, end] : group.parts) {
    for (const Event event : {begin, end}) {
      if (event) {
        events_.give(group.stream, event);
      }
    }
  }
  group.parts.clear();
}

} // namespace torch_uvm
