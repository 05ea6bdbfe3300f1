// The contract of every Allocator (csrc/allocator/allocator.h), as cases. A test file registers the suite for its
// implementation under a prefix:
//
//   const bool registered = face::register_face("arena", {.make = make_arena, .again = reset});
#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "face_rig.h"

namespace face {

using MakeRig = std::function<FaceRig()>; ///< returns a rig whose allocator exists

inline void zero_bytes_need_no_memory(const MakeRig& make) {
  FaceRig rig = make();
  const std::int64_t made = rig.allocator->figures().upstream_allocations;
  const Allocation nothing = rig.allocate(0);
  CHECK(!nothing);
  CHECK_EQ(nothing.bytes, std::size_t{0});
  rig.allocator->record_stream(nothing, kStream);
  rig.allocator->free(nothing);
  rig.allocator->free(Allocation{});
  CHECK_EQ(rig.allocator->figures().allocations, 0);
  CHECK_EQ(rig.allocator->figures().upstream_allocations, made);
  expect_empty(rig);
}

inline void allocations_are_aligned_and_apart(const MakeRig& make) {
  FaceRig rig = make();
  std::vector<Allocation> held;
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{257}, 7 * KiB + 3,
                                    1 * MiB, 1 * MiB + 1, 3 * MiB + 7, 10 * MiB, 33 * MiB}) {
      for (const Stream stream : {kStream, Stream::host()}) {
        held.push_back(rig.allocate(bytes, stream));
        CHECK_EQ(held.back().bytes, bytes);
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(held.back().ptr) % kAllocationAlignment, std::uintptr_t{0});
        fill(held.back(), static_cast<unsigned char>(held.size()));
      }
    }
  }
  for (std::size_t i = 0; i < held.size(); ++i) {
    expect_filled(held[i], static_cast<unsigned char>(i + 1));
    CHECK(std::none_of(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(i),
                       [&](const Allocation& other) { return overlap(held[i], other); }));
  }
  for (const Allocation& allocation : held) {
    rig.allocator->free(allocation);
  }
  expect_empty(rig);
}

inline void freed_memory_is_reused(const MakeRig& make) {
  FaceRig rig = make();
  std::int64_t reserved = 0;
  for (int turn = 0; turn < 8; ++turn) {
    std::vector<Allocation> held;
    for (const std::size_t bytes : {std::size_t{700}, 3 * MiB, 12 * MiB}) {
      held.push_back(rig.allocate(bytes));
    }
    for (const Allocation& allocation : held) {
      rig.allocator->free(allocation);
    }
    rig.again();
    if (turn == 2) { // the allocator has seen the whole pattern
      reserved = rig.allocator->figures().peak_reserved_bytes;
    }
  }
  CHECK_EQ(rig.allocator->figures().peak_reserved_bytes, reserved);
  expect_empty(rig);
}

inline void unknown_homes_and_streams_are_refused(const MakeRig& make) {
  FaceRig rig = make();
  const Allocation held = rig.allocate(1000);
  const auto before = in_hands(*rig.allocator);
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(100, Location::device(2), kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(100, Location{-2}, kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(100, kHome, Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(100, kHome, Stream{-2, nullptr}));
  CHECK_THROWS(InvalidArgument, rig.allocator->record_stream(held, Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->record_stream(held, Stream{-2, nullptr}));
  CHECK(in_hands(*rig.allocator) == before);
  rig.allocator->free(held);
  expect_empty(rig);
}

inline void refused_requests_change_nothing(const MakeRig& make) {
  FaceRig rig = make();
  const Allocation held = rig.allocate(3 * MiB);
  fill(held, 7);
  rig.runtime->set_limit(rig.runtime->managed_bytes() + 64 * MiB);
  const auto before = in_hands(*rig.allocator);
  constexpr std::size_t kMax = ~std::size_t{0};
  for (const std::size_t bytes : {std::size_t{1} << 40, kMax / 4, kMax / 2, kMax - 300, kMax}) {
    CHECK_THROWS(OutOfMemory, rig.allocate(bytes));
    CHECK(in_hands(*rig.allocator) == before);
  }
  expect_sound(rig.allocator->figures());
  rig.runtime->set_limit(std::nullopt);
  const Allocation another = rig.allocate(5 * MiB); // the refused requests left no trace
  fill(another, 8);
  expect_filled(held, 7);
  rig.allocator->free(held);
  rig.allocator->free(another);
  expect_empty(rig);
}

inline void the_figures_add_up(const MakeRig& make) {
  FaceRig rig = make();
  std::vector<Allocation> held;
  std::int64_t requested = 0, peak = 0;
  const auto check = [&] {
    const AllocatorFigures now = rig.allocator->figures();
    expect_sound(now);
    CHECK_EQ(now.allocations, static_cast<std::int64_t>(held.size()));
    CHECK_EQ(now.requested_bytes, requested);
    CHECK_EQ(now.peak_requested_bytes, peak);
  };
  check();
  for (std::size_t i = 0; i < 200; ++i) {
    if (i % 3 == 2) {
      std::swap(held[i * 7 % held.size()], held.back());
      requested -= static_cast<std::int64_t>(held.back().bytes);
      rig.allocator->free(held.back());
      held.pop_back();
    } else {
      held.push_back(rig.allocate(1 + i * i * 97 % (512 * KiB)));
      requested += static_cast<std::int64_t>(held.back().bytes);
      peak = std::max(peak, requested);
    }
    if (i % 50 == 49) {
      rig.allocator->release();
    }
    check();
  }
  CHECK(rig.allocator->figures().upstream_allocations > 0);
  for (const Allocation& allocation : held) {
    rig.allocator->free(allocation);
  }
  expect_empty(rig);
  CHECK_EQ(rig.allocator->figures().peak_requested_bytes, peak);
  CHECK(!rig.allocator->description().empty());
}

inline void another_thread_may_free(const MakeRig& make) {
  FaceRig rig = make();
  const Stream other = rig.stream();
  std::vector<Allocation> held;
  for (std::size_t i = 0; i < 20; ++i) {
    held.push_back(rig.allocate(1 + i * 60 * KiB));
    fill(held.back(), static_cast<unsigned char>(i));
  }
  std::thread([&] {
    rig.allocator->record_stream(held.front(), other);
    for (const Allocation& allocation : held) {
      rig.allocator->free(allocation);
    }
  }).join();
  CHECK_EQ(rig.allocator->figures().allocations, 0);
  expect_empty(rig);
}

inline void many_threads_at_once(const MakeRig& make) {
  FaceRig rig = make();
  const Stream streams[] = {kStream, rig.stream(), rig.stream(), Stream::host()};
  std::mutex mutex;
  std::vector<std::pair<Allocation, unsigned char>> passed_on; // freed or passed on by another thread
  std::vector<std::string> failures(std::size(streams));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < failures.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        for (std::size_t step = 0; step < 400; ++step) {
          const std::size_t bytes = 1 + (step * 7919 + i * 104729) % (step % 16 == 0 ? 2 * MiB : 32 * KiB);
          std::pair own{rig.allocate(bytes, streams[i]), static_cast<unsigned char>(step * 4 + i)};
          fill(own.first, own.second);
          if (step % 8 == 3) {
            rig.allocator->record_stream(own.first, streams[(i + 1) % 3]);
          }
          {
            const std::lock_guard lock(mutex);
            if (passed_on.size() < 16) {
              passed_on.push_back(own);
              continue;
            }
            std::swap(passed_on[step % 16], own);
          }
          expect_filled(own.first, own.second);
          rig.allocator->free(own.first);
          if (step % 100 == 99) {
            rig.allocator->release();
            expect_sound(rig.allocator->figures());
          }
        }
      } catch (const std::exception& error) {
        failures[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& failure : failures) {
    CHECK_EQ(failure, "");
  }
  for (const auto& [allocation, mark] : passed_on) {
    expect_filled(allocation, mark);
    rig.allocator->free(allocation);
  }
  expect_empty(rig);
}

/// A case and its name.
struct FaceCase {
  const char* name;
  void (*run)(const MakeRig&);
};

} // namespace face

#include "allocator_face_failures.h"
#include "allocator_face_streams.h"

namespace face {

/// Registers every case, on the recording and on the emulated runtime, over one caching allocator and over two.
inline bool register_face(const std::string& prefix, const Face& face) {
  const auto add = [&](const std::string& where, const FaceCase& test,
                       std::function<std::unique_ptr<ManagedRuntime>()> runtime, bool nested) {
    harness::Registrar(prefix + "_" + where + "_" + test.name, [=, run = test.run] {
      run([=] {
        FaceRig rig(runtime(), face, nested);
        rig.make();
        return rig;
      });
    });
  };
#define TORCH_UVM_CASE(name) \
  FaceCase {                 \
    #name, name              \
  }
  for (const FaceCase& test :
       {TORCH_UVM_CASE(zero_bytes_need_no_memory), TORCH_UVM_CASE(allocations_are_aligned_and_apart),
        TORCH_UVM_CASE(freed_memory_is_reused), TORCH_UVM_CASE(unknown_homes_and_streams_are_refused),
        TORCH_UVM_CASE(refused_requests_change_nothing), TORCH_UVM_CASE(the_figures_add_up),
        TORCH_UVM_CASE(another_thread_may_free), TORCH_UVM_CASE(many_threads_at_once)}) {
    add("recording", test, recording, false);
    add("nested", test, recording, true);
    add("emulated", test, [] { return emulated_runtime(); }, false);
  }
  for (const FaceCase& test : {TORCH_UVM_CASE(reuse_waits_for_recorded_streams),
                               TORCH_UVM_CASE(reuse_on_another_stream_waits_for_the_first)}) {
    add("recording", test, recording, false);
    add("nested", test, recording, true);
  }
#undef TORCH_UVM_CASE
  for (const bool nested : {false, true}) {
    const std::string where = nested ? "_nested_" : "_";
    harness::Registrar(prefix + where + "delayed_work_keeps_its_bytes",
                       [=] { delayed_work_keeps_its_bytes(face, nested); });
    harness::Registrar(prefix + where + "any_call_fails", [=] { any_call_fails(face, nested); });
  }
  return true;
}

} // namespace face
