// Several labels of the same bytes: what a move makes.
//
// A managed block starts with one storage. The first move gives the block to an owner, which every
// storage on it then shares; each storage has one device label. The owner knows all its labels, weakly:
// storages live as their tensors want, and the block as long as any of them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <optional>

namespace torch_uvm {

/// A storage on the bytes of `storage`, labelled with `device`: the one that there is, or a new one.
/// While bytes carry several labels none of their storages can be resized.
/// \param storage managed; it may have been labelled before
c10::Storage with_label(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator);

/// Makes a storage with labels one of its own bytes again, if it is the last that is on them.
/// \return whether it was the last
bool take_off_labels(c10::StorageImpl* storage);

/// How many live storages share these bytes; nullopt: the memory was never moved.
std::optional<std::size_t> labels_of(const c10::Storage& storage);

/// The deleter of labelled storages.
bool has_owner(const c10::DataPtr& data);
/// What they share: the DataPtr that frees the bytes; of other storages, their own.
const c10::DataPtr& data_behind_labels(const c10::DataPtr& data);

} // namespace torch_uvm
