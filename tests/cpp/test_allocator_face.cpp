// The suite that every Allocator passes, for the caching allocator and the logging adaptor.
#include "allocator/adaptors/adaptors.h"
#include "allocator_face.h"

using namespace face;

namespace {

const bool registered =
    register_face("global",
                  {.make = [](ManagedRuntime& runtime, std::shared_ptr<Allocator>) { return caching(runtime); }}) &&
    register_face("caching", {.make =
                                  [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                                    return std::make_shared<CachingAllocator>(runtime, std::move(upstream));
                                  }}) &&
    register_face("log", {.make = [](ManagedRuntime&, std::shared_ptr<Allocator> upstream) {
                    return std::make_shared<Adaptor>(std::move(upstream), AdaptorOptions{.log = "/dev/null"});
                  }});

} // namespace

TEST(the_suite_is_registered) {
  CHECK(registered);
  CHECK(harness::cases().size() > 50);
}

HARNESS_MAIN()
