// Walks of all structures after every change, in builds with TORCH_UVM_CHECKED; nothing in others. What is wrong is
// said on stderr and ends the program, because what it would do next is anybody's guess.
//
// TORCH_UVM_CHECK_EVERY=n in the environment walks after every n-th change only: a walk looks at every block there is.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

namespace torch_uvm {

#ifdef TORCH_UVM_CHECKED
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

/// Whether this change is one to walk after.
inline bool walk_is_due() noexcept {
  static const unsigned long every = [] {
    const char* const asked = std::getenv("TORCH_UVM_CHECK_EVERY");
    const unsigned long number = asked == nullptr ? 1 : std::strtoul(asked, nullptr, 10);
    return number == 0 ? 1 : number;
  }();
  static std::atomic<unsigned long> changes{0};
  return changes.fetch_add(1, std::memory_order_relaxed) % every == 0;
}

/// Walks, if it is due. \param check says what is wrong; what guards the structure is held
template <typename Check>
void walk_if_due([[maybe_unused]] const Check& check) noexcept {
  if constexpr (kChecked) {
    if (!walk_is_due()) {
      return;
    }
    std::optional<std::string> wrong;
    try {
      wrong = check();
    } catch (...) {
      return; // no memory to look with
    }
    if (wrong) {
      std::fprintf(stderr, "torch_uvm: an invariant does not hold: %s\n", wrong->c_str());
      std::abort();
    }
  }
}

/// Walks a structure when a scope is left, be it by an exception: made behind the lock that guards it.
template <typename Walked>
class WalkAfterwards {
 public:
  explicit WalkAfterwards(const Walked& walked) : walked_(walked) {}
  ~WalkAfterwards() {
    walk_if_due([this] { return walked_.check(); });
  }
  WalkAfterwards(const WalkAfterwards&) = delete;
  WalkAfterwards& operator=(const WalkAfterwards&) = delete;

 private:
  const Walked& walked_;
};

} // namespace torch_uvm
