// The allocator's contract on CudaRuntime, over the fake CUDA runtime: every source of segments, with immediate and
// with held work.
#include "allocator_contract.h"
#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

namespace {

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
  return true;
}();

} // namespace

TEST(the_suites_are_registered) {
  CHECK(registered);
  CHECK(harness::cases().size() > 3 * contract_cases().size());
}

HARNESS_MAIN()
