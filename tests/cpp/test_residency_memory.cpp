// Each heap allocation of the engine and the allocator fails once, as if the host had no memory.
#include <string>

#include "failing_new.h"
#include "residency_rig.h"

namespace {

using namespace residency;

/// Steps over more storages than the budget holds. The nth heap allocation of the engine and the allocator fails.
/// \return whether there were that many
bool train_without(std::size_t nth) {
  Rig rig;
  failing_new::Countdown failing(nth);
  for (int number = 0; number < 7; ++number) {
    auto made = std::make_unique<Storage>();
    try {
      failing([&] { made->block = rig.memory.allocate(kBytes, Location::device(0), kStream); });
    } catch (const std::bad_alloc&) {
      continue;
    } catch (const OutOfMemory&) {
      continue;
    }
    made->ptr = static_cast<unsigned char*>(rig.memory.data(made->block));
    rig.storages.push_back(std::move(made));
    Storage& storage = *rig.storages.back();
    rig.run(1, {&storage}, true, [&] { Rig::write(storage, static_cast<unsigned char>(number)); });
  }
  const std::size_t count = rig.storages.size();
  for (int step = 0; step < 3; ++step) {
    for (std::size_t index = 0; index < count; ++index) {
      Storage& written = *rig.storages[index];
      Storage& read = *rig.storages[(index + 1) % count];
      const std::vector<Engine::Operand> operands{{written.record, true}, {read.record, false}};
      Engine::Frame frame;
      {
        const Engine::Lock lock(rig.engine);
        failing([&] { rig.engine.begin(frame, {10 + index, "test", false, false, false}, operands, rig.streams); });
      }
      Rig::check(written);
      Rig::check(read);
      Rig::write(written, static_cast<unsigned char>(written.content + 1));
      {
        const Engine::Lock lock(rig.engine);
        failing([&] { rig.engine.end(frame); });
      }
      for (const Storage* const used : {&written, &read}) {
        CHECK_EQ(used->record->in_use, 0U);
      }
      rig.check_engine();
    }
  }
  train(rig, 0, 2); // later steps work
  rig.check_engine();
  return failing.has_failed();
}

TEST(each_heap_allocation_of_the_engine_may_fail_once) {
  std::size_t failed = 0;
  for (std::size_t nth = 1;; nth += failing_new::each() ? 1 : 17) {
    try {
      if (!train_without(nth)) {
        break;
      }
    } catch (const std::exception& error) {
      throw harness::Failure("allocation " + std::to_string(nth) + ": " + error.what());
    }
    ++failed;
  }
  CHECK(failed > 20);
}

} // namespace

HARNESS_MAIN()
