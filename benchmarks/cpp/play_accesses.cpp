// Plays an access trace (docs/traces.md) through the engine and the allocator under other budgets, in modelled time:
//
//   play_accesses TRACE --budget BYTES,... [--repeat N] [--of-these N] [--step-ms MS] [--staging BYTES] [--steps yes]
//   ... [--races yes] [--streams N]
//
// Plays every step except the last one, in which a program ends, then repeats the second-to-last step N times
// (--repeat, default 20), and again until a schedule is chosen. A row shows the means of the steps after that
// (--of-these, default 10); with --steps, each step has a row.
//
// The profile h200 gives the duration of copies, of operators that access host memory and of copies within the device.
// Operators take as long as the trace says (`ran`), or else as their bytes take or, for matrix products, their
// arithmetic at 600 TFLOP/s in bf16. --step-ms, the measured duration of a step in core, scales these durations. The
// times at which operators were queued are not used, since they include waits. Not modelled: other threads, and pins by
// bare addresses.
//
// --races checks that all work of the engine and of the allocator is ordered, and that every operator reads the bytes
// that were written last (race_detector.h). It fails otherwise. No steps are played beyond --repeat then. With
// --streams the program runs its operators on N streams in turn.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "access_player.h"
#include "byte_list.h"

namespace {

using namespace play;

double mib(double bytes) {
  return bytes / static_cast<double>(MiB);
}

std::string in_mib(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", mib(static_cast<double>(bytes)));
  return text;
}

void print_row(const char* label, const std::vector<Figures>& figures) {
  Figures sum;
  std::size_t peak = 0;
  for (const Figures& each : figures) {
    sum.fetched += each.fetched;
    sum.written_back += each.written_back;
    sum.in_place += each.in_place;
    sum.moved += each.moved;
    sum.over_budget += each.over_budget;
    sum.hits += each.hits;
    sum.misses += each.misses;
    sum.ms += each.ms;
    sum.compute_ms += each.compute_ms;
    peak = std::max(peak, each.peak);
  }
  const auto steps = static_cast<double>(figures.size());
  const auto mean = [&](std::int64_t bytes) { return mib(static_cast<double>(bytes)) / steps; };
  std::printf("%12s %9.0f %9.0f %9.0f %9.0f %8.2f %8.1f %8.1f %9.1f %9.2f %9.2f\n", label, mean(sum.fetched),
              mean(sum.written_back), mean(sum.in_place), mean(sum.moved), static_cast<double>(sum.over_budget) / steps,
              static_cast<double>(sum.hits) / steps, static_cast<double>(sum.misses) / steps,
              mib(static_cast<double>(peak)), sum.compute_ms / steps, sum.ms / steps);
  std::fflush(stdout);
}

constexpr int kLongest = 60; // steps until schedules are final
constexpr int kSettling = 4; // steps until storages are where the chosen schedule has them

int run(const std::vector<std::string>& arguments) {
  const std::string usage =
      "TRACE --budget BYTES,... [--iteration OPERATORS] [--repeat N] [--of-these N] [--step-ms MS] [--staging BYTES] "
      "[--steps yes] [--races yes] [--streams N]";
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
  std::size_t counted = 10;
  double step_ms = 0;
  std::size_t iteration = 0;
  bool each_step = false;
  for (std::size_t i = 1; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    const std::string value = i + 1 < arguments.size() ? arguments[i + 1] : "";
    if (name == "--budget") {
      budgets = parse_list(value);
    } else if (name == "--repeat") {
      repeat = std::stoi(value);
    } else if (name == "--of-these") {
      counted = std::stoul(value);
    } else if (name == "--step-ms") {
      step_ms = std::stod(value);
    } else if (name == "--iteration") {
      iteration = std::stoul(value);
    } else if (name == "--staging") {
      settings.staging = parse_bytes(value);
    } else if (name == "--races") {
      settings.find_races = value == "yes";
    } else if (name == "--streams") {
      settings.streams = std::stoul(value);
    } else if (name == "--steps") {
      each_step = value == "yes";
    } else {
      throw InvalidArgument("\"" + name + "\" is not accepted; " + usage + " are");
    }
  }
  if (budgets.empty() || repeat < 0 || counted == 0) {
    throw InvalidArgument("a budget and at least one step to count are needed; " + usage);
  }
  Trace trace = TraceReader::read(file);
  if (iteration > 0) {
    cut_evenly(trace, iteration);
  }
  if (step_ms > 0) {
    settings.budget = std::size_t{1} << 50;
    settings.scale = step_ms / Player(trace, settings).play(0).back().compute_ms;
  }
  std::printf("%12s %9s %9s %9s %9s %8s %8s %8s %9s %9s %9s\n", each_step ? "step" : "budget", "fetched", "written",
              "in place", "moved", "over", "hits", "misses", "peak", "compute", "ms");
  for (const std::size_t budget : budgets) {
    settings.budget = budget;
    Player player(trace, settings);
    std::vector<Figures> figures = player.play(repeat);
    if (!settings.find_races) {
      for (int more = 0; more < kLongest && !player.engine().predicted_ms_per_operator(); ++more) {
        player.repeat(1, figures);
      }
      player.repeat(kSettling + static_cast<int>(counted), figures);
    }
    if (player.races().faults() != 0) {
      throw std::runtime_error(std::to_string(player.races().faults()) +
                               " accesses are wrong; the first: " + player.races().first_fault());
    }
    if (each_step) {
      std::printf("%12s\n", in_mib(budget).c_str());
      for (std::size_t step = 0; step < figures.size(); ++step) {
        print_row(std::to_string(step + 1).c_str(), {figures[step]});
      }
    } else {
      print_row(in_mib(budget).c_str(),
                {figures.end() - static_cast<std::ptrdiff_t>(std::min(counted, figures.size())), figures.end()});
    }
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
