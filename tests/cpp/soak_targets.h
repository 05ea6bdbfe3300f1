// The soak test's targets: the caching allocator over each source of segments, and each implementation of Allocator.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator/adaptors/adaptors.h"
#include "allocator/adaptors/caching_allocator.h"
#include "allocator/arena/arena.h"
#include "allocator/plan/allocation_plan.h"
#include "soak_subject.h"

namespace soak {

/// Any Allocator, over a caching allocator.
class FaceSubject : public Subject {
 public:
  using Make = std::function<std::shared_ptr<Allocator>(ManagedRuntime&, std::shared_ptr<Allocator> upstream)>;

  FaceSubject(ManagedRuntime& runtime, const Make& make)
      : Subject(runtime), memory_(runtime, std::make_unique<ManagedSegmentSource>(runtime)) {
    allocator_ = make(runtime, std::make_shared<CachingAllocator>(memory_));
  }

  bool serves(Location home) const override {
    return allocator_->serves(home);
  }
  Held allocate(std::size_t bytes, Location home, Stream stream) override {
    const Allocation made = allocator_->allocate(bytes, home, stream);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(made.ptr) % kAllocationAlignment, std::uintptr_t{0});
    return {nullptr, made, static_cast<unsigned char*>(made.ptr), bytes, home, stream, 0};
  }
  void free(const Held& held) override {
    allocator_->free(held.allocation);
  }
  void record_stream(const Held& held, Stream stream) override {
    allocator_->record_stream(held.allocation, stream);
  }
  void empty_cache() override {
    allocator_->release();
  }
  void look(const Held* /*held*/, std::uint32_t /*choice*/) override {
    const AllocatorFigures now = allocator_->figures();
    CHECK(now.allocations >= 0 && now.requested_bytes >= 0 && now.reserved_bytes >= 0);
    CHECK(now.upstream_frees >= 0 && now.upstream_allocations >= now.upstream_frees);
  }
  std::optional<std::string> check() const override {
    return memory_.check();
  }
  void expect_empty() override {
    again();
    allocator_->release();
    const AllocatorFigures now = allocator_->figures();
    CHECK_EQ(now.allocations, 0);
    CHECK_EQ(now.requested_bytes, 0);
    allocator_.reset();
    CHECK_EQ(memory_.statistics().allocation[0].current, 0);
    memory_.empty_cache();
    CHECK_EQ(memory_.statistics().reserved_bytes[0].current, 0);
  }

 protected:
  virtual void again() {}
  template <typename Type>
  Type& as() {
    return static_cast<Type&>(*allocator_);
  }

 private:
  CachingManagedAllocator memory_;
  std::shared_ptr<Allocator> allocator_;
};

class ArenaSubject final : public FaceSubject {
 public:
  explicit ArenaSubject(ManagedRuntime& runtime)
      : FaceSubject(runtime, [](ManagedRuntime& on, std::shared_ptr<Allocator> upstream) {
          return std::make_shared<Arena>(on, std::move(upstream),
                                         ArenaOptions{.home = Location::device(0), .initial = 1 * MiB});
        }) {}

  void special(std::uint32_t choice, std::vector<Held>& /*shared*/) override {
    const std::lock_guard lock(mutex_);
    if (choice % 8 == 0) {
      as<Arena>().reset();
    } else if (choice % 2 == 0 && open_ < 8) {
      as<Arena>().push();
      ++open_;
    } else if (open_ > 0) {
      as<Arena>().pop();
      --open_;
    }
  }

 private:
  void again() override {
    as<Arena>().reset();
  }

  std::mutex mutex_; // scopes belong to the whole arena
  int open_ = 0;
};

class PlanSubject final : public FaceSubject {
 public:
  explicit PlanSubject(ManagedRuntime& runtime)
      : FaceSubject(runtime, [](ManagedRuntime&, std::shared_ptr<Allocator> upstream) {
          return std::make_shared<AllocationPlan>(std::move(upstream), Location::device(0));
        }) {}

  void special(std::uint32_t /*choice*/, std::vector<Held>& /*shared*/) override {
    const std::lock_guard lock(mutex_);
    under_way_ ? as<AllocationPlan>().end_iteration() : as<AllocationPlan>().begin_iteration();
    under_way_ = !under_way_;
  }

 private:
  void again() override {
    if (under_way_) {
      as<AllocationPlan>().end_iteration();
    }
  }

  std::mutex mutex_; // begin and end are called by one thread at a time
  bool under_way_ = false;
};

/// A subject for the soak test, on a runtime of its own.
struct Target {
  std::string name;
  bool delayed; ///< queued work is delayed at random
  std::function<std::unique_ptr<Subject>(ManagedRuntime&)> make;
};

inline const std::vector<Target>& targets() {
  const auto caching = [](auto source) {
    return [=](ManagedRuntime& runtime) { return std::make_unique<CachingSubject>(runtime, source(runtime)); };
  };
  const auto managed = caching([](ManagedRuntime& on) { return std::make_unique<ManagedSegmentSource>(on); });
  const auto device = caching([](ManagedRuntime& on) { return std::make_unique<DeviceSegmentSource>(on); });
  const auto pinned = caching([](ManagedRuntime& on) { return std::make_unique<PinnedSegmentSource>(on, 256 * MiB); });
  const auto arena = [](ManagedRuntime& on) { return std::make_unique<ArenaSubject>(on); };
  const auto plan = [](ManagedRuntime& on) { return std::make_unique<PlanSubject>(on); };
  const auto pool = [](ManagedRuntime& on) {
    return std::make_unique<FaceSubject>(on, [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
      const CachingOptions options{.home = Location::device(0), .initial = 16 * MiB, .maximum = 192 * MiB};
      return std::make_shared<CachingAllocator>(runtime, std::move(upstream), options);
    });
  };
  const auto adaptors = [](ManagedRuntime& on) {
    return std::make_unique<FaceSubject>(on, [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
      auto cache = std::make_shared<CachingAllocator>(runtime, std::move(upstream));
      const auto release = [cache](std::size_t, Location) { return cache->release() != 0; };
      auto limiting = std::make_shared<Adaptor>(cache, AdaptorOptions{.limit = 192 * MiB});
      return std::make_shared<Adaptor>(std::move(limiting), AdaptorOptions{.callback = release});
    });
  };
  static const std::vector<Target> all{
      {"caching, managed segments", false, managed},
      {"arena", false, arena},
      {"caching, managed segments, delayed work", true, managed},
      {"caching, pinned segments", false, pinned},
      {"allocation plan", false, plan},
      {"caching, managed segments", false, managed},
      {"pool", true, pool},
      {"caching, device segments", false, device},
      {"caching, managed segments, delayed work", true, managed},
      {"adaptors around a cache on a cache", false, adaptors},
      {"arena, delayed work", true, arena},
      {"allocation plan, delayed work", true, plan},
  };
  return all;
}

} // namespace soak
