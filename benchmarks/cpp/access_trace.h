// An access trace (docs/annex.md) as a playable program: operators with the storages that they use, create and free.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/error.h"

namespace play {

using Id = std::uint64_t; ///< a storage's number in the trace

struct Made {
  Id id = 0;
  std::size_t bytes = 0;
};

struct Use {
  Id id = 0;
  bool writes = false;
};

struct Op {
  std::string name;
  bool in_place_ok = false;
  std::vector<Made> found; ///< created before the operator, by an operator that the trace does not name
  std::vector<Use> uses;
  std::vector<Made> births;
  std::size_t workspace = 0;
  std::vector<Id> deaths; ///< freed after the operator
  unsigned marks = 0; ///< step boundaries after the operator
};

/// Consecutive operators whose device time was measured.
struct Group {
  std::size_t first = 0; ///< index of the first one
  std::size_t ops = 0;
  double us = 0;
};

struct Trace {
  std::vector<Made> found; ///< existed before the first operator
  std::vector<Op> ops;
  std::vector<Group> groups;
  std::vector<std::size_t> ends; ///< for each step, the index behind its last operator
  std::map<Id, std::size_t> bytes; ///< of every storage
};

/// Reads the lines that `AccessRecorder` writes for one device.
class TraceReader {
 public:
  /// \throws InvalidArgument with the line that is not valid
  static Trace read(std::istream& file) {
    TraceReader reader;
    std::string text;
    while (std::getline(file, text)) {
      ++reader.number_;
      reader.text_ = text;
      reader.line();
    }
    reader.require(reader.number_ > 0, "the file is empty");
    return std::move(reader.trace_);
  }

 private:
  void require(bool fits, const std::string& what) const {
    if (!fits) {
      throw torch_uvm::InvalidArgument("line " + std::to_string(number_) + " of the trace: " + what);
    }
  }

  bool begins_with(std::string_view key) const {
    return text_.starts_with("{\"" + std::string(key) + "\":");
  }

  std::string_view after(std::string_view key) const {
    const std::string quoted = "\"" + std::string(key) + "\": ";
    const std::size_t at = text_.find(quoted);
    require(at != text_.npos, "no \"" + std::string(key) + "\" in it");
    return text_.substr(at + quoted.size());
  }

  template <typename T = Id>
  T number(std::string_view text) const {
    T value = 0;
    require(std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc{},
            "no number where one is due");
    return value;
  }

  Made made(std::string_view key) {
    require(number(after("device")) == 0, "of another device than 0; what is played has one");
    const Made found{number(after(key)), static_cast<std::size_t>(number(after("bytes")))};
    trace_.bytes.emplace(found.id, found.bytes);
    return found;
  }

  void use(std::string_view key, bool writes) {
    std::string_view list = after(key);
    require(list.starts_with('['), "no list where one is due");
    const std::size_t end = list.find(']');
    require(end != list.npos, "a list without an end");
    list = list.substr(1, end - 1);
    while (!list.empty()) {
      const Id id = number(list);
      require(known_.contains(id), "storage " + std::to_string(id) + " is used before anything is said of it");
      trace_.ops.back().uses.push_back({id, writes});
      const std::size_t comma = list.find(", ");
      list = comma == list.npos ? std::string_view{} : list.substr(comma + 2);
    }
  }

  void line() {
    if (number_ == 1) {
      require(begins_with("format") && after("format").starts_with("\"torch_uvm accesses\"") &&
                  number(after("version")) >= 1 && number(after("version")) <= 5,
              "this is not a trace of accesses, version 1 to 5");
    } else if (begins_with("storage")) {
      const Made found = made("storage");
      if (known_.insert(found.id).second) {
        (trace_.ops.empty() ? trace_.found : found_).push_back(found);
      }
    } else if (begins_with("operator")) {
      Op& op = trace_.ops.emplace_back();
      const std::string_view name = after("operator");
      require(name.starts_with('"') && name.find('"', 1) != name.npos, "an operator without a name");
      op.name = name.substr(1, name.find('"', 1) - 1);
      op.in_place_ok = after("in_place_ok").starts_with("true");
      op.found.swap(found_);
      use("reads", false);
      use("writes", true);
    } else if (begins_with("birth")) {
      require(!trace_.ops.empty(), "a birth before the first operator");
      trace_.ops.back().births.push_back(made("birth"));
      known_.insert(trace_.ops.back().births.back().id);
    } else if (begins_with("death")) {
      const Id id = number(after("death"));
      if (trace_.ops.empty()) {
        std::erase_if(trace_.found, [id](const Made& found) { return found.id == id; });
        known_.erase(id);
      } else if (known_.erase(id) != 0) { // otherwise it was never used
        trace_.ops.back().deaths.push_back(id);
      }
    } else if (begins_with("workspace")) {
      require(!trace_.ops.empty(), "a workspace before the first operator");
      trace_.ops.back().workspace = static_cast<std::size_t>(number(after("workspace")));
    } else if (begins_with("ran")) {
      const Group group{number(after("ran")), number(after("operators")), number<double>(after("us"))};
      require(group.first <= trace_.ops.size() && group.ops <= trace_.ops.size() - group.first,
              "operators that have not begun");
      trace_.groups.push_back(group);
    } else if (begins_with("step")) {
      const std::size_t last = trace_.ends.empty() ? 0 : trace_.ends.back();
      if (trace_.ops.size() > last) {
        trace_.ends.push_back(trace_.ops.size());
      }
      if (!trace_.ops.empty()) {
        ++trace_.ops.back().marks;
      }
    } else {
      require(begins_with("transfer") || begins_with("took") || begins_with("held") || begins_with("resident"),
              "what it says is not known");
    }
  }

  std::string_view text_;
  std::size_t number_ = 0;
  Trace trace_;
  std::set<Id> known_; ///< live storages
  std::vector<Made> found_; ///< created since the latest operator
};

/// Cuts the trace into steps of this many operators, the last one at its end, whatever its marks say: an optimizer for
/// each parameter marks many.
inline void cut_evenly(Trace& trace, std::size_t operators) {
  trace.ends.clear();
  for (std::size_t end = trace.ops.size() % operators; end <= trace.ops.size(); end += operators) {
    if (end > 0) {
      trace.ends.push_back(end);
    }
  }
}

/// A step that can be repeated: each storage that it inherits from the previous step is the corresponding one that it
/// created itself.
struct Loop {
  std::size_t begin = 0, end = 0; ///< range of operators in the trace
  std::vector<std::pair<Id, Id>> heirs; ///< before each repetition, the storage numbered `second` becomes `first`
};

/// Returns the second-to-last step. The last step is not usable: a program usually ends in it and frees everything.
/// \throws InvalidArgument if the trace has fewer than three steps, or if the step before it differs
inline Loop repeated_step(const Trace& trace) {
  const std::size_t steps = trace.ends.size();
  if (steps < 3) {
    throw torch_uvm::InvalidArgument("the trace has " + std::to_string(steps) + " steps; at least 3 are needed");
  }
  Loop loop{trace.ends[steps - 3], trace.ends[steps - 2], {}};
  const std::size_t before = steps > 3 ? trace.ends[steps - 4] : 0, size = loop.end - loop.begin;
  bool alike = loop.begin - before == size;
  std::set<Id> wanted; // storages that the step uses or frees
  for (std::size_t at = loop.begin; alike && at < loop.end; ++at) {
    const Op &op = trace.ops[at], &earlier = trace.ops[at - size];
    alike = op.name == earlier.name && op.births.size() == earlier.births.size();
    for (const Use& use : op.uses) {
      wanted.insert(use.id);
    }
    wanted.insert(op.deaths.begin(), op.deaths.end());
  }
  if (!alike) {
    throw torch_uvm::InvalidArgument("steps " + std::to_string(steps - 2) + " and " + std::to_string(steps - 1) +
                                     " of the trace are not alike; one that was begun later may do");
  }
  for (std::size_t at = loop.begin; at < loop.end; ++at) {
    for (std::size_t index = 0; index < trace.ops[at].births.size(); ++index) {
      const Id earlier = trace.ops[at - size].births[index].id;
      if (wanted.contains(earlier)) {
        loop.heirs.emplace_back(earlier, trace.ops[at].births[index].id);
      }
    }
  }
  return loop;
}

} // namespace play
