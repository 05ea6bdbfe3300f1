// CudaRuntime over the fake CUDA runtime (tests/fake_cuda): the allocator's contract, the limit, failures, captures,
// forks and the exit.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "allocator_contract.h"
#include "cuda/cuda_runtime.h"
#include "cuda/pinned_memory.h"
#include "failing_new.h"
#include "fake_cuda.h"

using namespace contract;
using cuda::CudaRuntime;

namespace {

constexpr std::size_t kMemory = 256 * MiB;

struct Machine {
  int devices = 2;
  bool concurrent = true, shared = false, pools = true;
};

std::unique_ptr<CudaRuntime> made(bool pool = false, Machine machine = {}) {
  fake_cuda_reset(machine.devices, kMemory, machine.concurrent, machine.shared, machine.pools);
  return std::make_unique<CudaRuntime>(pool);
}

/// Nothing was done that a GPU would punish, and nothing is left.
void all_is_well() {
  CHECK_EQ(std::string(fake_cuda_misuse()), std::string());
  for (const char* call :
       {"cudaMallocManaged", "cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cudaMallocFromPoolAsync"}) {
    CHECK_EQ(fake_cuda_live(call), std::size_t{0});
  }
}

void register_suite(const std::string& prefix, const MakeRig& make, bool hold) {
  for (const ContractCase& test : contract_cases()) {
    harness::Registrar(prefix + "_" + test.name, [test, make, hold] {
      test.run([&] {
        Rig rig = make();
        fake_cuda_hold(hold);
        return rig;
      });
      all_is_well();
    });
  }
}

const bool registered = [] {
  register_suite("cuda_managed", [] { return Rig(made(), true); }, false);
  register_suite("cuda_held", [] { return Rig(made(), true); }, true);
  register_suite("cuda_device", [] { return Rig(made(), false); }, false);
  register_suite("cuda_pool", [] { return Rig(made(true), true); }, false);
  register_suite("cuda_held_pool", [] { return Rig(made(true), true); }, true);
  return true;
}();

std::string what(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void contains(const std::string& text, const std::string& part) {
  if (text.find(part) == text.npos) {
    harness::fail(__FILE__, __LINE__, "\"" + part + "\" is not in: " + text);
  }
}

/// A capture of a stream in global mode, as torch begins them.
struct Capture {
  cudaStream_t stream = nullptr;
  bool over = false;
  Capture() {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  }
  ~Capture() {
    end();
    cudaStreamDestroy(stream);
  }
  bool end() {
    cudaGraph_t graph = nullptr;
    return !std::exchange(over, true) && cudaStreamEndCapture(stream, &graph) == cudaSuccess &&
           cudaGraphDestroy(graph) == cudaSuccess;
  }
};

} // namespace

TEST(the_suites_are_registered) {
  CHECK(registered);
  CHECK(harness::cases().size() > 5 * contract_cases().size());
}

// --- the limit ----------------------------------------------------------------------------------------------

TEST(the_limit_holds_for_both_sources_of_segments) {
  for (const bool pool : {false, true}) {
    const auto runtime = made(pool);
    const char* const call = pool ? "cudaMallocFromPoolAsync" : "cudaMallocManaged";
    runtime->set_limit(4 * MiB);
    void* const first = runtime->allocate_managed(3 * MiB, kDevice);
    CHECK_THROWS(OutOfMemory, runtime->allocate_managed(MiB + 1, kDevice));
    CHECK_EQ(fake_cuda_count(call), std::size_t{1}); // the driver was not asked
    void* const second = runtime->allocate_managed(MiB, Location::host());
    CHECK_EQ(fake_cuda_live_bytes(call), 4 * MiB);
    CHECK_THROWS(OutOfMemory, runtime->allocate_managed(1, Location::device(1)));
    runtime->free_managed(first);
    runtime->free_managed(second);
    CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
    all_is_well();
  }
}

TEST(the_hosts_memory_bounds_both) {
  for (const bool pool : {false, true}) {
    const auto runtime = made(pool);
    try {
      runtime->allocate_managed(runtime->host_memory_available() + 64 * GiB, kDevice);
      harness::fail(__FILE__, __LINE__, "more than the host has was given");
    } catch (const OutOfMemory& error) {
      CHECK(error.cause == OutOfMemory::Cause::kHost);
    }
    CHECK_EQ(fake_cuda_count("cudaMallocManaged") + fake_cuda_count("cudaMallocFromPoolAsync"), std::size_t{0});
  }
}

TEST(a_pool_is_as_large_as_the_limit_and_follows_it) {
  const auto runtime = made(true);
  runtime->set_limit(8 * MiB);
  void* const first = runtime->allocate_managed(6 * MiB, kDevice);
  CHECK_EQ(fake_cuda_count("cudaMemPoolCreate"), std::size_t{1});
  runtime->set_limit(16 * MiB);
  void* const second = runtime->allocate_managed(8 * MiB, Location::host());
  CHECK_EQ(fake_cuda_count("cudaMemPoolCreate"), std::size_t{2}); // of 16 - 6
  CHECK_THROWS(OutOfMemory, runtime->allocate_managed(4 * MiB, kDevice)); // 14 of 16 are in use
  runtime->free_managed(first);
  CHECK_EQ(fake_cuda_count("cudaMemPoolDestroy"), std::size_t{1});
  void* const rest = runtime->allocate_managed(8 * MiB, kDevice); // not in the pool of 10 that 8 are taken of
  CHECK_EQ(fake_cuda_count("cudaMemPoolCreate"), std::size_t{3});
  CHECK_EQ(runtime->managed_bytes(), 16 * MiB);
  runtime->free_managed(rest);
  runtime->set_limit(std::nullopt);
  void* const third = runtime->allocate_managed(32 * MiB, kDevice);
  runtime->free_managed(second);
  runtime->free_managed(third);
  all_is_well();
}

TEST(a_pool_keeps_nothing_and_the_driver_bounds_it_by_itself) {
  const auto runtime = made(true);
  runtime->set_limit(8 * MiB);
  void* const ptr = runtime->allocate_managed(6 * MiB, kDevice);
  cudaMemPool_t pool = nullptr;
  CHECK(fake_cuda_pool_of(ptr, &pool) == cudaSuccess);
  const auto reserved = [&] {
    std::uint64_t bytes = 0;
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes) == cudaSuccess);
    return bytes;
  };
  CHECK_EQ(reserved(), 6 * MiB);
  void* past = nullptr; // past our own check
  CHECK(cudaMallocFromPoolAsync(&past, 3 * MiB, pool, nullptr) == cudaErrorMemoryAllocation);
  cudaGetLastError();
  runtime->free_managed(ptr);
  CHECK_EQ(reserved(), std::uint64_t{0});
  all_is_well();
}

TEST(what_is_cached_of_a_pool_is_given_back_beyond_the_release_threshold) {
  for (const bool from_pool : {false, true}) {
    AllocatorOptions options = apart();
    options.release_threshold = 20 * MiB;
    Rig rig(made(from_pool), true, options);
    std::vector<Block*> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(rig.allocate(12 * MiB));
    }
    CHECK_EQ(rig.runtime->managed_bytes(), 48 * MiB);
    cudaMemPool_t pool = nullptr;
    CHECK(!from_pool || fake_cuda_pool_of(rig.allocator->data(blocks[0]), &pool) == cudaSuccess);
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
    CHECK_EQ(rig.runtime->managed_bytes(), 12 * MiB);
    if (from_pool) {
      std::uint64_t bytes = 0; // the driver's own cache is empty
      CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes) == cudaSuccess);
      CHECK_EQ(bytes, 12 * MiB);
    }
    rig.check();
  }
  all_is_well();
}

TEST(pools_that_are_not_there_are_refused_by_name) {
  contains(what([] { made(true, {.pools = false}); }), "device 0 has no memory pools; cuda_segments:malloc");
  made(true);
  fake_cuda_fail("cudaMemPoolCreate", 1, cudaErrorNotSupported);
  CudaRuntime runtime(true);
  contains(what([&] { runtime.allocate_managed(1, kDevice); }), "the driver makes none; cuda_segments:malloc");
  CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
}

TEST(pool_memory_is_given_back_after_the_work_of_every_device) {
  const auto runtime = made(true);
  fake_cuda_hold(1);
  const Stream there = runtime->create_stream(1, 0);
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  runtime->prefetch(ptr, 4 * MiB, Location::device(1), there);
  CHECK(!runtime->query_stream(there));
  runtime->free_managed(ptr);
  CHECK(runtime->query_stream(there));
  runtime->destroy_stream(there);
  all_is_well();
}

// --- failures -----------------------------------------------------------------------------------------------

TEST(a_call_that_fails_changes_nothing_and_leaves_no_error_behind) {
  const auto runtime = made();
  fake_cuda_fail("cudaMallocManaged", 1, cudaErrorMemoryAllocation);
  try {
    runtime->allocate_managed(3 * MiB, kDevice);
    harness::fail(__FILE__, __LINE__, "it did not fail");
  } catch (const OutOfMemory& error) {
    CHECK(error.cause == OutOfMemory::Cause::kRuntime);
    contains(error.what(), "cudaMallocManaged of 3.00 MiB failed: out of memory");
  }
  CHECK(cudaPeekAtLastError() == cudaSuccess); // torch's next check would blame an innocent kernel
  CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
  fake_cuda_fail("cudaMallocManaged", 1, cudaErrorInvalidValue);
  contains(what([&] { runtime->allocate_managed(1, kDevice); }), "cudaErrorInvalidValue (invalid argument)");
  fake_cuda_fail("cudaHostAlloc", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS(OutOfMemory, runtime->allocate_pinned(1));
  CHECK_THROWS(OutOfMemory, runtime->allocate_device(kMemory + 1, 1));
  fake_cuda_fail("cudaMemPrefetchAsync", 1, cudaErrorInvalidValue);
  void* const ptr = runtime->allocate_managed(MiB, kDevice);
  CHECK_THROWS(RuntimeFailure, runtime->prefetch(ptr, MiB, kDevice, kStream));
  fake_cuda_hold(1);
  runtime->prefetch(ptr, MiB, kDevice, kStream);
  CHECK(!runtime->query_stream(kStream));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(what_does_not_exist_is_refused) {
  const auto runtime = made();
  CHECK_THROWS(InvalidArgument, runtime->allocate_managed(1, Location::device(2)));
  CHECK_THROWS(InvalidArgument, runtime->allocate_device(1, -1));
  CHECK_THROWS(InvalidArgument, runtime->create_stream(2, 0));
  CHECK_THROWS(InvalidArgument, runtime->create_event(-1, false));
  CHECK_THROWS(InvalidArgument, runtime->memory_info(2));
  int here = 0;
  CHECK_THROWS(InvalidArgument, runtime->prefetch(&here, 4, Location::device(0), Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime->copy_async(&here, &here, 4, Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime->zero_async(&here, 4, Stream::host()));
  fake_cuda_reset(0, kMemory, 1, 0, 1);
  CHECK_THROWS(RuntimeFailure, CudaRuntime());
}

// --- pinned memory ------------------------------------------------------------------------------------------

TEST(much_pinned_memory_is_registered_where_it_lies) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 64 * MiB;
  auto* const pinned = static_cast<char*>(runtime->allocate_pinned(kBytes));
  CHECK_EQ(fake_cuda_live_bytes("cudaHostRegister"), kBytes);
  CHECK_EQ(fake_cuda_count("cudaHostAlloc"), std::size_t{0});
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(pinned) % (2 * MiB), std::uintptr_t{0});
  std::vector<unsigned char> there(kBytes / 4096);
  CHECK_EQ(mincore(pinned, kBytes, there.data()), 0);
  CHECK(std::ranges::all_of(there, [](unsigned char page) { return (page & 1) != 0; })); // each was touched
  void* const plain = runtime->allocate_device(kBytes, 0);
  pinned[kBytes - 1] = 7;
  runtime->copy_async(plain, pinned, kBytes, kStream);
  fake_cuda_hold(1);
  runtime->zero_async(plain, 1, kStream);
  CHECK(!runtime->query_stream(kStream));
  runtime->free_pinned(pinned);
  CHECK(runtime->query_stream(kStream)); // what may have used it was waited for
  CHECK(mincore(pinned, kBytes, there.data()) != 0); // it is the system's again
  runtime->free_device(plain);
  all_is_well();
}

TEST(a_size_that_parts_do_not_tile_is_touched_to_its_end) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 50 * MiB + 4096;
  auto* const pinned = static_cast<char*>(runtime->allocate_pinned(kBytes));
  std::vector<unsigned char> there(kBytes / 4096);
  CHECK_EQ(mincore(pinned, kBytes, there.data()), 0);
  CHECK(std::ranges::all_of(there, [](unsigned char page) { return (page & 1) != 0; }));
  runtime->free_pinned(pinned);
  all_is_well();
}

TEST(where_nothing_can_be_registered_the_driver_makes_all_pinned_memory) {
  const auto runtime = made();
  fake_cuda_fail("cudaHostRegister", 1, cudaErrorNotSupported);
  void* const first = runtime->allocate_pinned(32 * MiB);
  void* const second = runtime->allocate_pinned(32 * MiB);
  CHECK_EQ(fake_cuda_count("cudaHostRegister"), std::size_t{1}); // not asked again
  CHECK_EQ(fake_cuda_live("cudaHostAlloc"), std::size_t{2});
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  runtime->free_pinned(first);
  runtime->free_pinned(second);
  all_is_well();
}

TEST(pinned_memory_that_the_host_has_not_is_refused) {
  const auto runtime = made();
  const std::size_t available = runtime->host_memory_available();
  CHECK_THROWS(OutOfMemory, runtime->allocate_pinned(available + available / 4 + 64 * MiB));
  CHECK_EQ(fake_cuda_count("cudaHostRegister"), std::size_t{0});
  fake_cuda_fail("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS(OutOfMemory, runtime->allocate_pinned(32 * MiB));
  void* const pinned = runtime->allocate_pinned(32 * MiB); // ... this time only
  CHECK_EQ(fake_cuda_live("cudaHostRegister"), std::size_t{1});
  runtime->free_pinned(pinned);
  all_is_well();
}

TEST(pinned_memory_is_touched_without_threads_that_the_host_has_no_memory_for) {
  constexpr std::size_t kBytes = 128 * MiB;
  int without_a_thread = 0;
  for (std::size_t nth = 1;; ++nth) {
    const auto runtime = made();
    cuda::PinnedMemory memory(2);
    failing_new::Countdown failing(nth);
    void* pinned = nullptr;
    try {
      failing([&] { pinned = memory.allocate(kBytes, kBytes); });
    } catch (const std::bad_alloc&) {
      if (fake_cuda_count("cudaHostRegister") != 0) {
        break; // within the fake
      }
      continue;
    }
    std::vector<unsigned char> there(kBytes / 4096);
    CHECK_EQ(mincore(pinned, kBytes, there.data()), 0);
    CHECK(std::ranges::all_of(there, [](unsigned char page) { return (page & 1) != 0; }));
    memory.free(pinned);
    all_is_well();
    if (!failing.has_failed()) {
      break;
    }
    ++without_a_thread;
  }
  CHECK(without_a_thread > 0 || std::thread::hardware_concurrency() == 1);
}

// --- devices ------------------------------------------------------------------------------------------------

TEST(memory_is_made_and_freed_on_its_device_and_no_context_is_made_elsewhere) {
  const auto runtime = made();
  CHECK(cudaSetDevice(1) == cudaSuccess);
  void* const managed = runtime->allocate_managed(MiB, Location::device(1));
  void* const hosts = runtime->allocate_managed(MiB, Location::host());
  void* const plain = runtime->allocate_device(MiB, 1);
  void* const pinned = runtime->allocate_pinned(MiB);
  const Stream stream = runtime->create_stream(1, 0);
  runtime->prefetch(managed, MiB, Location::device(1), stream);
  runtime->copy_async(plain, pinned, MiB, stream);
  static_cast<char*>(managed)[MiB - 1] = 1;
  runtime->zero_async(managed, MiB, stream);
  runtime->synchronize_device(1);
  CHECK_EQ(int{static_cast<char*>(managed)[MiB - 1]}, 0);
  CHECK_EQ(fake_cuda_has_context(0), 0);
  std::thread([&] { // its current device is 0
    runtime->free_managed(managed);
    runtime->free_managed(hosts);
    runtime->free_device(plain);
    runtime->free_pinned(pinned);
    runtime->destroy_stream(stream);
    int current = -1;
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK_EQ(current, 0);
  })
      .join();
  all_is_well();
}

TEST(calls_run_with_their_device_current_and_leave_the_callers) {
  const auto runtime = made();
  for (const int device : {0, 1}) {
    const Stream stream = runtime->create_stream(device, -100);
    const Event event = runtime->create_event(device, true);
    runtime->record_event(event, stream);
    runtime->wait_event(Stream::default_of(1 - device), event);
    CHECK(runtime->query_event(event));
    runtime->synchronize_event(event);
    CHECK(runtime->query_stream(Stream::default_of(device)));
    runtime->synchronize_stream(stream);
    const Event later = runtime->create_event(device, true);
    runtime->record_event(later, stream);
    CHECK(runtime->elapsed_ms(event, later) > 0);
    CHECK_EQ(runtime->memory_info(device).total, kMemory);
    runtime->destroy_event(event);
    runtime->destroy_event(later);
    runtime->destroy_stream(stream);
    int current = -1;
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK_EQ(current, 0);
  }
  CHECK_EQ(runtime->device_properties(1).page_bytes, 2 * MiB);
  all_is_well();
}

// --- hints --------------------------------------------------------------------------------------------------

TEST(a_device_that_nobody_uses_is_not_waited_for) {
  const auto runtime = made();
  runtime->synchronize_device(1);
  CHECK(fake_cuda_has_context(1) == 0);
  CHECK_EQ(fake_cuda_count("cudaDeviceSynchronize"), std::size_t{0});
  runtime->free_device(runtime->allocate_device(MiB, 1));
  runtime->synchronize_device(1);
  CHECK_EQ(fake_cuda_count("cudaDeviceSynchronize"), std::size_t{1});
  all_is_well();
}

TEST(range_attributes_tell_never_from_not_everywhere_alike) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 16 * MiB;
  auto* const ptr = static_cast<char*>(runtime->allocate_managed(kBytes, kDevice));
  const auto uniform = [&] { return runtime->range_attributes(ptr, kBytes).uniform; };
  CHECK(uniform()); // never
  const std::size_t asked = fake_cuda_count("cudaMemRangeGetAttributes");
  CHECK_EQ(asked, std::size_t{1});
  runtime->prefetch(ptr + 4 * MiB, 2 * MiB, Location::device(1), kStream); // in the middle
  CHECK(!uniform());
  CHECK(!runtime->range_attributes(ptr, kBytes).last_prefetch);
  CHECK(runtime->range_attributes(ptr, 4 * MiB).uniform);
  CHECK_EQ(runtime->range_attributes(ptr + 4 * MiB, 2 * MiB).last_prefetch->index, 1);
  runtime->prefetch(ptr, kBytes, Location::host(), kStream);
  CHECK(uniform());
  CHECK(runtime->range_attributes(ptr, kBytes).last_prefetch->is_host());
  runtime->advise(ptr, 2 * MiB, Advice::kSetReadMostly, kDevice);
  CHECK(!uniform());
  runtime->advise(ptr, kBytes, Advice::kSetReadMostly, kDevice);
  CHECK(uniform());
  CHECK(runtime->range_attributes(ptr, kBytes).read_mostly);
  runtime->advise(ptr, kBytes, Advice::kSetPreferredLocation, Location::host());
  runtime->advise(ptr, kBytes, Advice::kSetAccessedBy, Location::device(1));
  runtime->advise(ptr, kBytes, Advice::kSetAccessedBy, kDevice);
  const RangeAttributes all = runtime->range_attributes(ptr, kBytes);
  CHECK(all.uniform && all.preferred_location->is_host());
  CHECK(all.accessed_by == (std::vector{Location::device(0), Location::device(1)}));
  runtime->advise(ptr + kBytes - 2 * MiB, 2 * MiB, Advice::kUnsetAccessedBy, kDevice);
  CHECK(!uniform());
  runtime->advise(ptr, kBytes, Advice::kUnsetAccessedBy, kDevice);
  runtime->advise(ptr, kBytes, Advice::kUnsetReadMostly, kDevice);
  runtime->advise(ptr, kBytes, Advice::kUnsetPreferredLocation, kDevice);
  CHECK(uniform());
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(a_discard_brings_the_pages_to_whom_writes_next) {
  for (const bool pool : {false, true}) {
    const auto runtime = made(pool);
    constexpr std::size_t kBytes = 8 * MiB;
    auto* const ptr = static_cast<char*>(runtime->allocate_managed(kBytes, kDevice));
    const Stream side = runtime->create_stream(0, 0);
    for (const Stream stream : {kStream, side}) { // CUDA takes the one only by way of another
      runtime->discard_before(Location::host(), ptr, 4 * MiB, stream);
      CHECK(runtime->range_attributes(ptr, 4 * MiB).last_prefetch->is_host());
      CHECK(!runtime->range_attributes(ptr, kBytes).uniform);
      runtime->discard(ptr, kBytes, stream);
      CHECK_EQ(runtime->range_attributes(ptr, kBytes).last_prefetch->index, 0);
    }
    runtime->discard_before(Location::device(1), ptr, kBytes, side);
    CHECK_EQ(runtime->range_attributes(ptr, kBytes).last_prefetch->index, 1);
    CHECK_EQ(fake_cuda_count("cudaMemDiscardAndPrefetchBatchAsync"), std::size_t{5});
    CHECK_EQ(fake_cuda_count("cudaMemDiscardBatchAsync"), std::size_t{0}); // it forgets what is written later
    CHECK_THROWS(InvalidArgument, runtime->discard_before(Location::device(2), ptr, kBytes, side));
    CHECK_THROWS(InvalidArgument, runtime->discard(ptr, kBytes, Stream::host()));
    // What the default stream is queued behind: work of the stream in between, and that stream is gone.
    fake_cuda_hold(1);
    runtime->discard(ptr, kBytes, kStream);
    CHECK(!runtime->query_stream(kStream));
    fake_cuda_hold(0);
    runtime->synchronize_stream(kStream);
    fake_cuda_fail("cudaMemDiscardAndPrefetchBatchAsync", 1, cudaErrorUnknown);
    CHECK_THROWS(RuntimeFailure, runtime->discard(ptr, kBytes, kStream));
    runtime->destroy_stream(side);
    runtime->free_managed(ptr);
    all_is_well();
  }
}

TEST(memory_of_pools_takes_no_advice_and_nobody_is_told) {
  const auto runtime = made(true);
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  for (const Advice advice : {Advice::kSetReadMostly, Advice::kUnsetReadMostly, Advice::kSetPreferredLocation,
                              Advice::kUnsetPreferredLocation, Advice::kSetAccessedBy, Advice::kUnsetAccessedBy}) {
    runtime->advise(ptr, 4 * MiB, advice, kDevice);
  }
  CHECK(cudaGetLastError() == cudaSuccess);
  const RangeAttributes found = runtime->range_attributes(ptr, 4 * MiB);
  CHECK(found.uniform && !found.read_mostly && !found.preferred_location && found.accessed_by.empty());
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(read_mostly_is_taken_back_where_the_first_page_does_not_have_it) {
  const auto runtime = made();
  char* const ptr = static_cast<char*>(runtime->allocate_managed(8 * MiB, kDevice));
  runtime->advise(ptr + 4 * MiB, 4 * MiB, Advice::kSetReadMostly, kDevice);
  runtime->advise(ptr + 2 * MiB, 6 * MiB, Advice::kUnsetReadMostly, kDevice);
  const RangeAttributes last = runtime->range_attributes(ptr + 6 * MiB, 2 * MiB);
  CHECK(last.uniform && !last.read_mostly);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(where_host_and_device_cannot_touch_memory_at_once_there_are_no_hints) {
  const auto runtime = made(false, {.concurrent = false});
  CHECK(!runtime->device_properties(0).concurrent_managed_access);
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  runtime->prefetch(ptr, 4 * MiB, kDevice, kStream);
  runtime->advise(ptr, 4 * MiB, Advice::kSetAccessedBy, Location::host());
  runtime->discard(ptr, 4 * MiB, kStream);
  CHECK(runtime->range_attributes(ptr, 4 * MiB).uniform);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(where_there_is_one_memory_nothing_is_prefetched) {
  const auto runtime = made(false, {.shared = true});
  CHECK(runtime->device_properties(0).pageable_memory_access);
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  runtime->prefetch(ptr, 4 * MiB, kDevice, kStream);
  runtime->prefetch(ptr, 4 * MiB, Location::host(), kStream);
  runtime->discard(ptr, 4 * MiB, kStream);
  CHECK_EQ(fake_cuda_count("cudaMemPrefetchAsync") + fake_cuda_count("cudaMemDiscardAndPrefetchBatchAsync"),
           std::size_t{0});
  runtime->free_managed(ptr);
  all_is_well();
}

// --- captures -----------------------------------------------------------------------------------------------

TEST(no_call_breaks_a_capture_of_this_thread_or_another) {
  for (const bool pool : {false, true}) {
    const auto runtime = made(pool);
    void* const before = runtime->allocate_managed(MiB, kDevice);
    Capture capture;
    const auto work = [&] {
      runtime->free_managed(runtime->allocate_managed(4 * MiB, kDevice));
      runtime->free_device(runtime->allocate_device(MiB, 0));
      runtime->free_pinned(runtime->allocate_pinned(MiB));
      runtime->free_pinned(runtime->allocate_pinned(32 * MiB));
      const Stream stream = runtime->create_stream(0, 0);
      const Event event = runtime->create_event(0, false);
      runtime->record_event(event, stream);
      CHECK(runtime->query_event(event) && runtime->query_stream(stream));
      runtime->synchronize_event(event);
      runtime->synchronize_stream(stream);
      runtime->destroy_event(event);
      runtime->destroy_stream(stream);
    };
    work();
    std::thread(work).join();
    runtime->free_managed(before);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    cudaThreadExchangeStreamCaptureMode(&mode);
    CHECK(mode == cudaStreamCaptureModeGlobal); // left as it was
    CHECK(capture.end());
    all_is_well();
  }
}

TEST(the_fake_notices_what_breaks_a_capture) {
  const auto runtime = made();
  Capture capture;
  void* ptr = nullptr;
  CHECK(cudaMallocManaged(&ptr, MiB, cudaMemAttachGlobal) == cudaErrorStreamCaptureUnsupported);
  contains(fake_cuda_misuse(), "cudaMallocManaged broke the capture");
  CHECK(!capture.end());
  cudaGetLastError();
}

TEST(a_stream_that_is_captured_takes_no_hint_and_no_mark) {
  const auto runtime = made();
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  const Event event = runtime->create_event(0, false);
  {
    Capture capture;
    const Stream stream{0, capture.stream};
    runtime->prefetch(ptr, 4 * MiB, kDevice, stream);
    runtime->discard(ptr, 4 * MiB, stream);
    CHECK(!runtime->query_stream(stream)); // never over
    contains(what([&] { runtime->record_event(event, stream); }), "cudaEventRecord on a stream that a graph");
    CHECK_THROWS(RuntimeFailure, runtime->synchronize_stream(stream));
    CHECK(capture.end());
  }
  CHECK_EQ(fake_cuda_count("cudaMemPrefetchAsync") + fake_cuda_count("cudaMemDiscardAndPrefetchBatchAsync"),
           std::size_t{0});
  runtime->destroy_event(event);
  runtime->free_managed(ptr);
  all_is_well();
}

// --- forks and the exit -------------------------------------------------------------------------------------

TEST(a_forked_child_calls_nothing_of_cuda) {
  const auto runtime = made();
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  void* const pinned = runtime->allocate_pinned(64);
  void* const large = runtime->allocate_pinned(32 * MiB);
  const Stream stream = runtime->create_stream(0, 0);
  const Event event = runtime->create_event(0, false);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const auto throws = [](const std::function<void()>& action) {
      return what(action).find("forked process") != std::string::npos;
    };
    const bool refused =
        throws([&] { runtime->allocate_managed(1, kDevice); }) && throws([&] { runtime->allocate_pinned(1); }) &&
        throws([&] { runtime->allocate_device(1, 0); }) &&
        throws([&] { runtime->prefetch(ptr, 1, kDevice, stream); }) &&
        throws([&] { runtime->advise(ptr, 1, Advice::kSetReadMostly, Location::host()); }) &&
        throws([&] { static_cast<void>(runtime->range_attributes(ptr, 1)); }) &&
        throws([&] { static_cast<void>(runtime->query_event(event)); }) &&
        throws([&] { runtime->synchronize_event(event); }) && throws([&] { runtime->synchronize_device(0); });
    runtime->free_managed(ptr);
    runtime->free_pinned(pinned);
    runtime->free_pinned(large);
    runtime->destroy_event(event);
    runtime->destroy_stream(stream);
    const bool quiet = *fake_cuda_misuse() == '\0';
    _exit(refused && quiet ? 0 : refused ? 2 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK(WIFEXITED(status));
  runtime->free_managed(ptr); // the parent goes on
  runtime->free_pinned(pinned);
  static_cast<char*>(large)[32 * MiB - 1] = 1;
  runtime->free_pinned(large);
  runtime->destroy_event(event);
  runtime->destroy_stream(stream);
  all_is_well();
}

TEST(at_exit_the_driver_may_be_gone) {
  for (const bool pool : {false, true}) {
    auto runtime = made(pool);
    void* const ptr = runtime->allocate_managed(4 * MiB, Location::device(1));
    void* const plain = runtime->allocate_device(MiB, 0);
    void* const pinned = runtime->allocate_pinned(MiB);
    void* const large = runtime->allocate_pinned(32 * MiB);
    const Event event = runtime->create_event(0, false);
    fake_cuda_unload(1);
    runtime->free_managed(ptr);
    runtime->free_device(plain);
    runtime->free_pinned(pinned);
    runtime->free_pinned(large);
    runtime->destroy_event(event);
    CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
    runtime.reset();
    fake_cuda_unload(0);
    CHECK_EQ(std::string(fake_cuda_misuse()), std::string());
  }
}

HARNESS_MAIN()
