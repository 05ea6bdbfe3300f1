// Failing calls of the emulated runtime: bad arguments, configurations out of range, injected failures.
#include <cstring>
#include <string>

#include "doubles/failing_calls.h"
#include "emulated_helpers.h"
#include "harness.h"
#include "runtime/error.h"

using namespace torch_uvm;
using namespace emulated_helpers;

TEST(bad_arguments_are_refused_and_change_nothing) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 2);
  const Stream stream = Stream::default_of(0);
  const auto bad = [&](auto call) { CHECK_THROWS(InvalidArgument, call()); };
  bad([&] { runtime.prefetch(memory.ptr, 2 * kPage + 1, Location::device(0), stream); });
  bad([&] { runtime.prefetch(memory.ptr, 0, Location::device(0), stream); });
  bad([&] { runtime.prefetch(memory.ptr, kPage, Location::device(2), stream); });
  bad([&] { runtime.prefetch(memory.ptr, kPage, Location::device(0), Stream::host()); });
  bad([&] { runtime.prefetch(memory.ptr, kPage, Location::device(0), Stream::default_of(2)); });
  bad([&] { runtime.prefetch(&runtime, kPage, Location::device(0), stream); });
  bad([&] { runtime.prefetch(nullptr, kPage, Location::device(0), stream); });
  bad([&] { runtime.advise(memory.ptr, 3 * kPage, Advice::kSetReadMostly, Location::host()); });
  bad([&] { runtime.advise(memory.ptr, kPage, Advice::kSetAccessedBy, Location::device(7)); });
  bad([&] { runtime.advise(memory.ptr, kPage, Advice::kSetPreferredLocation, Location{-2}); });
  bad([&] { runtime.discard(memory.ptr, 3 * kPage, stream); });
  bad([&] { runtime.discard(memory.ptr, kPage, Stream{1, memory.ptr}); });
  bad([&] { static_cast<void>(runtime.range_attributes(memory.ptr, ~std::size_t{0})); });
  bad([&] { static_cast<void>(runtime.residency(memory.ptr, 3 * kPage)); });
  bad([&] { runtime.allocate_managed(0, Location::host()); });
  bad([&] { runtime.allocate_managed(1, Location::device(2)); });
  bad([&] { runtime.allocate_managed(1, Location{-2}); });
  bad([&] { runtime.allocate_device(0, 0); });
  bad([&] { runtime.allocate_device(1, 2); });
  bad([&] { runtime.allocate_device(1, -1); });
  bad([&] { runtime.allocate_pinned(0); });
  bad([&] { runtime.copy_async(memory.ptr, nullptr, 1, stream); });
  bad([&] { runtime.copy_async(memory.ptr, &runtime, 3 * kPage, stream); });
  bad([&] { runtime.begin_kernel(Stream::host(), {}); });
  bad([&] { static_cast<void>(runtime.device_properties(2)); });
  bad([&] { static_cast<void>(runtime.memory_info(-1)); });
  bad([&] { static_cast<void>(runtime.timeline(2)); });
  bad([&] { static_cast<void>(runtime.counters(2)); });
  CHECK_EQ(memory.where(), "untouched 2");
  CHECK_EQ(runtime.counters().prefetch_calls + runtime.counters().advise_calls + runtime.counters().copy_calls, 0U);
  runtime.free_device(memory.ptr); // memory of another kind: ignored
  runtime.free_pinned(memory.ptr);
  CHECK_EQ(memory.where(), "untouched 2");
}

TEST(a_message_names_the_value_and_what_exists) {
  EmulatedRuntime runtime(devices(2));
  try {
    static_cast<void>(runtime.memory_info(5));
    CHECK(false);
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    CHECK(text.find("device 5") != std::string::npos);
    CHECK(text.find("2 emulated devices") != std::string::npos);
  }
}

TEST(configurations_out_of_range_are_refused) {
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.devices = 0}));
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.devices = 65}));
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.memory = MiB - 1}));
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.profile = "h100"}));
  EmulatedRuntime most(EmulatedConfig{.devices = 64, .memory = MiB});
  CHECK_EQ(most.device_count(), 64);
  Managed memory(most, 1);
  memory.use(0, 1, 63, true);
  CHECK_EQ(memory.where(), "device 63 1");
  CHECK_EQ(most.device_properties(63).name, "Emulated h200");
  CHECK_EQ(most.device_properties(63).total_memory, MiB);
  CHECK_EQ(most.device_properties(63).page_bytes, kPage);
}

TEST(a_call_that_is_made_to_fail_changes_nothing_but_a_wait_has_waited) {
  EmulatedRuntime runtime(devices(1, 1));
  EmulatedFailures failures(runtime);
  const Managed memory(runtime, 2);
  const Stream stream = runtime.create_stream(0, 0);
  const std::size_t objects = runtime.live_objects();
  std::memset(memory.at(0), 1, kPage);
  failures.fail("copy_async", 2);
  runtime.copy_async(memory.at(1), memory.at(0), kPage, stream);
  CHECK_EQ(failures.clear(), std::size_t{1});
  failures.fail("*", 1);
  CHECK_THROWS(RuntimeFailure, runtime.synchronize_stream(stream));
  CHECK_EQ(static_cast<const char*>(memory.at(1))[kPage - 1], 1);
  CHECK_EQ(failures.clear(), std::size_t{0});
  for (const char* const name : {"allocate_managed", "allocate_pinned", "allocate_device"}) {
    failures.fail(name, 1);
  }
  CHECK_THROWS(OutOfMemory, runtime.allocate_managed(kPage, Location::host()));
  CHECK_THROWS(OutOfMemory, runtime.allocate_pinned(kPage));
  CHECK_THROWS(OutOfMemory, runtime.allocate_device(kPage, 0));
  CHECK_EQ(runtime.live_objects(), objects);
  CHECK_THROWS(InvalidArgument, failures.fail("free_managed", 1));
}

HARNESS_MAIN()
