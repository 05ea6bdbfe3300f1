// Tells a forked child from the process that made an object. Managed memory, threads and events belong to the parent.
#pragma once

namespace torch_uvm {

/// Remembers in which process it was made.
class ForkWatch {
 public:
  /// \throws RuntimeFailure if the system has no room to report forks
  ForkWatch();

  /// Whether this process was forked, directly or not, from the one in which the object was made.
  bool in_child() const noexcept;

 private:
  unsigned born_; ///< forks between the first ForkWatch's process and the one in which this was made
};

} // namespace torch_uvm
