#include "tensor/storage/labels.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "tensor/process/process_engine.h"
#include "tensor/storage/block_storage.h"

namespace torch_uvm {
namespace {

using Storages = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

struct Owner;
Owner* owner_of(const c10::DataPtr& data);

struct Owner final : c10::intrusive_ptr_target {
  explicit Owner(bool resizable) : resizable(resizable) {}

  c10::DataPtr data; ///< frees the block
  const bool resizable; ///< whether the first storage was resizable before it was shared
  std::mutex mutex; // leaf
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> labels;

  /// Locks the mutex.
  /// \param keep receives strong references to the labels' storages, to be released without the mutex: making and
  ///        releasing them may take the GIL, whose holder may wait for the mutex
  /// \throws std::bad_alloc
  std::unique_lock<std::mutex> lock(Storages& keep) {
    std::unique_lock held(mutex);
    for (std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen; seen != labels;) {
      seen = labels;
      held.unlock();
      keep.clear();
      for (const auto& label : seen) {
        keep.push_back(label.lock());
      }
      held.lock();
    }
    return held;
  }

  /// The live storages on these bytes. Removes expired entries, and storages whose bytes PyTorch has replaced
  /// (share_memory_(), a resize, a swap with another storage). Requires the mutex.
  /// \param keep of `lock`
  /// \param known a storage that is on these bytes; added if it is not listed, as after a swap
  /// \throws std::bad_alloc with no label lost
  std::vector<c10::StorageImpl*> live(const Storages& keep, c10::StorageImpl* known = nullptr) {
    std::vector<c10::StorageImpl*> storages;
    storages.reserve(labels.size() + 1);
    auto next = keep.begin();
    std::erase_if(labels, [&](const auto& /*label*/) {
      c10::StorageImpl* storage = (next++)->get();
      if (storage == nullptr || owner_of(storage->_mutable_data_ptr_no_checks()) != this) {
        return true;
      }
      storages.push_back(storage);
      return false;
    });
    if (known != nullptr && std::find(storages.begin(), storages.end(), known) == storages.end()) {
      list(known);
      storages.push_back(known);
    }
    return storages;
  }

  void list(c10::StorageImpl* storage) {
    labels.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }
};

void release_owner(void* pointer);

Owner* owner_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release_owner ? static_cast<Owner*>(data.get_context()) : nullptr;
}

void release_owner(void* pointer) {
  auto* owner = static_cast<Owner*>(pointer);
  Storages keep;
  try {
    const auto lock = owner->lock(keep);
    const auto live = owner->live(keep);
    if (live.size() == 1) {
      live.front()->set_resizable(owner->resizable); // only one storage is left: it may grow again
    }
  } catch (const std::bad_alloc&) { // the last storage stays of fixed size
  }
  if (is_own_block(owner->data) && c10::raw::intrusive_ptr::use_count(owner) > 1) {
    forget_outlived(static_cast<Block*>(owner->data.get_context()));
  }
  c10::raw::intrusive_ptr::decref(owner);
}

c10::DataPtr labelled(Owner* owner, c10::Device device) {
  c10::raw::intrusive_ptr::incref(owner);
  return {owner->data.get(), owner, &release_owner, device};
}

/// Transfers the ownership of the bytes to a new DataPtr. `data` keeps its pointer but frees nothing.
c10::DataPtr take_over(c10::DataPtr& data, c10::Device device) {
  c10::DataPtr taken(data.get(), data.get_context(), data.get_deleter(), device);
  data.release_context(); // does not clear the pointer: another thread may be reading it
  return taken;
}

// Serialises changes between exclusive and shared ownership: two threads may make the first move of the same tensor.
// Lock order: the engine's mutex first.
std::mutex first_moves;

/// The storage's owner, found or created. The caller gets a strong reference: another thread may call take_off_labels
/// before the caller is done.
c10::intrusive_ptr<Owner> make_owner(c10::StorageImpl* storage) {
  const std::optional<Engine::Lock> engine = lock_engine(); // it may be reading the storage on another thread
  const std::lock_guard lock(first_moves);
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (Owner* owner = owner_of(data)) {
    return c10::intrusive_ptr<Owner>::reclaim_copy(owner);
  }
  const c10::Device device = data.device();
  auto owner = c10::make_intrusive<Owner>(storage->resizable());
  owner->list(storage);
  owner->data = take_over(data, device); // last: from here on nothing may throw
  storage->set_data_ptr_noswap(labelled(owner.get(), device));
  return owner;
}

} // namespace

bool has_owner(const c10::DataPtr& data) {
  return data.get_deleter() == &release_owner;
}

const c10::DataPtr& data_behind_labels(const c10::DataPtr& data) {
  const Owner* owner = owner_of(data);
  return owner == nullptr ? data : owner->data;
}

c10::Storage with_label(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const c10::intrusive_ptr<Owner> owner = make_owner(impl);
  // Declared before the lock: if an allocation below throws, their destructors call release_owner, which locks.
  Storages keep;
  c10::DataPtr data;
  c10::intrusive_ptr<c10::StorageImpl> made;
  const auto lock = owner->lock(keep);
  const std::vector<c10::StorageImpl*> live = owner->live(keep, impl);
  for (c10::StorageImpl* storage_there : live) {
    if (storage_there->device() == device) {
      return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_there));
    }
  }
  data = labelled(owner.get(), device);
  made = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(data),
                                               allocator, /*resizable=*/false);
  owner->list(made.get());
  // Growing one storage would leave the others with the old bytes, or overrun the block.
  for (c10::StorageImpl* storage_there : live) {
    storage_there->set_resizable(false);
  }
  return c10::Storage(std::move(made));
}

bool take_off_labels(c10::StorageImpl* storage) {
  const std::lock_guard lock(first_moves);
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  Owner* const owner = owner_of(data);
  if (owner == nullptr || c10::raw::intrusive_ptr::use_count(owner) != 1) {
    return false;
  }
  c10::DataPtr bytes = take_over(owner->data, data.device());
  data.release_context();
  storage->set_data_ptr_noswap(std::move(bytes));
  c10::raw::intrusive_ptr::decref(owner);
  return true;
}

std::optional<std::size_t> labels_of(const c10::Storage& storage) {
  c10::intrusive_ptr<Owner> owner;
  {
    std::lock_guard lock(first_moves);
    const c10::DataPtr& data = data_of(storage);
    if (Owner* found = owner_of(data)) {
      owner = c10::intrusive_ptr<Owner>::reclaim_copy(found);
    } else {
      return std::nullopt;
    }
  }
  Storages keep;
  const auto lock = owner->lock(keep);
  return owner->live(keep, storage.unsafeGetStorageImpl()).size();
}

} // namespace torch_uvm
