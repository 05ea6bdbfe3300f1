// How durations reach the policy: timed operators and iterations, and the measured link.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "../../benchmarks/cpp/paced_runtime.h"
#include "harness.h"
#include "recording/recording_runtime.h"
#include "residency/engine/device_state.h"
#include "residency/engine/link_probe.h"
#include "residency/policy/schedule.h"
#include "residency_rig.h"

using namespace torch_uvm;

namespace {

constexpr Stream kStream = Stream::default_of(0);

PolicyOptions timed_options() {
  PolicyOptions options;
  options.budget = 16;
  options.timed = true;
  return options;
}

struct TimedDevice : Device {
  TimedDevice() {
    loops.start();
    loops.set_options(timed_options());
    last_stream = kStream;
  }
};

/// A loop over three weights of which two fit. Its operators take 1, 2 and 3 ms, and 0.5 ms go by before each
/// iteration.
class Loop {
 public:
  explicit Loop(play::PacedRuntime& runtime) : runtime_(runtime) {
    for (StorageId weight = 1; weight <= 3; ++weight) {
      policy.created(weight, 8);
    }
  }

  /// \param in_place whether the third operator uses its weight on the host, which takes 60 ms
  void iterate(bool in_place = false) {
    runtime_.pass_on_host(0.5);
    for (StorageId weight = 1; weight <= 3; ++weight) {
      const Access access{weight, true};
      device.time_operator(runtime_, policy.begin(weight, {&access, 1}, false));
      const bool slow = in_place && weight == 3;
      if (slow && device.loops.current().timer) {
        device.loops.current().timer->used_in_place();
      }
      runtime_.host_waits_until(runtime_.run(kStream, slow ? 60 : static_cast<double>(weight)));
      if (device.loops.current().timer) {
        device.loops.current().timer->end();
      }
      policy.end({}, 0);
    }
  }
  std::vector<float> operators_ms() const {
    std::vector<float> ms;
    for (const auto& op : policy.schedule().first->iteration.ops) {
      ms.push_back(op.ms);
    }
    return ms;
  }
  double iteration_ms() const {
    const std::vector<float> ms = operators_ms();
    return std::accumulate(ms.begin(), ms.end(), 0.0);
  }

 private:
  play::PacedRuntime& runtime_;

 public:
  TimedDevice device;
  Policy& policy = device.loops.current().policy;
};

} // namespace

TEST(the_policy_learns_what_operators_take) {
  play::PacedRuntime runtime{CostProfile::named("h200")};
  Loop loop(runtime);
  for (int iteration = 0; iteration < 40; ++iteration) {
    loop.iterate();
  }
  CHECK(loop.policy.counters().following);
  CHECK(std::abs(loop.iteration_ms() - (1 + 2 + 3)) < 0.1);
  double host_ms = 0;
  for (const auto& op : loop.policy.schedule().first->iteration.ops) {
    CHECK(op.waits);
    host_ms += static_cast<double>(op.host_ms);
  }
  CHECK(std::abs(host_ms - 0.5) < 0.1);
  CHECK(loop.device.loops.current().timer == nullptr); // it has stopped
}

/// The others keep their durations, and the operator counts as fast as they are.
TEST(an_operator_in_place_is_timed_alone) {
  play::PacedRuntime runtime{CostProfile::named("h200")};
  Loop loop(runtime);
  for (int iteration = 0; iteration < 40; ++iteration) {
    loop.iterate(/*in_place=*/true);
  }
  CHECK(loop.policy.counters().following);
  CHECK(std::abs(loop.iteration_ms() - (1 + 2 + 1.5)) < 0.1);
}

/// Its duration is that of the iterations in which it found its operands on the device.
TEST(an_operator_that_is_in_place_at_times_has_the_duration_of_the_others) {
  play::PacedRuntime runtime{CostProfile::named("h200")};
  Loop loop(runtime);
  for (int iteration = 0; iteration < 40; ++iteration) {
    loop.iterate(/*in_place=*/iteration % 2 == 0);
  }
  CHECK(std::abs(loop.iteration_ms() - (1 + 2 + 3)) < 0.6);
}

/// What an operator takes: the program and the engine on the host, and the device.
struct Pace {
  double program_ms, engine_ms, device_ms;
  StorageId waiting = 0; ///< the program waits for the operator on that weight
};

/// The operators of an iteration at that pace, once they have been timed.
std::vector<scheduling::Iteration::Op> timed_at(const Pace& pace) {
  play::PacedRuntime runtime{CostProfile::named("h200")};
  TimedDevice device;
  Policy& policy = device.loops.current().policy;
  for (int iteration = 0; iteration < 40; ++iteration) {
    for (StorageId weight = 1; weight <= 3; ++weight) {
      if (iteration == 0) {
        policy.created(weight, 8);
      }
      const Access access{weight, true};
      device.time_operator(runtime, policy.begin(weight, {&access, 1}, false));
      runtime.run(kStream, pace.device_ms);
      runtime.pass_on_host(pace.program_ms + pace.engine_ms);
      if (device.loops.current().timer) {
        device.loops.current().timer->engine_took(pace.engine_ms);
        device.loops.current().timer->end();
      }
      if (weight == pace.waiting) {
        runtime.synchronize_stream(kStream);
      }
      policy.end({}, 0);
    }
    if (iteration == 20) {
      runtime.synchronize_stream(kStream);
    }
  }
  return policy.schedule().first->iteration.ops;
}

TEST(what_the_engine_takes_the_host_is_not_the_programs) {
  for (const auto& op : timed_at({.program_ms = 0.04, .engine_ms = 0.1, .device_ms = 0.01})) {
    CHECK(std::abs(op.host_ms - 0.04) < 0.001);
    CHECK(op.ms < 0.02); // it waits for the host now and then
  }
}

TEST(a_program_that_is_ahead_of_the_device_is_timed_too) {
  for (const auto& op : timed_at({.program_ms = 0.01, .engine_ms = 0.001, .device_ms = 0.05})) {
    CHECK(std::abs(op.host_ms - 0.01) < 0.001);
    CHECK(std::abs(op.ms - 0.05) < 0.001);
  }
}

TEST(an_operator_that_the_program_waits_for_is_found) {
  for (const auto& op : timed_at({.program_ms = 0.03, .engine_ms = 0.001, .device_ms = 0.01, .waiting = 2})) {
    CHECK_EQ(op.waits, op.key == 2);
    CHECK(op.host_ms < 0.1); // the wait is not the program's time
    CHECK(std::abs(op.ms - 0.01) < 0.005);
  }
}

TEST(nothing_is_timed_before_an_operator_has_run_on_the_device) {
  play::PacedRuntime runtime{CostProfile::named("h200")};
  TimedDevice device;
  device.last_stream = Stream::host();
  Decision decision;
  decision.wants_durations = true;
  device.time_operator(runtime, decision);
  CHECK(device.loops.current().timer == nullptr);
  device.last_stream = kStream;
  device.time_operator(runtime, decision);
  CHECK(device.loops.current().timer != nullptr);
}

/// Its kernels take time, and it has not reached an event when the host looks again at once.
class SlowDevice final : public RecordingRuntime {
 public:
  void record_event(Event event, Stream stream) override {
    RecordingRuntime::record_event(event, stream);
    behind = true;
  }
  bool query_stream(Stream stream) override {
    return !behind && RecordingRuntime::query_stream(stream);
  }
  double elapsed_ms(Event /*from*/, Event /*to*/) override {
    return 2;
  }
  DeviceProperties device_properties(int device) const override {
    DeviceProperties properties = RecordingRuntime::device_properties(device);
    properties.kernels_take_time = true;
    return properties;
  }

  bool behind = false;
};

/// The events of the engine's own timer come after the look.
TEST(a_recording_holds_the_device_when_it_has_caught_up) {
  constexpr std::size_t kLoop = 4;
  residency::RigOn<SlowDevice> rig;
  for (std::size_t i = 0; i < kLoop; ++i) {
    rig.make(static_cast<unsigned char>(i), 1 * MiB); // they fit
  }
  const auto iterate = [&](std::size_t times) {
    for (std::size_t op = 0; op < times * kLoop; ++op) {
      rig.runtime.behind = false;
      rig.run(10 + op % kLoop, {rig.storages[op % kLoop].get()}, true, [] {});
    }
  };
  iterate(3); // the loop is known, and operators are timed alone
  rig.engine.start_recording("/dev/null");
  iterate(2);
  CHECK_EQ(rig.runtime.count("delay"), 0U); // the program's own pace
  iterate(1);
  CHECK_EQ(rig.runtime.count("delay"), kLoop);
  rig.engine.stop_recording();
}

TEST(the_links_rates_are_measured) {
  play::PacedRuntime runtime{CostProfile::named("h200")};
  const LinkRates rates = measure_link(runtime, runtime.create_stream(0, 0), runtime.create_stream(0, 0));
  CHECK(std::abs(rates.into * 1e3 / runtime.costs().copy_to_device_rate - 1) < 0.01);
  CHECK(std::abs(rates.out * 1e3 / runtime.costs().copy_to_host_rate - 1) < 0.01);
  CHECK(std::abs(rates.both * 1e3 / runtime.costs().copy_both_ways_rate - 1) < 0.01);
  CHECK(rates.in_place < rates.into);
}

TEST(a_link_that_cannot_be_measured_has_the_default_rates) {
  for (const std::string call :
       {"allocate_pinned", "allocate_device", "create_event", "copy_async", "record_event", "wait_event"}) {
    RecordingRuntime runtime;
    runtime.fail(call, 1);
    CHECK_EQ(measure_link(runtime, kStream, kStream).into, LinkRates{}.into);
    CHECK_EQ(runtime.count("allocate_pinned"), runtime.count("free_pinned") + (call == "allocate_pinned" ? 1 : 0));
    CHECK_EQ(runtime.count("allocate_device"), runtime.count("free_device") + (call == "allocate_device" ? 1 : 0));
  }
}

HARNESS_MAIN()
