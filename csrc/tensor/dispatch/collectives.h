// Collectives that continue after their operator has returned, on streams or threads of their backend.
//
// Record::collective keeps their operands in place until another operator uses them. That is too long for a result that
// is not used soon, and too short if the other operator uses another part of the storage. So c10d::Work tells the end.
#pragma once

#include <ATen/core/ivalue.h>

#include "residency/engine/engine.h"
#include "tensor/dispatch/observed_operators.h"

namespace torch_uvm {

/// Decides how long the operands of a collective that has just run stay in place: until `work` is done. If there is
/// none, they may move at once if the collective is ordered on the current stream. If it is not, as one of a group that
/// is sent later, nobody tells its end, and they stay until another operator. Requires the engine's lock.
/// \param work a c10d::Work, which may be null
void note_collective(const Engine::Frame& frame, const c10::IValue& work, SentBy sent);

/// Lets the operands of collectives that are done move again. Not under the engine's lock.
/// \param all those of collectives under way, too: nothing moves any more
void release_collectives(bool all = false) noexcept;

} // namespace torch_uvm
