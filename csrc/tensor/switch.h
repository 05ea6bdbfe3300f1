// Whether new tensors are managed: a process-wide switch, and scopes that override it for a thread
// and for the threads that run its backward.
#pragma once

#include <memory>
#include <thread>

namespace torch_uvm {

/// What holds for the calling thread: its innermost open scope, else the process-wide switch.
bool managed_enabled();

/// The process-wide switch. At any time; tensors made before stay what they are.
void set_managed_enabled(bool on);
bool managed_enabled_globally();

struct ScopeInfo; // switch.cpp

/// Overrides the switch from its construction to `close()` on the thread that made it, and on the
/// threads to which autograd carries that thread's state.
///
/// A plain thread_local would not reach backward threads; c10::ThreadLocalDebugInfo is carried over.
class ManagedScope {
 public:
  explicit ManagedScope(bool on);
  ~ManagedScope() {
    close();
  }
  ManagedScope(const ManagedScope&) = delete;
  ManagedScope& operator=(const ManagedScope&) = delete;

  /// Ends the scope, wherever its state was carried to. Scopes may be closed in any order and from any
  /// thread. Closing twice does nothing.
  void close() noexcept;

 private:
  std::shared_ptr<ScopeInfo> info_;
  std::thread::id thread_;
};

} // namespace torch_uvm
