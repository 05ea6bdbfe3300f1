#include "residency/engine/staging.h"

#include <algorithm>

namespace torch_uvm {

Staging::Staging(ManagedRuntime& runtime, Direction direction, Stream link)
    : runtime_(runtime), direction_(direction), link_(link) {}

Staging::~Staging() {
  resize(0);
}

void Staging::resize(std::size_t slot_bytes) noexcept {
  if (slot_bytes == slot_bytes_ && !refused_) {
    return;
  }
  for (Slot& slot : slots_) {
    release(slot);
  }
  slot_bytes_ = slot_bytes;
  refused_ = false;
}

void Staging::release(Slot& slot) noexcept {
  if (slot.memory != nullptr) {
    runtime_.free_device(slot.memory); // waits for work that may use it
  }
  for (const Event event : {slot.filled, slot.emptied}) {
    if (event) {
      runtime_.destroy_event(event);
    }
  }
  slot = Slot{};
}

void Staging::make(Slot& slot) {
  slot.filled = runtime_.create_event(link_.device, /*timing=*/false);
  slot.emptied = runtime_.create_event(link_.device, /*timing=*/false);
  slot.memory = runtime_.allocate_device(slot_bytes_, link_.device);
}

bool Staging::is_ready() noexcept {
  if (slot_bytes_ == 0 || refused_) {
    return false;
  }
  if (slots_.back().memory == nullptr) {
    try {
      std::ranges::for_each(slots_, [this](Slot& slot) { make(slot); });
    } catch (...) { // no device memory: copies are direct, and slower
      std::ranges::for_each(slots_, [this](Slot& slot) { release(slot); });
      refused_ = true;
    }
  }
  return !refused_;
}

void Staging::wait_until_empty(Slot& slot, Stream stream) {
  if (slot.used) {
    runtime_.wait_event(stream, slot.emptied);
  }
}

Stream Staging::begin(Stream stream) {
  const Stream first = direction_ == Direction::kToDevice ? link_ : stream;
  wait_until_empty(slots_[next_], first);
  return first;
}

void Staging::copy(void* dst, const void* src, std::size_t bytes, Stream stream) {
  const Stream fills = direction_ == Direction::kToDevice ? link_ : stream;
  const Stream empties = direction_ == Direction::kToDevice ? stream : link_;
  try {
    for (std::size_t done = 0; done < bytes;) {
      Slot& slot = slots_[next_];
      const std::size_t piece = std::min(slot_bytes_, bytes - done);
      wait_until_empty(slot, fills);
      runtime_.copy_async(slot.memory, static_cast<const char*>(src) + done, piece, fills);
      runtime_.record_event(slot.filled, fills);
      runtime_.wait_event(empties, slot.filled);
      runtime_.copy_async(static_cast<char*>(dst) + done, slot.memory, piece, empties);
      runtime_.record_event(slot.emptied, empties);
      slot.used = true;
      next_ = (next_ + 1) % kSlots;
      done += piece;
    }
  } catch (...) {
    refused_ = true; // it is not known when the slot is free again
    throw;
  }
}

} // namespace torch_uvm
