// Checks all invariants after every change. Active only in builds with TORCH_UVM_CHECKED. A violation is printed to
// stderr and aborts the program, because its state can no longer be trusted.
//
// TORCH_UVM_CHECK_EVERY=n in the environment checks only after every n-th change, because a check visits every block.
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

/// Whether to check after this change.
inline bool walk_is_due() noexcept {
  static const unsigned long every = [] {
    const char* const asked = std::getenv("TORCH_UVM_CHECK_EVERY");
    const unsigned long number = asked == nullptr ? 1 : std::strtoul(asked, nullptr, 10);
    return number == 0 ? 1 : number;
  }();
  static std::atomic<unsigned long> changes{0};
  return changes.fetch_add(1, std::memory_order_relaxed) % every == 0;
}

/// Runs the check if it is due. \param check returns the violation, if any; called with the structure's lock held
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
      return; // out of memory for the check
    }
    if (wrong) {
      std::fprintf(stderr, "torch_uvm: an invariant does not hold: %s\n", wrong->c_str());
      std::abort();
    }
  }
}

/// Checks, at the point of use, what the code that follows relies on.
template <bool checked = kChecked>
void expect([[maybe_unused]] bool holds, [[maybe_unused]] const char* what) noexcept {
  if constexpr (checked) {
    if (!holds) {
      std::fprintf(stderr, "torch_uvm: an invariant does not hold: %s\n", what);
      std::abort();
    }
  }
}

/// Checks a structure on scope exit, also on an exception. Declare it after the lock that guards the structure.
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
