// What to do in the course of a step, planned for its steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/policy/decision.h"
#include "residency/policy/lap.h"

namespace torch_uvm::planning {

/// A fetch ahead: asked for after operator `issue` has ended, needed by `need`.
struct Fetch {
  std::uint32_t part = 0;
  std::uint32_t issue = 0;
  std::uint32_t need = 0;
};

struct NextUse {
  std::uint32_t ahead = 0; ///< operators from the latest one
  bool in_place = false;
};

struct Plan {
  Lap lap;
  std::vector<bool> leaves; ///< by event: the part leaves the device after it
  std::vector<bool> in_place; ///< by event: used on the host
  Lists retire; ///< by operator: parts that leave after it
  Lists fetch; ///< by operator: fetches that are asked for after it, in order of need
  std::vector<Fetch> fetches; ///< in order of need
};

/// Decides for each stretch between two uses of a part whether it stays (`leaves`), and which uses happen on the host
/// (`in_place`). The part that is needed the farthest away gives way to what does not fit, in steady state: laps are
/// gone through until the first has no influence any more.
void choose_what_leaves(Plan& plan, const PolicyOptions& options, std::size_t capacity);

/// Asks for each fetch as early as there is room from then on until it is needed, the nearest need first. What would
/// leave and come back at once stays.
void schedule(Plan& plan, std::size_t capacity);

Plan make_plan(Lap lap, const PolicyOptions& options);

} // namespace torch_uvm::planning
