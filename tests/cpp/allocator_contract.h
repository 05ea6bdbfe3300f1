// The allocator's contract: cases that must pass on every runtime and with every source of segments. A test file makes
// a rig for each combination and registers the suite under a prefix.
#pragma once

#include <string>
#include <vector>

#include "allocator_contract_figures.h"
#include "allocator_contract_pressure.h"
#include "allocator_contract_requests.h"
#include "allocator_contract_reuse.h"
#include "allocator_rig.h"

namespace contract {

/// A case and its name.
struct ContractCase {
  const char* name;
  void (*run)(const MakeRig&);
};

inline const std::vector<ContractCase>& contract_cases() {
#define TORCH_UVM_CASE(name) \
  ContractCase {             \
    #name, name              \
  }
  static const std::vector<ContractCase> cases{
      TORCH_UVM_CASE(zero_bytes_need_no_memory),
      TORCH_UVM_CASE(blocks_are_aligned_and_apart),
      TORCH_UVM_CASE(unknown_homes_and_streams_are_refused),
      TORCH_UVM_CASE(the_host_is_a_home_of_managed_memory_only),
      TORCH_UVM_CASE(a_freed_block_is_reused),
      TORCH_UVM_CASE(the_best_fit_is_taken_lowest_address_first),
      TORCH_UVM_CASE(neighbours_coalesce_in_any_order),
      TORCH_UVM_CASE(homes_do_not_share_blocks),
      TORCH_UVM_CASE(another_stream_takes_a_block_before_a_new_segment_is_made),
      TORCH_UVM_CASE(blocks_with_recorded_streams_are_reused),
      TORCH_UVM_CASE(a_moved_block_belongs_to_its_new_home),
      TORCH_UVM_CASE(addresses_find_their_block),
      TORCH_UVM_CASE(statistics_follow_what_happens),
      TORCH_UVM_CASE(the_total_peak_is_the_peak_of_the_sum),
      TORCH_UVM_CASE(statistics_reset_by_home),
      TORCH_UVM_CASE(the_snapshot_shows_every_byte),
      TORCH_UVM_CASE(out_of_memory_errors_say_where_the_bytes_are),
      TORCH_UVM_CASE(absurd_sizes_are_out_of_memory),
      TORCH_UVM_CASE(cached_segments_are_released_under_pressure),
      TORCH_UVM_CASE(free_neighbours_of_other_streams_are_merged_under_pressure),
      TORCH_UVM_CASE(pressure_callbacks_run_with_no_lock_held),
      TORCH_UVM_CASE(the_limit_is_never_exceeded),
  };
#undef TORCH_UVM_CASE
  return cases;
}

inline bool register_contract(const std::string& prefix, const MakeRig& make) {
  for (const ContractCase& test : contract_cases()) {
    harness::Registrar(prefix + "_" + test.name, [test, make] { test.run(make); });
  }
  return true;
}

} // namespace contract
