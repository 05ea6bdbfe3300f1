#include "tensor/dispatch/deferred_updates.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "tensor/dispatch/operand_walk.h"
#include "tensor/process/context.h"

namespace torch_uvm {

namespace {

struct Pending {
  std::unique_ptr<DeferredUpdate> update;
  std::uint64_t number = 0;
  bool running = false;
  bool done = false;
};
using Shared = std::shared_ptr<Pending>;

/// A storage that an update has written, and the stream of the write.
struct Written {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage; // so that no other storage gets its address
  c10::Stream stream;
  std::uint64_t number; ///< of the write
};

// State of the table below that every operator reads without the mutex.
std::atomic<std::size_t> pending_updates{0};
std::atomic<bool> any_written{false};

struct Table {
  std::mutex mutex;
  std::condition_variable finished;
  std::unordered_map<const c10::StorageImpl*, std::vector<Shared>> by_storage;
  std::uint64_t numbered = 0;
  std::unordered_map<const c10::StorageImpl*, Written> written;
  std::uint64_t writes = 0; ///< the number of the last `Written`
  std::size_t most_written = 64; ///< size of `written` at which expired entries are removed
  /// The stream of all updates so far, while there is only one: a thread whose current stream it is never has to wait.
  std::atomic<c10::DeviceType> written_type{c10::DeviceType::CPU};
  std::atomic<int> written_device{0};
  std::atomic<c10::StreamId> written_stream{0};
  std::atomic<bool> several_streams{false};

  static Table& get() {
    static auto* table = new Table(); // leaked: updates that are pending at process exit are not needed
    return *table;
  }
};

thread_local bool running = false;

constexpr const char* kRefusal =
    "an optimizer's step has deferred the update of this tensor to its next use by an operator of PyTorch, and code "
    "that is no operator reads its address. Put that code within `with torch_uvm.resident(tensor):`, or choose "
    "optimizer=\"in_place\". A forked process has no device: start workers with 'spawn' or 'forkserver'";

void forget(Table& table, const Shared& pending) {
  for (const auto& [storage, writes] : pending->update->accesses()) {
    const auto found = table.by_storage.find(storage);
    if (found == table.by_storage.end()) {
      continue; // `defer` failed before it added this entry
    }
    std::erase(found->second, pending);
    if (found->second.empty()) {
      table.by_storage.erase(found);
    }
  }
}

/// \param gone receives expired entries, to be destroyed without the mutex: destroying the last reference to a storage
///        may involve a Python object
void note_written(Table& table, const DeferredUpdate& update, std::vector<Written>& gone) {
  if (table.written.size() >= table.most_written) {
    std::erase_if(table.written, [&](auto& entry) {
      const bool expired = entry.second.storage.expired();
      if (expired) {
        gone.push_back(std::move(entry.second));
      }
      return expired;
    });
    table.most_written = 2 * table.written.size() + 64;
  }
  for (const auto& [storage, writes] : update.accesses()) {
    if (writes) {
      const auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
          const_cast<c10::StorageImpl*>(storage)); // alive: the update has a strong reference
      table.written.insert_or_assign(
          storage, Written{c10::weak_intrusive_ptr<c10::StorageImpl>(strong), update.stream(), ++table.writes});
    }
  }
  const c10::Stream stream = update.stream();
  if (table.written_type == c10::DeviceType::CPU) {
    table.written_device = stream.device_index();
    table.written_stream = stream.id();
    table.written_type = stream.device_type();
  } else if (table.written_device != stream.device_index() || table.written_stream != stream.id()) {
    table.several_streams = true;
  }
  any_written.store(true, std::memory_order_relaxed);
}

/// Runs an update, or waits for the thread that is running it. \throws what the update throws
void run(const Shared& pending) {
  Table& table = Table::get();
  {
    std::unique_lock lock(table.mutex);
    table.finished.wait(lock, [&] { return !pending->running; });
    if (pending->done) {
      return;
    }
    pending->running = true;
  }
  std::exception_ptr error;
  running = true;
  try {
    pending->update->accept_use();
    pending->update->run();
  } catch (...) {
    error = std::current_exception();
    pending->update->refuse_use("an update that an optimizer's step had deferred failed: ", error);
  }
  running = false;
  std::vector<Written> gone;
  std::optional<c10::Stream> unnoted;
  std::unique_ptr<DeferredUpdate> done; // destroyed without the mutex, after waiting threads are notified: it may own
                                        // the last reference to a storage with a Python object
  {
    const std::lock_guard lock(table.mutex);
    pending->running = false;
    if (!error) {
      pending->done = true;
      forget(table, pending);
      done = std::move(pending->update);
      try {
        note_written(table, *done, gone);
      } catch (const std::exception&) { // out of host memory: synchronise below, so that no other stream has to wait
        unnoted = done->stream();
      }
    }
  }
  if (unnoted) {
    try {
      c10::impl::VirtualGuardImpl(unnoted->device_type()).synchronizeStream(*unnoted);
    } catch (...) {
      error = std::current_exception(); // a device error
    }
  }
  if (pending->done) { // only now: another stream's operator sees that it is pending, or that it has to wait
    pending_updates.fetch_sub(1, std::memory_order_release);
  }
  table.finished.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
}

/// Runs updates in the order of `defer`; tries all of them. \throws the first error
void run(std::vector<Shared>& found) {
  std::ranges::sort(found, {}, [](const Shared& pending) { return pending->number; });
  found.erase(std::ranges::unique(found).begin(), found.end());
  std::exception_ptr error;
  for (const Shared& pending : found) {
    try {
      run(pending);
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

/// Appends the pending updates that conflict with a use of the storage. Requires the mutex.
void collect(const Table& table, const c10::StorageImpl* storage, bool writes, std::vector<Shared>& found) {
  const auto known = table.by_storage.find(storage);
  if (known == table.by_storage.end()) {
    return;
  }
  for (const Shared& pending : known->second) {
    if (writes || pending->update->accesses().at(storage)) {
      found.push_back(pending);
    }
  }
}

void collect_all(const Table& table, std::vector<Shared>& found) {
  for (const auto& [storage, pending] : table.by_storage) {
    found.insert(found.end(), pending.begin(), pending.end());
  }
}

void collect(const Table& table, const at::Tensor& tensor, bool writes, std::vector<Shared>& found) {
  if (!tensor.defined()) {
    return;
  }
  if (tensor.has_storage()) {
    collect(table, tensor.storage().unsafeGetStorageImpl(), writes, found);
  } else {
    collect_all(table, found); // a functorch wrapper: its contents are unknown and its inner operators are not observed
  }
}

} // namespace

bool has_deferred_updates() noexcept {
  return pending_updates.load(std::memory_order_acquire) != 0;
}

bool may_need_updates() noexcept {
  return has_deferred_updates() || any_written.load(std::memory_order_relaxed);
}

std::size_t deferred_updates() {
  return pending_updates.load(std::memory_order_relaxed);
}

bool runs_deferred_update() noexcept {
  return running;
}

void defer(std::vector<std::unique_ptr<DeferredUpdate>> updates,
           c10::function_ref<bool(const DeferredUpdate&)> is_in_use) {
  Table& table = Table::get();
  const std::lock_guard lock(table.mutex);
  for (std::unique_ptr<DeferredUpdate>& update : updates) {
    const auto pending = std::make_shared<Pending>();
    pending->update = std::move(update);
    pending->number = ++table.numbered;
    try {
      for (const auto& [storage, writes] : pending->update->accesses()) {
        table.by_storage[storage].push_back(pending);
      }
    } catch (...) { // out of host memory: as if the step had been interrupted before this update
      forget(table, pending);
      throw;
    }
    pending_updates.fetch_add(1, std::memory_order_relaxed);
    if (!is_in_use(*pending->update)) {
      pending->update->refuse_use(kRefusal);
    }
  }
}

void run_deferred_updates_before(c10::ArrayRef<c10::IValue> inputs,
                                 c10::function_ref<bool(std::size_t)> writes) noexcept {
  if (running) {
    return; // an operator of an update itself
  }
  try {
    std::vector<Shared> found;
    {
      Table& table = Table::get();
      const std::lock_guard lock(table.mutex);
      for (std::size_t index = 0; index < inputs.size(); ++index) {
        if (inputs[index].isStorage()) { // of `set_`, which reads its address
          collect(table, inputs[index].toStorage().unsafeGetStorageImpl(), writes(index), found);
        }
        for_each_whole_tensor(inputs[index],
                              [&](const at::Tensor& tensor) { collect(table, tensor, writes(index), found); });
      }
    }
    run(found);
  } catch (...) {
    // The tensors raise the error when the operator accesses them.
  }
}

namespace {

/// Whether all updates so far have run on the calling thread's current stream.
bool is_the_one_stream(const Table& table) {
  if (table.several_streams) {
    return false;
  }
  const c10::Device device(table.written_type, static_cast<c10::DeviceIndex>(table.written_device));
  return current_stream(device).id() == table.written_stream;
}

} // namespace

void wait_for_deferred_updates(c10::ArrayRef<c10::IValue> inputs) noexcept {
  try {
    if (!any_written.load(std::memory_order_relaxed)) {
      return;
    }
    Table& table = Table::get();
    if (is_the_one_stream(table)) {
      return;
    }
    c10::SmallVector<c10::Stream, 2> streams;
    {
      const std::lock_guard lock(table.mutex);
      for (const c10::IValue& input : inputs) {
        for_each_whole_tensor(input, [&](const at::Tensor& tensor) {
          const bool known = tensor.defined() && tensor.has_storage();
          const auto found = known ? table.written.find(tensor.storage().unsafeGetStorageImpl()) : table.written.end();
          if (found != table.written.end() && std::ranges::find(streams, found->second.stream) == streams.end()) {
            streams.push_back(found->second.stream);
          }
        });
      }
    }
    for (const c10::Stream earlier : streams) {
      const c10::Stream now = current_stream(earlier.device());
      if (now != earlier) {
        wait_for(earlier, now);
      }
    }
  } catch (...) {
    // Recording an event failed. The operator itself will report the device error.
  }
}

namespace {

/// \param collects is called with the table, locked, and appends the updates to run
void run_those(c10::function_ref<void(const Table&, std::vector<Shared>&)> collects) {
  if (!has_deferred_updates() || running || Context::get().forked()) {
    return;
  }
  std::vector<Shared> found;
  {
    Table& table = Table::get();
    const std::lock_guard lock(table.mutex);
    collects(table, found);
  }
  run(found);
}

} // namespace

void run_deferred_updates_of(at::TensorList tensors) {
  run_those([&](const Table& table, std::vector<Shared>& found) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        collect(table, tensor.storage().unsafeGetStorageImpl(), /*writes=*/true, found);
      }
    }
  });
}

void finish_deferred_updates_of(c10::StorageImpl* storage) {
  run_those([&](const Table& table, std::vector<Shared>& found) { collect(table, storage, /*writes=*/true, found); });
  Table& table = Table::get();
  if (!any_written.load(std::memory_order_relaxed) || running || Context::get().forked()) {
    return;
  }
  std::optional<c10::Stream> stream;
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(table.mutex);
    if (const auto found = table.written.find(storage); found != table.written.end()) {
      stream = found->second.stream;
      number = found->second.number;
    }
  }
  if (!stream) {
    return;
  }
  c10::impl::VirtualGuardImpl(stream->device_type()).synchronizeStream(*stream);
  // Erase the entry only now: until the wait ends, operators of other threads must find it. Keep the entry of a newer
  // write.
  const std::lock_guard lock(table.mutex);
  if (const auto found = table.written.find(storage); found != table.written.end() && found->second.number == number) {
    table.written.erase(found);
    any_written.store(!table.written.empty(), std::memory_order_relaxed);
  }
}

void finish_deferred_updates_of(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) {
    finish_deferred_updates_of(tensor.storage().unsafeGetStorageImpl());
  }
}

void run_deferred_updates() {
  run_those(collect_all);
}

} // namespace torch_uvm
