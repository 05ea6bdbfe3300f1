// Adopted storages: managed ones whose bytes are a file's mapping, which the devices address as the host does.
//
// They have no block: no allocator, limit or statistic counts them. Nobody records which streams use them, so a move
// of one, and its release, wait for every device that ever had it.
#pragma once

#include <c10/core/Allocator.h>

namespace torch_uvm {

/// A DataPtr to the same bytes, which owns `mapped`.
c10::DataPtr adopted_data(c10::DataPtr mapped);

bool is_adopted(const c10::DataPtr& data);

/// Records that `device` may use the bytes from now on.
void note_adopted_use(const c10::DataPtr& data, int device);

/// Waits for the devices that may use the bytes. \throws what the runtime throws
void wait_for_adopted(const c10::DataPtr& data);

} // namespace torch_uvm
