#include "residency/engine/transfers.h"

#include <algorithm>

namespace torch_uvm {

void Transfers::copy(Kind kind, void* dst, const void* src, std::size_t bytes, Stream stream, Staging* staging) {
  read_times(kReadAtOnce, counted_);
  ++copies_;
  const bool times = timed_.size() < kMaxTimed;
  const Stream first = staging != nullptr ? staging->begin(stream) : stream;
  const Stream last = staging != nullptr && kind == Kind::kWriteBack ? staging->link() : stream;
  const Event begin = times ? events_.record(first) : Event{};
  try {
    if (staging != nullptr) {
      staging->copy(dst, src, bytes, stream);
    } else {
      runtime_.copy_async(dst, src, bytes, stream);
    }
  } catch (...) {
    if (times) {
      give(stream.device, begin);
    }
    throw;
  }
  if (times) {
    time(kind, begin, last);
  }
  ResidencyStatistics::Traffic& traffic = kind == Kind::kFetch ? counted_.fetched : counted_.written_back;
  ++traffic.count;
  traffic.bytes += static_cast<std::int64_t>(bytes);
}

void Transfers::time(Kind kind, Event begin, Stream stream) noexcept {
  Event end;
  try {
    end = events_.record(stream);
    timed_.push_back({kind, stream.device, begin, end, copies_});
  } catch (...) { // the copy is queued; it is just not timed
    give(stream.device, begin);
    if (end) {
      give(stream.device, end);
    }
  }
}

void Transfers::record_latest(AccessRecorder& recorder, std::uint64_t number) noexcept {
  if (!timed_.empty() && timed_.back().copy == copies_) {
    timed_.back().recorder = &recorder;
    timed_.back().transfer = number;
  }
}

void Transfers::end_recording(ResidencyStatistics& statistics) noexcept {
  collect(statistics);
  for (Timed& timed : timed_) {
    timed.recorder = nullptr;
  }
}

void Transfers::collect(ResidencyStatistics& statistics) noexcept {
  if (&statistics != &counted_) {
    for (auto traffic : {&ResidencyStatistics::fetched, &ResidencyStatistics::written_back}) {
      (statistics.*traffic).count += (counted_.*traffic).count;
      (statistics.*traffic).bytes += (counted_.*traffic).bytes;
      (statistics.*traffic).ms += (counted_.*traffic).ms;
      counted_.*traffic = {};
    }
  }
  read_times(timed_.size(), statistics);
}

void Transfers::read_times(std::size_t most, ResidencyStatistics& statistics) noexcept {
  // In order of submission. A copy that is not done yet goes to the back: copies of other streams may be done.
  for (std::size_t left = std::min(most, timed_.size()); left > 0; --left) {
    const Timed timed = timed_.front();
    timed_.pop_front();
    try {
      if (!runtime_.query_event(timed.end)) {
        timed_.push_back(timed); // cannot throw: it was just taken from the front
        continue;
      }
      const double ms = runtime_.elapsed_ms(timed.begin, timed.end);
      (timed.kind == Kind::kFetch ? statistics.fetched : statistics.written_back).ms += ms;
      if (timed.recorder != nullptr) {
        timed.recorder->took(timed.transfer, 1e3 * ms);
      }
    } catch (...) {
      // The copy has failed or its events cannot be read: it is not timed.
    }
    give(timed.device, timed.begin);
    give(timed.device, timed.end);
  }
}

} // namespace torch_uvm
