// Address ranges of the emulated runtime: memory that comes and goes behind an address.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <vector>

#include "child_signal.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/emulated/cost_profile.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/error.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;

namespace {

constexpr std::size_t kPiece = 2 * MiB;
constexpr std::size_t kDeviceBytes = 16 * MiB;

EmulatedConfig small(int devices = 1, std::optional<std::uint64_t> seed = std::nullopt) {
  EmulatedConfig config;
  config.devices = devices;
  config.memory = kDeviceBytes;
  config.schedule_seed = seed;
  return config;
}

char* bytes_of(void* range) {
  return static_cast<char*>(range);
}

bool all_are(const void* ptr, std::size_t bytes, char value) {
  const auto* const begin = static_cast<const char*>(ptr);
  return std::all_of(begin, begin + bytes, [value](char byte) { return byte == value; });
}

} // namespace

TEST(a_piece_keeps_its_bytes_from_one_range_to_the_next) {
  EmulatedRuntime runtime(small());
  AddressRanges& ranges = *runtime.address_ranges();
  void* const first = ranges.reserve(kPiece, 0);
  void* const second = ranges.reserve(kPiece, 0);
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(first) % ranges.granularity(0), 0U);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  ranges.map(first, piece, 0);
  std::memset(first, 7, kPiece);
  ranges.map(second, piece, 0); // before the first mapping goes
  CHECK(all_are(second, kPiece, 7));
  bytes_of(second)[1] = 8;
  CHECK_EQ(int{bytes_of(first)[1]}, 8);
  ranges.unmap(first, piece);
  CHECK(all_are(bytes_of(second) + 2, kPiece - 2, 7));
  ranges.unmap(second, piece);
  ranges.map(first, piece, 0);
  CHECK_EQ(int{bytes_of(first)[1]}, 8);
  ranges.unmap(first, piece);
  ranges.free_piece(piece);
  ranges.release(first, kPiece);
  ranges.release(second, kPiece);
  CHECK_EQ(runtime.live_objects(), 0U);
}

TEST(an_address_stays_while_its_memory_changes) {
  EmulatedRuntime runtime(small());
  AddressRanges& ranges = *runtime.address_ranges();
  void* const range = ranges.reserve(2 * kPiece, 0);
  std::vector<char> host(2 * kPiece);
  const Stream stream = Stream::default_of(0);
  for (char round = 1; round < 5; ++round) {
    const Piece piece = ranges.allocate_piece(2 * kPiece, 0);
    ranges.map(range, piece, 0);
    std::memset(host.data(), round, host.size());
    runtime.copy_async(range, host.data(), host.size(), stream);
    runtime.zero_async(range, kPiece, stream);
    runtime.synchronize_stream(stream);
    CHECK(all_are(range, kPiece, 0) && all_are(bytes_of(range) + kPiece, kPiece, round));
    ranges.unmap(range, piece);
    ranges.free_piece(piece);
  }
  ranges.release(range, 2 * kPiece);
  CHECK_EQ(runtime.counters(0).map_calls, 4U);
  CHECK_EQ(runtime.counters(0).unmap_calls, 4U);
}

TEST(an_access_without_memory_faults) {
  EmulatedRuntime runtime(small());
  AddressRanges& ranges = *runtime.address_ranges();
  void* const range = ranges.reserve(kPiece, 0);
  const auto write = [&] { *static_cast<volatile char*>(range) = 1; };
  const auto read = [&] { static_cast<void>(*static_cast<volatile char*>(range)); };
  CHECK_EQ(signal_of(write), SIGSEGV);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  ranges.map(range, piece, 0);
  write();
  ranges.unmap(range, piece);
  CHECK_EQ(signal_of(read), SIGSEGV);
  CHECK_THROWS(InvalidArgument, runtime.zero_async(range, 1, Stream::default_of(0)));
}

TEST(a_child_does_not_inherit_a_piece) {
  EmulatedRuntime runtime(small());
  AddressRanges& ranges = *runtime.address_ranges();
  void* const range = ranges.reserve(kPiece, 0);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  ranges.map(range, piece, 0);
  std::memset(range, 7, kPiece);
  CHECK_EQ(signal_of([&] { *static_cast<volatile char*>(range) = 1; }), SIGSEGV);
  CHECK(all_are(range, kPiece, 7));
}

TEST(a_piece_of_the_host_is_pinned_memory_at_two_addresses) {
  EmulatedRuntime runtime(small(2));
  AddressRanges& ranges = *runtime.address_ranges();
  const CostProfile& costs = CostProfile::named("h200");
  void* const own = ranges.reserve(kPiece, -1);
  void* const range = ranges.reserve(kPiece, 1);
  const Piece piece = ranges.allocate_piece(kPiece, -1);
  CHECK_EQ(runtime.memory_info(1).free, kDeviceBytes);
  ranges.map(own, piece, -1);
  CHECK(runtime.is_pinned_ptr(own) && !runtime.device_of(own) && !runtime.is_pinned_ptr(range));
  const double begin = runtime.time_us();
  ranges.map(range, piece, 1);
  const double mapped = runtime.time_us();
  CHECK(std::abs(mapped - begin - costs.map_us - kPiece / costs.map_host_rate * 1e6) < 1e-6);
  CHECK(runtime.is_pinned_ptr(range) && *runtime.device_of(range) == 1);
  std::memset(own, 7, kPiece);
  const Stream stream = Stream::default_of(1);
  runtime.begin_kernel(stream, std::vector<Touch>{{range, kPiece, true}});
  CHECK(all_are(range, kPiece, 7));
  runtime.end_kernel(stream, {});
  CHECK_EQ(runtime.counters(1).bytes_in_place, kPiece);
  const Piece devices = ranges.allocate_piece(kPiece, 1);
  void* const target = ranges.reserve(kPiece, 1);
  ranges.map(target, devices, 1);
  runtime.copy_async(target, own, kPiece, stream);
  runtime.copy_async(range, target, kPiece, stream);
  runtime.synchronize_stream(stream);
  CHECK_EQ(runtime.counters(1).bytes_copied_to_device, kPiece);
  CHECK_EQ(runtime.counters(1).bytes_copied_to_host, kPiece);
  ranges.unmap(target, devices);
  const double before = runtime.time_us();
  ranges.unmap(range, piece);
  CHECK(std::abs(runtime.time_us() - before - costs.unmap_us - kPiece / costs.unmap_host_rate * 1e6) < 1e-6);
  CHECK(all_are(own, kPiece, 7));
  ranges.unmap(own, piece);
  ranges.free_piece(piece);
  ranges.free_piece(devices);
  ranges.release(own, kPiece);
  ranges.release(range, kPiece);
  ranges.release(target, kPiece);
  CHECK_EQ(runtime.live_objects(), 0U);
}

TEST(pieces_count_as_the_devices_memory_until_their_last_mapping_ends) {
  EmulatedRuntime runtime(small(2));
  AddressRanges& ranges = *runtime.address_ranges();
  void* const range = ranges.reserve(64 * kPiece, 0); // addresses take no memory
  CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
  CHECK_THROWS(OutOfMemory, ranges.allocate_piece(64 * kPiece, 0));
  void* const other = ranges.reserve(kDeviceBytes, 0);
  const Piece all = ranges.allocate_piece(kDeviceBytes, 0);
  CHECK_EQ(runtime.memory_info(0).free, 0U);
  CHECK_EQ(runtime.memory_info(1).free, kDeviceBytes);
  CHECK_THROWS(OutOfMemory, ranges.allocate_piece(kPiece, 0));
  ranges.map(other, all, 0);
  CHECK_EQ(*runtime.device_of(bytes_of(other) + kDeviceBytes - 1), 0);
  ranges.free_piece(all);
  CHECK_EQ(runtime.memory_info(0).free, 0U);
  ranges.unmap(other, all);
  CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
  const Piece again = ranges.allocate_piece(kDeviceBytes, 0);
  ranges.map(other, again, 0);
  CHECK(all_are(other, kPiece, 0)); // another piece, not the bytes of the freed one
  ranges.unmap(other, again);
  ranges.free_piece(again);
  ranges.release(other, kDeviceBytes);
  ranges.release(range, 64 * kPiece);
  CHECK_EQ(runtime.live_objects(), 0U);
}

TEST(unmapping_under_queued_work_is_refused) {
  for (const bool reads : {false, true}) {
    EmulatedRuntime runtime(small());
    AddressRanges& ranges = *runtime.address_ranges();
    void* const range = ranges.reserve(kPiece, 0);
    const Piece piece = ranges.allocate_piece(kPiece, 0);
    ranges.map(range, piece, 0);
    std::vector<char> host(kPiece);
    const Stream stream = runtime.create_stream(0, 0);
    runtime.hold_device(0);
    runtime.copy_async(reads ? host.data() : range, reads ? range : host.data(), kPiece, stream);
    CHECK_THROWS(InvalidArgument, ranges.unmap(range, piece));
    runtime.release_device(0);
    runtime.synchronize_stream(stream);
    ranges.unmap(range, piece);
  }
}

TEST(bad_calls_are_refused_and_change_nothing) {
  EmulatedRuntime runtime(small(2));
  AddressRanges& ranges = *runtime.address_ranges();
  const auto bad = [&](auto call) { CHECK_THROWS(InvalidArgument, call()); };
  bad([&] { static_cast<void>(ranges.granularity(2)); });
  bad([&] { ranges.reserve(0, 0); });
  bad([&] { ranges.reserve(kPiece + 1, 0); });
  bad([&] { ranges.reserve(kPiece, 2); });
  bad([&] { ranges.allocate_piece(kPiece - 1, 0); });
  bad([&] { ranges.allocate_piece(kPiece, -2); });
  void* const range = ranges.reserve(kPiece, 0);
  void* const larger = ranges.reserve(2 * kPiece, 0);
  void* const elsewhere = ranges.reserve(kPiece, 1);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  const Piece spare = ranges.allocate_piece(kPiece, 0);
  bad([&] { ranges.map(larger, piece, 0); });
  bad([&] { ranges.map(elsewhere, piece, 0); });
  bad([&] { ranges.map(elsewhere, piece, 1); });
  bad([&] { ranges.map(range, piece, 1); });
  bad([&] { ranges.map(ranges.reserve(kPiece, -1), piece, -1); });
  bad([&] { ranges.map(&runtime, piece, 0); });
  bad([&] { ranges.map(range, Piece{}, 0); });
  bad([&] { ranges.unmap(range, piece); });
  ranges.map(range, piece, 0);
  bad([&] { ranges.map(range, spare, 0); });
  bad([&] { ranges.unmap(range, spare); });
  bad([&] { runtime.zero_async(range, kPiece + 1, Stream::default_of(0)); });
  ranges.release(range, kPiece); // it holds a piece: ignored
  bytes_of(range)[0] = 1;
  ranges.free_piece(piece);
  bad([&] { ranges.map(ranges.reserve(kPiece, 0), piece, 0); });
  CHECK_EQ(runtime.counters().map_calls, 1U);
}

TEST(each_call_fails_on_demand_and_changes_nothing) {
  EmulatedRuntime runtime(small());
  AddressRanges& ranges = *runtime.address_ranges();
  EmulatedFailures failures(runtime);
  failures.fail("reserve_range", 1);
  CHECK_THROWS(RuntimeFailure, ranges.reserve(kPiece, 0));
  failures.fail("allocate_piece", 1);
  CHECK_THROWS(OutOfMemory, ranges.allocate_piece(kPiece, 0));
  CHECK_EQ(runtime.live_objects(), 0U);
  CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
  void* const range = ranges.reserve(kPiece, 0);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  failures.fail("map", 1);
  CHECK_THROWS(RuntimeFailure, ranges.map(range, piece, 0));
  ranges.map(range, piece, 0);
  bytes_of(range)[0] = 5;
  failures.fail("unmap", 1);
  CHECK_THROWS(RuntimeFailure, ranges.unmap(range, piece));
  CHECK_EQ(int{bytes_of(range)[0]}, 5);
  ranges.unmap(range, piece);
}

TEST(calls_cost_the_hosts_time_and_no_streams) {
  EmulatedRuntime runtime(small());
  AddressRanges& ranges = *runtime.address_ranges();
  const CostProfile& costs = CostProfile::named("h200");
  void* const range = ranges.reserve(kPiece, 0);
  const double begin = runtime.time_us();
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  ranges.map(range, piece, 0);
  ranges.unmap(range, piece);
  const double cost = runtime.time_us() - begin;
  CHECK(std::abs(cost - costs.allocate_piece_us - costs.map_us - costs.unmap_us) < 1e-6);
  CHECK_EQ(runtime.stream_time_us(Stream::default_of(0)), 0.0);
}

HARNESS_MAIN()
