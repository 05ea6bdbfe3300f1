// A runtime without memory: it models only the clocks of streams and events, and the duration of copies on a link.
//
// Unlike the emulated runtime, it is deterministic: the clocks alone decide which work has completed, and the host has
// a clock of its own. An address encodes the kind of its memory; there is no memory behind it.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "idle_runtime.h"
#include "race_detector.h"
#include "runtime/emulated/cost_profile.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/link_clock.h"

namespace play {

using namespace torch_uvm;

class PacedRuntime final : public bench::IdleRuntime {
 public:
  /// \param staged whether copies of managed memory cannot run concurrently with kernels, so that the engine uses
  /// staging slots
  /// \param races is told of all work; nullptr: nothing is checked
  explicit PacedRuntime(const CostProfile& costs, bool staged = true, RaceDetector* races = nullptr)
      : costs_(costs), staged_(staged), races_(races) {}

  double copy_us = 0; ///< host time of one copy between device and host

  const CostProfile& costs() const {
    return costs_;
  }
  double host_ms() const override {
    return host_;
  }
  void pass_on_host(double ms) {
    host_ += ms;
  }
  /// Runs a kernel. It begins when the stream has completed its earlier work, at the present time at the earliest.
  /// \param read, written bytes of host memory, at whose rate it goes at most; copies wait for them
  double run(Stream stream, double ms, double read = 0, double written = 0) {
    double& clock = clock_of(stream);
    const double begin = std::max(clock, host_), each = 1e3 / costs_.in_place_rate;
    link_.occupy(LinkClock::kToDevice, begin, read * each);
    link_.occupy(LinkClock::kToHost, begin, written * each);
    clock = begin + std::max(ms, std::max(read, written) * each);
    return clock;
  }
  void host_waits_until(double ms) {
    host_ = std::max(host_, ms);
  }

  void* allocate_pinned(std::size_t bytes) override {
    return take(pinned_, bytes);
  }
  void* allocate_device(std::size_t bytes, int /*device*/) override {
    return take(plain_, bytes);
  }
  void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) override {
    const auto to = reinterpret_cast<std::uintptr_t>(dst), from = reinterpret_cast<std::uintptr_t>(src);
    const bool to_host = to >= kPinned && to < kPlain, from_host = from >= kPinned && from < kPlain;
    double& clock = clock_of(stream);
    clock = std::max(clock, host_);
    if (races_ != nullptr) {
      races_->copy(dst, src, bytes, stream);
    }
    if (to_host == from_host) {
      clock += static_cast<double>(bytes) / costs_.device_copy_rate * 1e3;
      return;
    }
    host_ += copy_us / 1e3;
    clock = link_.copy(to_host ? LinkClock::kToHost : LinkClock::kToDevice, clock, static_cast<double>(bytes));
  }

  void delay(double us, Stream stream) override {
    double& clock = clock_of(stream);
    clock = std::max(clock, host_) + us / 1e3;
  }

  Stream create_stream(int device, int /*priority*/) override {
    streams_.push_back(std::make_unique<double>(0));
    return Stream{device, streams_.back().get()};
  }
  bool query_stream(Stream stream) override {
    const bool done = clock_of(stream) <= host_;
    if (done) {
      seen(stream);
    }
    return done;
  }
  void synchronize_stream(Stream stream) override {
    host_waits_until(clock_of(stream));
    seen(stream);
  }
  void synchronize_device(int device) override {
    synchronize_stream(Stream::default_of(device));
    for (const auto& clock : streams_) {
      synchronize_stream(Stream{device, clock.get()});
    }
  }
  Event create_event(int /*device*/, bool /*timing*/) override {
    return Event{new double(0)};
  }
  void destroy_event(Event event) noexcept override {
    if (races_ != nullptr) {
      races_->forget(event);
    }
    delete &time_of(event);
  }
  void record_event(Event event, Stream stream) override {
    time_of(event) = std::max(clock_of(stream), host_);
    if (races_ != nullptr) {
      races_->record(event, stream);
    }
  }
  bool query_event(Event event) override {
    const bool done = time_of(event) <= host_;
    if (done) {
      seen(event);
    }
    return done;
  }
  void synchronize_event(Event event) override {
    host_waits_until(time_of(event));
    seen(event);
  }
  void wait_event(Stream stream, Event event) override {
    if (races_ != nullptr) {
      races_->wait(stream, event);
    }
    clock_of(stream) = std::max(clock_of(stream), time_of(event));
  }
  double elapsed_ms(Event from, Event to) override {
    return time_of(to) - time_of(from);
  }
  int device_count() const override {
    return 1;
  }
  DeviceProperties device_properties(int /*device*/) const override {
    DeviceProperties properties;
    properties.managed_copies_overlap = !staged_;
    properties.kernels_take_time = true;
    return properties;
  }

 private:
  /// managed addresses are below this one (AddressesOnly)
  static constexpr std::uintptr_t kPinned = std::uintptr_t{1} << 44;
  static constexpr std::uintptr_t kPlain = std::uintptr_t{1} << 45;

  template <typename Work>
  void seen(Work done) {
    if (races_ != nullptr) {
      races_->host_saw(done);
    }
  }
  static void* take(std::uintptr_t& next, std::size_t bytes) {
    const std::uintptr_t at = next;
    next += round_up(bytes, 2 * MiB);
    return reinterpret_cast<void*>(at);
  }
  double& clock_of(Stream stream) {
    return stream.handle == nullptr ? main_ : *static_cast<double*>(stream.handle);
  }
  static double& time_of(Event event) {
    return *static_cast<double*>(event.handle);
  }

  const CostProfile& costs_;
  const bool staged_;
  RaceDetector* const races_;
  double host_ = 0; ///< in ms, like all clocks
  double main_ = 0; ///< clock of the default stream
  LinkClock link_{costs_.copy_to_device_rate / 1e3, costs_.copy_to_host_rate / 1e3, costs_.copy_both_ways_rate / 1e3};
  std::vector<std::unique_ptr<double>> streams_; ///< clocks of created streams, kept until the runtime is destroyed
  std::uintptr_t pinned_ = kPinned;
  std::uintptr_t plain_ = kPlain;
};

} // namespace play
