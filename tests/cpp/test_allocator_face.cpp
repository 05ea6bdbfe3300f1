// Caching allocators as one among others: the suite that every Allocator passes.
#include "allocator_face.h"

using namespace face;

namespace {

const bool registered =
    register_face("global",
                  {.make = [](ManagedRuntime& runtime, std::shared_ptr<Allocator>) { return caching(runtime); }}) &&
    register_face("caching", {.make = [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                    return std::make_shared<CachingAllocator>(runtime, std::move(upstream));
                  }});

} // namespace

TEST(the_suite_is_registered) {
  CHECK(registered);
  CHECK(harness::cases().size() > 50);
}

HARNESS_MAIN()
