// Storages whose bytes come from a user-chosen allocator: an arena, an allocation plan, a pool or an adaptor.
//
// Each storage keeps its allocator alive. A registry finds the allocation by address, for callers that have only the
// pointer, such as c10::Allocator::raw_deallocate.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "allocator/allocator.h"

namespace torch_uvm {

/// \param home,stream location and stream of the first use
/// \throws c10::OutOfMemoryError; c10::ValueError if the allocator does not serve `home`
c10::DataPtr allocate_from(const std::shared_ptr<Allocator>& allocator, std::size_t bytes, Location home, Stream stream,
                           c10::Device device);

bool is_from_allocator(const c10::DataPtr& data);

/// The owning DataPtr of an allocation of this kind, found by its address; empty if there is none.
c10::DataPtr allocator_data_at(void* ptr, c10::Device device);

/// Records that `stream` also uses the bytes.
void record_allocator_stream(const c10::DataPtr& data, Stream stream);

/// The streams whose queued work may touch the bytes: the allocation's stream and the recorded ones.
std::vector<Stream> allocator_streams(const c10::DataPtr& data);

} // namespace torch_uvm
