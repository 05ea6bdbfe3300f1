// Modelled time, the timeline, and the speed of the book-keeping.
#include <cmath>
#include <vector>

#include "emulated_helpers.h"
#include "harness.h"
#include "runtime/emulated/cost_profile.h"
#include "runtime/emulated/timeline.h"

using namespace torch_uvm;
using namespace emulated_helpers;

namespace {

const CostProfile& costs() {
  return CostProfile::named("h200");
}

double us(std::size_t bytes, double rate) {
  return static_cast<double>(bytes) / rate * 1e6;
}

bool close(double left, double right) {
  return std::abs(left - right) <= 1e-9 * std::max(1.0, std::abs(right));
}

Stream stream0() {
  return Stream::default_of(0);
}

// Returns the time that `body` takes on a stream.
template <typename Body>
double cost(EmulatedRuntime& runtime, Stream stream, Body body) {
  runtime.synchronize_device(0);
  const Event begin = runtime.create_event(stream.device, true);
  const Event end = runtime.create_event(stream.device, true);
  runtime.record_event(begin, stream);
  body();
  runtime.record_event(end, stream);
  runtime.synchronize_event(end);
  const double elapsed = runtime.elapsed_ms(begin, end) * 1e3;
  runtime.destroy_event(begin);
  runtime.destroy_event(end);
  return elapsed;
}

EmulatedConfig large() {
  EmulatedConfig config;
  config.memory = 256 * MiB;
  return config;
}

} // namespace

TEST(a_kernel_costs_its_launch_and_its_traffic) {
  EmulatedRuntime runtime(large());
  constexpr std::size_t kPages = 1024;
  constexpr std::size_t kBytes = kPages * kPage;
  Managed memory(runtime, kPages);
  const auto kernel = [&] { memory.use(0, kPages, 0, true); };
  const double resident = costs().launch_us + us(kBytes, costs().device_memory_rate);
  CHECK(close(cost(runtime, stream0(), kernel), resident + us(kBytes, costs().fault_populate_rate)));
  CHECK(close(cost(runtime, stream0(), kernel), resident));
  memory.use_on_host(0, kPages, false);
  CHECK(close(cost(runtime, stream0(), kernel), resident + us(kBytes, costs().fault_to_device_rate)));
  memory.use_on_host(0, kPages, false);
  memory.advise(0, kPages, Advice::kSetPreferredLocation, Location::host());
  CHECK(close(cost(runtime, stream0(), kernel), costs().launch_us + us(kBytes, costs().in_place_fault_rate)));
  memory.advise(0, kPages, Advice::kSetAccessedBy, Location::device(0));
  CHECK(close(cost(runtime, stream0(), kernel), costs().launch_us + us(kBytes, costs().in_place_rate)));
}

TEST(later_kernels_wait_for_a_delay) {
  EmulatedRuntime runtime(large());
  Managed memory(runtime, 1024);
  const auto kernels = [&] {
    for (int at = 0; at < 10; ++at) {
      memory.use(0, 1024, 0, true);
    }
  };
  kernels();
  const double alone = cost(runtime, stream0(), kernels);
  CHECK(close(cost(runtime, stream0(),
                   [&] {
                     runtime.delay(5000, stream0());
                     kernels();
                   }),
              costs().call_us + 5000 + alone));
  runtime.synchronize_device(0);
  CHECK_THROWS(InvalidArgument, runtime.delay(1, Stream::host()));
}

TEST(prefetches_reach_the_measured_rates) {
  EmulatedRuntime runtime(large());
  const auto rate = [&](std::size_t bytes, Location from, Location to) {
    Managed memory(runtime, bytes / kPage);
    memory.prefetch(0, memory.pages, from);
    const double time = cost(runtime, stream0(), [&] { memory.prefetch(0, memory.pages, to); });
    return static_cast<double>(bytes) / (time - costs().call_us) / 1e3; // GB/s
  };
  const auto between = [](double value, double least, double most) { return value >= least && value <= most; };
  CHECK(between(rate(128 * MiB, Location::host(), Location::device(0)), 46, 49));
  CHECK(between(rate(32 * MiB, Location::host(), Location::device(0)), 40, 45));
  CHECK(between(rate(8 * MiB, Location::host(), Location::device(0)), 31, 34.5));
  CHECK(between(rate(2 * MiB, Location::host(), Location::device(0)), 16, 18));
  CHECK(between(rate(128 * MiB, Location::device(0), Location::host()), 9.6, 10.7));
}

TEST(the_cost_of_a_copy_depends_on_both_sides) {
  EmulatedRuntime runtime(large());
  constexpr std::size_t kBytes = 32 * MiB;
  void* pinned = runtime.allocate_pinned(kBytes);
  void* device = runtime.allocate_device(kBytes, 0);
  void* other = runtime.allocate_device(kBytes, 0);
  std::vector<char> pageable(kBytes);
  Managed memory(runtime, kBytes / kPage);
  memory.use_on_host(0, memory.pages, true);
  runtime.reset_counters();
  const auto copy = [&](void* to, const void* from) {
    return cost(runtime, stream0(), [&] { runtime.copy_async(to, from, kBytes, stream0()); }) - costs().call_us;
  };
  CHECK(close(copy(device, pinned), us(kBytes, costs().copy_to_device_rate)));
  CHECK(close(copy(pinned, device), us(kBytes, costs().copy_to_host_rate)));
  CHECK(close(copy(other, device), us(kBytes, costs().device_copy_rate)));
  CHECK(close(copy(device, pageable.data()), us(kBytes, costs().pageable_copy_rate)));
  CHECK(close(copy(memory.ptr, device), us(kBytes, costs().pageable_copy_rate))); // host-resident managed memory
  memory.prefetch(0, memory.pages, Location::device(0));
  CHECK(close(copy(memory.ptr, pinned), us(kBytes, costs().copy_to_device_rate)));
  CHECK_EQ(runtime.counters(0).bytes_copied_to_device, 3 * kBytes);
  CHECK_EQ(runtime.counters(0).bytes_copied_to_host, 2 * kBytes);
  runtime.free_device(device);
  runtime.free_device(other);
  runtime.free_pinned(pinned);
}

TEST(a_copy_into_fresh_managed_memory_populates_it_on_the_device) {
  EmulatedRuntime runtime(large());
  Managed memory(runtime, 16);
  void* pinned = runtime.allocate_pinned(MiB);
  runtime.copy_async(memory.ptr, pinned, MiB, stream0());
  CHECK_EQ(memory.where(), "device 0 16");
  CHECK_EQ(runtime.counters().faults_on_device, 0U);
  runtime.synchronize_device(0);
  runtime.free_pinned(pinned);
}

TEST(streams_overlap_but_share_the_link) {
  EmulatedRuntime runtime(large());
  constexpr std::size_t kBytes = 32 * MiB;
  const Stream side = runtime.create_stream(0, 0);
  void* pinned = runtime.allocate_pinned(2 * kBytes);
  void* device = runtime.allocate_device(2 * kBytes, 0);
  const double one_way = us(kBytes, costs().copy_to_device_rate);
  const auto second = [&] { return static_cast<char*>(device) + kBytes; };
  double begin = runtime.time_us();
  runtime.copy_async(device, pinned, kBytes, stream0());
  runtime.copy_async(pinned, second(), kBytes, side); // opposite directions overlap, and share the rate of both
  runtime.synchronize_device(0);
  CHECK(runtime.time_us() - begin < 1.2 * one_way);
  CHECK(runtime.time_us() - begin > us(2 * kBytes, costs().copy_both_ways_rate));
  begin = runtime.time_us();
  runtime.copy_async(device, pinned, kBytes, stream0());
  runtime.copy_async(second(), pinned, kBytes, side); // copies in the same direction are serialised
  runtime.synchronize_device(0);
  CHECK(runtime.time_us() - begin > 1.9 * one_way);
  runtime.free_device(device);
  runtime.free_pinned(pinned);
  runtime.destroy_stream(side);
}

TEST(a_wait_advances_the_waiting_streams_clock) {
  EmulatedRuntime runtime(large());
  const Stream side = runtime.create_stream(0, 0);
  const Event event = runtime.create_event(0, false);
  Managed memory(runtime, 1024);
  memory.use(0, 1024, 0, true);
  runtime.record_event(event, stream0());
  CHECK(runtime.stream_time_us(side) < runtime.stream_time_us(stream0()));
  runtime.wait_event(side, event);
  CHECK_EQ(runtime.stream_time_us(side), runtime.stream_time_us(stream0()));
  runtime.destroy_event(event);
  runtime.destroy_stream(side);
}

TEST(write_backs_delay_every_launch_of_the_device) {
  EmulatedRuntime runtime(devices(2)); // 16 pages on each device
  const Stream side = runtime.create_stream(0, 0);
  Managed memory(runtime, 32);
  memory.use(0, 16, 0, true);
  runtime.synchronize_device(0);
  const double before = runtime.time_us();
  memory.prefetch(16, 16, Location::device(0)); // writes 16 pages back
  const double written_back = us(16 * kPage, costs().prefetch_to_host_rate);
  runtime.begin_kernel(side, {});
  CHECK(close(runtime.stream_time_us(side),
              before + costs().call_us + written_back + costs().launch_us + costs().prefetch_us));
  runtime.begin_kernel(Stream::default_of(1), {}); // another device is not delayed
  CHECK(runtime.stream_time_us(Stream::default_of(1)) < before + written_back);
  runtime.destroy_stream(side);
}

TEST(a_prefetch_to_the_host_blocks_the_caller) {
  EmulatedRuntime runtime(large());
  Managed memory(runtime, 1024);
  memory.prefetch(0, 1024, Location::device(0));
  memory.prefetch(0, 1024, Location::host());
  const double stopped = runtime.stream_time_us(stream0());
  CHECK(stopped > us(1024 * kPage, costs().prefetch_to_host_rate));
  const double before = runtime.time_us();
  memory.use_on_host(0, 1, true);
  CHECK(runtime.time_us() > before); // the host's clock has advanced as far
}

TEST(evictions_cost_their_write_back) {
  EmulatedRuntime runtime(devices(1)); // 16 pages
  Managed memory(runtime, 32);
  memory.use(0, 16, 0, true);
  const double time = cost(runtime, stream0(), [&] { memory.prefetch(16, 16, Location::device(0)); });
  const double expected = costs().call_us + costs().prefetch_us + us(16 * kPage, costs().prefetch_to_host_rate) +
                          us(16 * kPage, costs().prefetch_populate_rate);
  CHECK(close(time, expected));
}

TEST(host_touches_advance_the_hosts_clock) {
  EmulatedRuntime runtime(large());
  Managed memory(runtime, 1024);
  memory.prefetch(0, 1024, Location::device(0));
  runtime.synchronize_device(0);
  const double before = runtime.time_us();
  memory.use_on_host(0, 1024, false);
  CHECK(close(runtime.time_us() - before,
              us(1024 * kPage, costs().fault_to_host_rate) + us(1024 * kPage, costs().host_memory_rate)));
}

TEST(the_same_program_always_takes_the_same_time) {
  const auto program = [] {
    EmulatedRuntime runtime(devices(2));
    const Stream side = runtime.create_stream(0, 0);
    const Event event = runtime.create_event(0, false);
    Managed memory(runtime, 40);
    void* pinned = runtime.allocate_pinned(MiB);
    for (std::size_t round = 0; round < 50; ++round) {
      memory.prefetch(round % 24, 16, Location::device(0));
      runtime.copy_async(memory.at(round % 16), pinned, MiB, side); // performed by a worker, at its own pace
      runtime.record_event(event, side);
      memory.use(round % 8, 20, 0, true);
      runtime.wait_event(stream0(), event);
      memory.use(round % 30, 10, 1, round % 2 == 0);
      memory.use_on_host(round % 40, 1, true);
    }
    runtime.synchronize_device(0);
    runtime.free_pinned(pinned);
    const EmulatedCounters counters = runtime.counters();
    return std::vector<double>{
        runtime.time_us(), runtime.stream_time_us(side), static_cast<double>(counters.faults_on_device),
        static_cast<double>(counters.evicted_pages), static_cast<double>(counters.bytes_to_host)};
  };
  const auto first = program();
  for (int again = 0; again < 10; ++again) {
    CHECK(program() == first);
  }
  CHECK(first[0] > 0);
}

TEST(profiles_are_found_by_name) {
  CHECK_EQ(CostProfile::names().size(), 3U);
  CHECK_EQ(CostProfile::named(CostProfile::names()[0]).name, "h200");
  try {
    CostProfile::named("h20");
    CHECK(false);
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("'h20'") != std::string::npos);
    CHECK(std::string(error.what()).find("'h200'") != std::string::npos);
  }
}

// --- the timeline -----------------------------------------------------------------------------------------

TEST(a_timeline_is_bounded_and_preserves_its_maxima) {
  emulated::Timeline timeline;
  constexpr std::size_t kSamples = 100'000;
  for (std::size_t i = 0; i < kSamples; ++i) {
    timeline.add({static_cast<double>(i), i == 54'321 ? std::size_t{999} : i % 7, i == 7 ? std::size_t{5} : 0, 1});
  }
  const auto& points = timeline.points();
  CHECK(points.size() <= emulated::Timeline::kMaxPoints);
  CHECK(points.size() >= emulated::Timeline::kMaxPoints / 2);
  std::size_t most = 0, most_plain = 0;
  double last = -1;
  for (const ResidencySample& point : points) {
    CHECK(point.time_us > last);
    last = point.time_us;
    most = std::max(most, point.device_bytes);
    most_plain = std::max(most_plain, point.plain_bytes);
  }
  CHECK_EQ(most, 999U);
  CHECK_EQ(most_plain, 5U);
  CHECK_EQ(points.front().time_us, 0.0);
}

TEST(a_runtimes_timeline_shows_residency_rise_and_fall) {
  EmulatedRuntime runtime(devices(1));
  {
    Managed memory(runtime, 8);
    memory.use(0, 8, 0, true);
    void* plain = runtime.allocate_device(64 * KiB, 0);
    runtime.free_device(plain);
  }
  const auto points = runtime.timeline(0);
  CHECK(points.size() >= 4);
  CHECK_EQ(points.front().managed_bytes, 8 * kPage);
  CHECK_EQ(points.front().device_bytes, 0U);
  CHECK_EQ(points[1].device_bytes, 8 * kPage);
  CHECK_EQ(points[2].plain_bytes, 64 * KiB);
  CHECK_EQ(points.back().device_bytes, 0U);
  CHECK_EQ(points.back().managed_bytes, 0U);
  runtime.reset_counters();
  CHECK(runtime.timeline(0).empty());
}

TEST(a_kernel_shows_on_the_timeline_of_the_device_it_takes_pages_from) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 8);
  memory.use(0, 8, 0, true);
  CHECK_EQ(runtime.timeline(0).back().device_bytes, 8 * kPage);
  memory.use(0, 6, 1, true);
  CHECK_EQ(runtime.timeline(1).back().device_bytes, 6 * kPage);
  CHECK_EQ(runtime.timeline(0).back().device_bytes, 2 * kPage);
}

TEST(counters_add_up_and_can_be_reset) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 20);
  memory.use(0, 20, 0, true);
  memory.use(0, 20, 1, true);
  memory.use_on_host(0, 20, true);
  const EmulatedCounters all = runtime.counters();
  CHECK_EQ(all.faults_on_device, runtime.counters(0).faults_on_device + runtime.counters(1).faults_on_device);
  CHECK_EQ(all.kernels, 2U);
  CHECK_EQ(all.allocate_calls, 1U);
  CHECK_EQ(runtime.peak_resident_bytes(1), kDeviceBytes);
  runtime.reset_counters();
  CHECK_EQ(runtime.counters().faults_on_device + runtime.counters().kernels, 0U);
  CHECK_EQ(runtime.peak_resident_bytes(1), 0U);
}

HARNESS_MAIN()
