// A policy's decisions while operators match its schedule.
#include <algorithm>

#include "residency/policy/policy.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

constexpr std::size_t kMaxCaughtUp = 512; // maximum number of scheduled fetches to look at when catching up

} // namespace

void Policy::add_to(std::vector<StorageId>& storages_to_move, std::uint32_t value) const {
  const StorageId storage = matcher_.current()->bound[value];
  const StorageState* state = storage == kNoStorage ? nullptr : storages_.find(storage);
  if (state != nullptr && !state->pinned) {
    storages_to_move.push_back(storage);
  }
}

void Policy::advise() {
  KnownSchedule& known = *matcher_.current();
  if (known.options != options_version_) {
    solve(known);
    catch_up_ = true;
    decision_.forget = true;
  }
  const std::uint32_t position = matcher_.position();
  for (const std::uint32_t value : known.schedule.retire[position]) {
    add_to(decision_.retire, value);
  }
  for (const std::uint32_t value : known.schedule.write_back[position]) {
    add_to(decision_.write_back, value);
  }
  if (catch_up_) {
    ask_for_what_is_due(known);
  }
  for (const std::uint32_t value : known.schedule.fetch[position]) {
    add_to(decision_.fetch, value);
  }
}

/// Issues the fetches scheduled before this position whose uses are still ahead.
void Policy::ask_for_what_is_due(const KnownSchedule& known) {
  const std::uint32_t position = matcher_.position(), size = known.schedule.iteration.size();
  const std::vector<Fetch>& fetches = known.schedule.fetches;
  const auto next = std::upper_bound(fetches.begin(), fetches.end(), position,
                                     [](std::uint32_t op, const Fetch& fetch) { return op < fetch.need; });
  const std::size_t start = static_cast<std::size_t>(next - fetches.begin());
  for (std::size_t at = 0; at < std::min(fetches.size(), kMaxCaughtUp); ++at) {
    const Fetch& it = fetches[(start + at) % fetches.size()];
    const std::uint32_t ahead = (it.need + size - it.issue) % size; // at least 1
    const std::uint32_t left = (it.need + size - position) % size;
    if (left != 0 && left < ahead) {
      add_to(decision_.fetch, it.value);
    }
  }
  catch_up_ = false;
}

} // namespace torch_uvm
