// The contract suite on every runtime and source of segments.
#include "allocator_contract.h"
#include "recording/recording_runtime.h"
#include "runtime/emulated/emulated_runtime.h"

using namespace contract;

namespace {

Rig recording(bool managed) {
  return Rig(std::make_unique<RecordingRuntime>(2), managed);
}

Rig emulated_rig(bool managed, std::optional<std::uint64_t> seed = std::nullopt) {
  EmulatedConfig config;
  config.devices = 2;
  config.memory = 256 * MiB;
  config.schedule_seed = seed;
  return Rig(std::make_unique<EmulatedRuntime>(config), managed);
}

const bool registered = register_contract("recording_managed", [] { return recording(true); }) &&
                        register_contract("recording_device", [] { return recording(false); }) &&
                        register_contract("emulated_managed", [] { return emulated_rig(true); }) &&
                        register_contract("emulated_device", [] { return emulated_rig(false); }) &&
                        register_contract("delayed_managed", [] { return emulated_rig(true, 7); }) &&
                        register_contract("delayed_device", [] { return emulated_rig(false, 7); });

} // namespace

TEST(the_suite_is_registered) {
  CHECK(registered);
  CHECK(harness::cases().size() > 100);
}

HARNESS_MAIN()
