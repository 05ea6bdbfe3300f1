// Device labels: several storages with different devices that share the same managed bytes. A move creates them.
//
// A managed block starts with one storage. The first move transfers the block to a reference-counted owner, which all
// storages on the block then share; each storage has one device label. The owner has weak references to its storages.
// The block lives as long as any of them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <optional>

namespace torch_uvm {

/// The storage labelled `device` on the bytes of `storage`: an existing one, or a new one. While bytes have several
/// labels, none of their storages can be resized.
/// \param storage managed; may have labels already
c10::Storage with_label(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator);

/// Gives a labelled storage exclusive ownership of its bytes again, if it is the last storage on them.
/// \return whether it was the last
bool take_off_labels(c10::StorageImpl* storage);

/// The number of live storages that share these bytes; nullopt if the storage has no owner.
std::optional<std::size_t> labels_of(const c10::Storage& storage);

/// The storage's DataPtr, also while PyTorch refuses access to it since an update is pending (deferred_updates.h).
inline const c10::DataPtr& data_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

/// Whether the storage is labelled (its deleter is an owner's).
bool has_owner(const c10::DataPtr& data);
/// The DataPtr that frees the bytes: the owner's for a labelled storage, else `data` itself.
const c10::DataPtr& data_behind_labels(const c10::DataPtr& data);

} // namespace torch_uvm
