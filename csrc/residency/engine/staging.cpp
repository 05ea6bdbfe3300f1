#include "residency/engine/staging.h"

#include <algorithm>

#include "runtime/bytes.h"

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
  at_ = used_ = 0;
}

void Staging::release(Slot& slot) noexcept {
  if (slot.memory != nullptr) {
    runtime_.free_device(slot.memory); // waits for work that may use it
  }
  for (Event* const event : {&slot.emptied, &filled_}) {
    if (*event) {
      runtime_.destroy_event(*event);
      *event = Event{};
    }
  }
  slot = Slot{};
}

void Staging::make(Slot& slot) {
  if (!filled_) {
    filled_ = runtime_.create_event(link_.device, /*timing=*/false);
  }
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

void Staging::leave(Stream stream) {
  runtime_.record_event(slots_[at_].emptied, empties(stream)); // after the copies out of all of its pieces
  slots_[at_].left = true;
  at_ = (at_ + 1) % kSlots;
  used_ = 0;
}

void Staging::open(std::size_t bytes, Stream stream) {
  if (used_ != 0 && std::min(bytes, slot_bytes_) > slot_bytes_ - used_) {
    leave(stream);
  }
  // Once for all copies that share the slot: the stream is in order, and their pieces do not overlap.
  if (slots_[at_].left) {
    runtime_.wait_event(fills(stream), slots_[at_].emptied);
    slots_[at_].left = false;
  }
}

Stream Staging::begin(std::size_t bytes, Stream stream) {
  try {
    open(bytes, stream);
  } catch (...) {
    refused_ = true; // it is not known when the slot is free again
    throw;
  }
  return fills(stream);
}

void Staging::copy(void* dst, const void* src, std::size_t bytes, Stream stream, Event read) {
  try {
    for (std::size_t done = 0; done < bytes;) {
      open(bytes - done, stream);
      char* const slot = static_cast<char*>(slots_[at_].memory) + used_;
      const std::size_t piece = std::min(slot_bytes_ - used_, bytes - done);
      const bool last = done + piece == bytes;
      // On the way to the host, the slot is filled when the managed memory has been read: one event for both.
      const Event filled = last && read && direction_ == Direction::kToHost ? read : filled_;
      runtime_.copy_async(slot, static_cast<const char*>(src) + done, piece, fills(stream));
      runtime_.record_event(filled, fills(stream));
      runtime_.wait_event(empties(stream), filled);
      runtime_.copy_async(static_cast<char*>(dst) + done, slot, piece, empties(stream));
      used_ = std::min(round_up(used_ + piece, std::size_t{512}), slot_bytes_); // aligned as memory is
      done += piece;
    }
    // Record `emptied` now if the next copy is unlikely to fit: by then the stream may wait for something else.
    if (used_ > slot_bytes_ / 2) {
      leave(stream);
    }
  } catch (...) {
    refused_ = true;
    throw;
  }
}

} // namespace torch_uvm
