// Plays an access trace (docs/annex.md) through the engine and the allocator under other budgets, in modelled time:
//
//   play_accesses TRACE --budget BYTES,... [--iteration OPERATORS] [--repeat N] [--step-ms MS] [--staging BYTES]
//   ... [--races yes] [--streams N] [--host-us US] [--copy-us US]
//
// Plays every step except the last one, in which a program ends, then repeats the second-to-last step N times
// (--repeat, default 20), and again until a schedule is chosen. A row shows the means of ten steps after that.
// --iteration cuts the trace into steps of so many operators, whatever its marks say.
//
// The profile h200 gives the duration of copies, of operators that access host memory and of copies within the device.
// Operators take as long as the trace says (`ran`), or else as their bytes take or, for matrix products, their
// arithmetic at 600 TFLOP/s in bf16. --step-ms, the measured duration of a step in core, scales these durations. The
// times at which operators were queued are not used, since they include waits. Not modelled: other threads, and pins by
// bare addresses.
//
// --host-us and --copy-us are what the program takes the host per operator, and the engine per copy: 0, if the
// durations are measured.
//
// --races checks that all work of the engine and of the allocator is ordered, and that every operator reads the bytes
// that were written last (race_detector.h). It fails otherwise. No steps are played beyond --repeat then. With
// --streams the program runs its operators on N streams in turn.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "access_player.h"

namespace {

using namespace play;

double mib(double bytes) {
  return bytes / static_cast<double>(MiB);
}

/// \throws InvalidArgument
std::vector<std::size_t> parse_list(const std::string& text) {
  std::vector<std::size_t> list;
  std::istringstream file(text);
  for (std::string each; std::getline(file, each, ',');) {
    list.push_back(parse_bytes(each));
  }
  return list;
}

void print_row(std::size_t budget, const std::vector<Figures>& figures) {
  Figures sum;
  std::size_t peak = 0;
  for (const Figures& each : figures) {
    sum.fetched += each.fetched;
    sum.written_back += each.written_back;
    sum.in_place += each.in_place;
    sum.moved += each.moved;
    sum.transfers += each.transfers;
    sum.over_budget += each.over_budget;
    sum.hits += each.hits;
    sum.misses += each.misses;
    sum.ms += each.ms;
    sum.compute_ms += each.compute_ms;
    peak = std::max(peak, each.peak);
  }
  const auto steps = static_cast<double>(figures.size());
  const auto mean = [&](std::int64_t bytes) { return mib(static_cast<double>(bytes)) / steps; };
  std::printf("%12.1f %9.0f %9.0f %9.0f %9.0f %8.2f %8.1f %8.1f %9.1f %9.2f %9.0f %9.2f\n",
              mib(static_cast<double>(budget)), mean(sum.fetched), mean(sum.written_back), mean(sum.in_place),
              mean(sum.moved), static_cast<double>(sum.over_budget) / steps, static_cast<double>(sum.hits) / steps,
              static_cast<double>(sum.misses) / steps, mib(static_cast<double>(peak)), sum.compute_ms / steps,
              static_cast<double>(sum.transfers) / steps, sum.ms / steps);
  std::fflush(stdout);
}

constexpr int kLongest = 60; // steps until schedules are final
constexpr int kSettling = 4; // steps until storages are where the chosen schedule has them
constexpr int kCounted = 10; // steps in a row of the table

int run(const std::vector<std::string>& arguments) {
  const std::string usage =
      "TRACE --budget BYTES,... [--iteration OPERATORS] [--repeat N] [--step-ms MS] [--staging BYTES] [--races yes] "
      "[--streams N] [--host-us US] [--copy-us US]";
  if (arguments.empty()) {
    throw InvalidArgument("no trace is named; " + usage);
  }
  std::ifstream file(arguments[0]);
  if (!file) {
    throw InvalidArgument("cannot read " + arguments[0]);
  }
  std::vector<std::size_t> budgets;
  Settings settings;
  int repeat = 20;
  double step_ms = 0;
  std::size_t iteration = 0;
  for (std::size_t i = 1; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    const std::string value = i + 1 < arguments.size() ? arguments[i + 1] : "";
    if (name == "--budget") {
      budgets = parse_list(value);
    } else if (name == "--repeat") {
      repeat = std::stoi(value);
    } else if (name == "--step-ms") {
      step_ms = std::stod(value);
    } else if (name == "--iteration") {
      iteration = std::stoul(value);
    } else if (name == "--host-us") {
      settings.host_us = std::stod(value);
    } else if (name == "--copy-us") {
      settings.copy_us = std::stod(value);
    } else if (name == "--staging") {
      settings.staging = parse_bytes(value);
    } else if (name == "--races") {
      settings.find_races = value == "yes";
    } else if (name == "--streams") {
      settings.streams = std::stoul(value);
    } else {
      throw InvalidArgument("\"" + name + "\" is not accepted; " + usage + " are");
    }
  }
  if (budgets.empty() || repeat < 0) {
    throw InvalidArgument("a budget is needed; " + usage);
  }
  Trace trace = TraceReader::read(file);
  if (iteration > 0) {
    cut_evenly(trace, iteration);
  }
  if (step_ms > 0) {
    settings.budget = std::size_t{1} << 50;
    settings.scale = step_ms / Player(trace, settings).play(0).back().compute_ms;
  }
  std::printf("%12s %9s %9s %9s %9s %8s %8s %8s %9s %9s %9s %9s\n", "budget", "fetched", "written", "in place", "moved",
              "over", "hits", "misses", "peak", "compute", "transfers", "ms");
  for (const std::size_t budget : budgets) {
    settings.budget = budget;
    Player player(trace, settings);
    std::vector<Figures> figures = player.play(repeat);
    if (!settings.find_races) {
      for (int more = 0; more < kLongest && !player.engine().is_settled({}); ++more) {
        player.repeat(1, figures);
      }
      player.repeat(kSettling + kCounted, figures);
    }
    if (player.races().faults() != 0) {
      throw std::runtime_error(std::to_string(player.races().faults()) +
                               " accesses are wrong; the first: " + player.races().first_fault());
    }
    print_row(budget, {figures.end() - std::min<std::ptrdiff_t>(kCounted, std::ssize(figures)), figures.end()});
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 2;
  }
}
