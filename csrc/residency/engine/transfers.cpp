#include "residency/engine/transfers.h"

#include <algorithm>

namespace torch_uvm {

bool Transfers::is_due(Rate& rate, std::size_t bytes, bool timed) noexcept {
  if ((timed || !rate.known || rate.since_timed + bytes >= kUntimed) && timed_.size() < kMaxTimed) {
    rate.since_timed = 0;
    return rate.known = true;
  }
  rate.since_timed += bytes;
  return false;
}

void Transfers::copy(Kind kind, void* dst, const void* src, std::size_t bytes, Stream stream, Staging* staging,
                     bool timed, Event read) {
  ++copies_;
  Rate& rate = rates_[static_cast<std::size_t>(kind)];
  const bool times = is_due(rate, bytes, timed);
  Event begin;
  if (times) {
    read_times(kReadAtOnce, counted_);
    begin = events_.record(staging != nullptr ? staging->begin(bytes, stream) : stream);
  }
  try {
    if (staging != nullptr) {
      staging->copy(dst, src, bytes, stream, read);
    } else {
      runtime_.copy_async(dst, src, bytes, stream);
      if (read) {
        runtime_.record_event(read, stream);
      }
    }
  } catch (...) {
    if (times) {
      give(stream.device, begin);
    }
    throw;
  }
  if (times) {
    time(kind, bytes, begin, staging != nullptr && kind == Kind::kWriteBack ? staging->link() : stream);
  } else {
    rate.untimed += bytes;
  }
  ResidencyStatistics::Traffic& traffic = kind == Kind::kFetch ? counted_.fetched : counted_.written_back;
  ++traffic.count;
  traffic.bytes += static_cast<std::int64_t>(bytes);
}

void Transfers::time(Kind kind, std::size_t bytes, Event begin, Stream stream) noexcept {
  Event end;
  try {
    end = events_.record(stream);
    timed_.push_back({kind, stream.device, bytes, begin, end, copies_});
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
  for (const Kind kind : {Kind::kFetch, Kind::kWriteBack}) {
    Rate& rate = rates_[static_cast<std::size_t>(kind)];
    if (rate.bytes != 0) {
      const double ms = rate.ms * static_cast<double>(rate.untimed) / static_cast<double>(rate.bytes);
      (kind == Kind::kFetch ? statistics.fetched : statistics.written_back).ms += ms;
      rate.untimed = 0;
    }
  }
}

void Transfers::read_times(std::size_t most, ResidencyStatistics& statistics) noexcept {
  // In order of submission. A copy that is not done yet goes to the back: copies of other streams may be done.
  for (std::size_t left = std::min(most, timed_.size()); left > 0; --left) {
    const Timed timed = timed_.front();
    timed_.pop_front();
    try {
      if (!runtime_.query_event(timed.end)) {
        timed_.push_back(timed);
        continue;
      }
      const double ms = runtime_.elapsed_ms(timed.begin, timed.end);
      (timed.kind == Kind::kFetch ? statistics.fetched : statistics.written_back).ms += ms;
      Rate& rate = rates_[static_cast<std::size_t>(timed.kind)];
      rate.bytes += timed.bytes;
      rate.ms += ms;
      if (timed.recorder != nullptr) {
        timed.recorder->took(timed.transfer, 1e3 * ms);
      }
    } catch (...) {
      // The copy has failed, its events cannot be read, or the host has no memory for the queue: it is not timed.
    }
    give(timed.device, timed.begin);
    give(timed.device, timed.end);
  }
}

} // namespace torch_uvm
