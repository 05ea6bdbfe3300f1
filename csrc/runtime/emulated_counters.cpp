#include "runtime/emulated_counters.h"

#include <algorithm>
#include <array>

namespace torch_uvm::emulated {
namespace {

using Field = std::uint64_t EmulatedCounters::*;
constexpr std::array kFields{
    &EmulatedCounters::faults_on_device,       &EmulatedCounters::faults_on_host,
    &EmulatedCounters::bytes_to_device,        &EmulatedCounters::bytes_to_host,
    &EmulatedCounters::bytes_copied_to_device, &EmulatedCounters::bytes_copied_to_host,
    &EmulatedCounters::bytes_in_place,         &EmulatedCounters::evicted_pages,
    &EmulatedCounters::dropped_pages,          &EmulatedCounters::kernels,
    &EmulatedCounters::prefetch_calls,         &EmulatedCounters::advise_calls,
    &EmulatedCounters::discard_calls,          &EmulatedCounters::copy_calls,
    &EmulatedCounters::allocate_calls,         &EmulatedCounters::free_calls,
    &EmulatedCounters::event_records,          &EmulatedCounters::synchronisations,
};
static_assert(sizeof(EmulatedCounters) == kFields.size() * sizeof(std::uint64_t), "a counter is missing from the list");

} // namespace

EmulatedCounters CounterTable::total() const {
  EmulatedCounters sum;
  for (const EmulatedCounters& row : rows_) {
    for (const Field field : kFields) {
      sum.*field += row.*field;
    }
  }
  return sum;
}

void CounterTable::reset() {
  std::fill(rows_.begin(), rows_.end(), EmulatedCounters{});
}

} // namespace torch_uvm::emulated
