#include "tensor/labels.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "tensor/managed_storage.h"

namespace torch_uvm {
namespace {

struct Owner final : c10::intrusive_ptr_target {
  struct Label {
    c10::Device device;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };

  explicit Owner(c10::DataPtr data, bool resizable) : data(std::move(data)), resizable(resizable) {}

  c10::DataPtr data; ///< frees the block
  const bool resizable; ///< what the first storage was before it was shared
  std::mutex mutex; // leaf
  std::vector<Label> labels;

  /// The live storages, dead ones forgotten. With the mutex held.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> live() {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
    std::erase_if(labels, [&](Label& label) {
      auto storage = label.storage.lock();
      if (storage) {
        storages.push_back(std::move(storage));
        return false;
      }
      return true;
    });
    return storages;
  }
};

void release_owner(void* pointer) {
  auto* owner = static_cast<Owner*>(pointer);
  {
    std::lock_guard lock(owner->mutex);
    const auto live = owner->live();
    if (live.size() == 1) {
      live.front()->set_resizable(owner->resizable); // the last one may grow again
    }
  }
  c10::raw::intrusive_ptr::decref(owner);
}

c10::DataPtr labelled(Owner* owner, c10::Device device) {
  c10::raw::intrusive_ptr::incref(owner);
  return {owner->data.get(), owner, &release_owner, device};
}

Owner* owner_of(const c10::DataPtr& data) {
  return has_owner(data) ? static_cast<Owner*>(data.get_context()) : nullptr;
}

// Two threads may move one tensor for the first time.
std::mutex first_moves;

Owner* make_owner(c10::StorageImpl* storage) {
  std::lock_guard lock(first_moves);
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (Owner* owner = owner_of(data)) {
    return owner;
  }
  const c10::Device device = data.device();
  auto owner = c10::make_intrusive<Owner>(std::move(data), storage->resizable());
  owner->labels.push_back(
      {device, c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage))});
  storage->set_data_ptr_noswap(labelled(owner.get(), device));
  return owner.get(); // kept by the storage
}

} // namespace

bool has_owner(const c10::DataPtr& data) {
  return data.get_deleter() == &release_owner;
}

Block* block_of_owner(const c10::DataPtr& data) {
  const Owner* owner = owner_of(data);
  return owner == nullptr ? nullptr : block_of(owner->data);
}

c10::Storage with_label(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  Owner* owner = make_owner(impl);
  std::lock_guard lock(owner->mutex);
  for (const auto& live : owner->live()) {
    if (live->device() == device) {
      return c10::Storage(live);
    }
  }
  auto made = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                                    labelled(owner, device), allocator, /*resizable=*/false);
  owner->labels.push_back({device, c10::weak_intrusive_ptr<c10::StorageImpl>(made)});
  // Growing one would leave the others with the old bytes, or over-run them.
  for (const auto& live : owner->live()) {
    live->set_resizable(false);
  }
  return c10::Storage(std::move(made));
}

std::size_t label_count(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  Owner* owner = owner_of(data);
  if (owner == nullptr) {
    return is_managed(data) ? 1 : 0;
  }
  std::lock_guard lock(owner->mutex);
  return owner->live().size();
}

} // namespace torch_uvm
