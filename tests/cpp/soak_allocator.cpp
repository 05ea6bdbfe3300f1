// The allocator's soak test: random operations by eight threads, with checks of every byte and of the invariants.
//   soak_allocator [operations] [seed] [operations of a thread in a round]
// Each round has its own seed, which a failure reports: `soak_allocator 1 SEED` repeats the round.
#include <cstdio>
#include <ctime>
#include <string>

#include "soak_round.h"

int main(int argc, char** argv) {
  const std::uint64_t wanted = argc > 1 ? std::stoull(argv[1]) : 100'000'000;
  std::uint64_t seed = argc > 2 ? std::stoull(argv[2]) : static_cast<std::uint64_t>(std::time(nullptr));
  soak::Plan plan;
  plan.operations = argc > 3 ? std::stoull(argv[3]) : 20'000;
  std::printf("allocator soak: %llu operations on %u threads, seed %llu\n", static_cast<unsigned long long>(wanted),
              plan.threads, static_cast<unsigned long long>(seed));
  std::uint64_t operations = 0, refused = 0, made_room = 0, rounds = 0, failed = 0;
  for (; operations < wanted; ++seed, ++rounds) {
    plan.seed = seed;
    const soak::Target& target = soak::targets()[seed % soak::targets().size()];
    const soak::Outcome outcome = soak::run_round(target, plan);
    failed += outcome.wrong.empty() ? 0 : 1;
    operations += std::max<std::uint64_t>(outcome.operations, 1);
    refused += outcome.refused;
    made_room += outcome.made_room;
    if (rounds % 64 == 63) {
      std::printf("  %llu operations, next seed %llu\n", static_cast<unsigned long long>(operations),
                  static_cast<unsigned long long>(seed + 1));
      std::fflush(stdout);
    }
  }
  std::printf(
      "%llu operations in %llu rounds; memory was refused %llu times, room made %llu times; %llu rounds failed\n",
      static_cast<unsigned long long>(operations), static_cast<unsigned long long>(rounds),
      static_cast<unsigned long long>(refused), static_cast<unsigned long long>(made_room),
      static_cast<unsigned long long>(failed));
  return failed != 0 ? 1 : 0;
}
