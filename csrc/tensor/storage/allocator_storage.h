// Storages whose bytes come from an allocator that somebody has chosen: an arena, a plan, a pool, an adaptor.
//
// They keep their allocator alive. Where only the address is known, as of what a kernel or c10::Allocator's raw
// functions give out, they are found by it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "allocator/allocator.h"

namespace torch_uvm {

/// \param home,stream who uses it first
/// \throws c10::OutOfMemoryError; c10::ValueError where the allocator does not serve that home
c10::DataPtr allocate_from(const std::shared_ptr<Allocator>& allocator, std::size_t bytes, Location home, Stream stream,
                           c10::Device device);

bool is_from_allocator(const c10::DataPtr& data);

/// The DataPtr of such memory of which only the address is known; empty if it is not.
c10::DataPtr allocator_data_at(void* ptr, c10::Device device);

/// Says that `stream`, too, uses the bytes.
void record_allocator_stream(const c10::DataPtr& data, Stream stream);

/// Every stream whose queued work may touch the bytes: the one that they were allocated for, and those recorded.
std::vector<Stream> allocator_streams(const c10::DataPtr& data);

} // namespace torch_uvm
