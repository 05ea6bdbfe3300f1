// Access traces played through the engine in modelled time (benchmarks/cpp/play_accesses.cpp), compared with results
// worked out by hand.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "../../benchmarks/cpp/access_player.h"
#include "harness.h"
#include "runtime/emulated/cost_profile.h"

namespace {

using namespace play;

constexpr std::size_t kWeight = 8 * MiB;
constexpr std::size_t kBatch = 4 * MiB;

/// Writes a trace in the recorder's format.
class Script {
 public:
  Script() {
    text_
        << R"({"format": "torch_uvm accesses", "version": 1, "units": {"time": "us", "size": "bytes"}, "budgets": [1]})"
        << '\n';
  }
  Script& storage(Id id, std::size_t bytes) {
    text_ << R"({"storage": )" << id << R"(, "device": 0, "bytes": )" << bytes << R"(, "resident": true})" << '\n';
    return *this;
  }
  Script& op(const char* name, const std::string& reads, const std::string& writes) {
    text_ << R"({"operator": ")" << name << R"(", "time": 1.5, "in_place_ok": false, "reads": [)" << reads
          << R"(], "writes": [)" << writes << "]}\n";
    return *this;
  }
  Script& birth(Id id, std::size_t bytes) {
    text_ << R"({"birth": )" << id << R"(, "device": 0, "bytes": )" << bytes << "}\n"
          << R"({"resident": 1, "device": 0})" << '\n';
    return *this;
  }
  Script& death(Id id) {
    text_ << R"({"death": )" << id << "}\n";
    return *this;
  }
  Script& line(const std::string& text) {
    text_ << text << '\n';
    return *this;
  }
  Script& end_step() {
    // the optimizer's step ends, and the user marks the end too
    text_ << R"({"step": "end"})" << '\n' << R"({"step": "end"})" << '\n';
    return *this;
  }
  Trace read() const {
    std::istringstream file(text_.str());
    return TraceReader::read(file);
  }

 private:
  std::ostringstream text_;
};

/// Steps that write to four weights of 8 MiB in turn, each with a temporary of that many bytes.
Trace weights_in_turn(int steps, std::size_t temporary = kBatch) {
  Script script;
  for (Id weight = 1; weight <= 4; ++weight) {
    script.storage(weight, kWeight);
  }
  Id next = 10;
  for (int step = 0; step < steps; ++step) {
    for (Id weight = 1; weight <= 4; ++weight) {
      script.op("aten::mul_", "", std::to_string(weight));
      if (temporary != 0) {
        script.birth(next, temporary).death(next);
        ++next;
      }
    }
    script.end_step();
  }
  script.death(1).death(2).death(3).death(4); // the program ends
  return script.read();
}

Settings settings_of(std::size_t budget) {
  Settings settings;
  settings.budget = budget;
  settings.staging = 0;
  return settings;
}

TEST(a_trace_that_fits_transfers_nothing) {
  const Trace trace = weights_in_turn(4);
  CHECK_EQ(trace.ops.size(), std::size_t{16});
  CHECK_EQ(trace.ends.size(), std::size_t{4});
  const std::vector<Figures> figures = Player(trace, settings_of(64 * MiB)).play(5);
  CHECK_EQ(figures.size(), std::size_t{8}); // three steps of the trace and five repetitions
  const double ms = 4 * static_cast<double>(kWeight + kBatch) / CostProfile::named("h200").device_memory_rate * 1e3;
  for (const Figures& step : figures) {
    CHECK_EQ(step.fetched + step.written_back + step.in_place + step.moved + step.over_budget, 0);
    CHECK_EQ(step.hits + step.misses, 4);
    CHECK(std::abs(step.compute_ms - std::max(ms, 4 * CostProfile::named("h200").launch_us / 1e3)) < 1e-9);
    CHECK(step.ms >= step.compute_ms);
  }
  CHECK_EQ(figures.back().misses, 0);
  CHECK(figures.back().peak >= 4 * kWeight + kBatch && figures.back().peak <= 64 * MiB);
}

/// Two weights and a temporary fit. Weights are used in turn, so each step evicts and fetches at least two of the four.
/// By step 30 one of the schedules has been chosen.
TEST(a_trace_that_does_not_fit_transfers_at_least_the_lower_bound) {
  const std::size_t budget = 24 * MiB;
  const std::vector<Figures> figures = Player(weights_in_turn(4), settings_of(budget)).play(40);
  for (std::size_t step = 30; step < figures.size(); ++step) {
    const Figures& each = figures[step];
    CHECK(each.fetched >= static_cast<std::int64_t>(2 * kWeight) &&
          each.fetched <= static_cast<std::int64_t>(4 * kWeight));
    CHECK_EQ(each.fetched, each.written_back); // every weight is dirty
    CHECK_EQ(each.in_place + each.over_budget + each.misses, 0);
    CHECK_EQ(each.hits, 4);
    CHECK(each.peak <= budget);
    CHECK(each.ms >= static_cast<double>(each.fetched) / CostProfile::named("h200").copy_to_device_rate * 1e3 * 0.5);
  }
}

/// The same input produces the same figures: they depend neither on threads nor on the machine's clock.
TEST(a_trace_plays_identically_each_time) {
  const auto once = [] { return Player(weights_in_turn(5), settings_of(20 * MiB)).play(10); };
  const std::vector<Figures> first = once(), second = once();
  for (std::size_t step = 0; step < first.size(); ++step) {
    CHECK_EQ(first[step].fetched, second[step].fetched);
    CHECK_EQ(first[step].moved, second[step].moved);
    CHECK_EQ(first[step].ms, second[step].ms);
  }
}

/// A storage that a step leaves to the next one, such as a gradient, is also left to the next repetition of the step.
TEST(a_repeated_step_inherits_its_own_results) {
  Script script;
  script.storage(1, kWeight).storage(2, kBatch);
  Id inherited = 2;
  for (Id step = 0; step < 4; ++step) {
    const Id made = 10 + step;
    script.op("aten::add_", std::to_string(inherited), "1").death(inherited);
    script.op("aten::mul", "1", "").birth(made, kBatch).end_step();
    inherited = made;
  }
  const Trace trace = script.read();
  const Loop loop = repeated_step(trace);
  CHECK_EQ(loop.begin, std::size_t{4});
  CHECK_EQ(loop.end, std::size_t{6});
  CHECK_EQ(loop.heirs.size(), std::size_t{1});
  CHECK(loop.heirs.front() == std::pair(Id{11}, Id{12}));
  const std::vector<Figures> figures = Player(trace, settings_of(64 * MiB)).play(30);
  CHECK_EQ(figures.back().misses, 0);
  // No storages accumulate: thirty of them would not fit.
  CHECK_EQ(figures.back().peak, figures.front().peak);
  CHECK_EQ(figures.back().written_back, 0);
}

TEST(matrix_products_take_the_time_of_their_arithmetic) {
  const auto product = [](const char* name) {
    Script script;
    script.storage(1, 2 * 1024 * 1024).storage(2, 2 * 1024 * 1024); // 1024 x 1024 elements of bf16
    for (Id step = 0; step < 3; ++step) {
      script.op(name, "1, 2", "").birth(10 + step, 2 * 1024 * 1024).death(10 + step).end_step();
    }
    Settings settings = settings_of(64 * MiB);
    settings.arithmetic.flops = 1e12; // slow enough that the arithmetic takes longer than the bytes
    return Player(script.read(), settings).play(0).back().compute_ms;
  };
  CHECK(std::abs(product("aten::mm") - 2 * 1024.0 * 1024 * 1024 / 1e12 * 1e3) < 1e-9);
  CHECK(product("aten::add") < 0.01);
}

TEST(operators_of_a_measured_group_share_its_time) {
  Script script;
  script.storage(1, 30 * kWeight).storage(2, 10 * kWeight); // larger than what a launch takes
  for (int step = 0; step < 3; ++step) {
    script.op("aten::sin_", "", "1").op("aten::sin_", "", "2");
    script.line(R"({"ran": )" + std::to_string(2 * step) + R"(, "operators": 2, "us": 4000.5})").end_step();
  }
  const Trace trace = script.read();
  const std::vector<double> durations = durations_ms(trace, CostProfile::named("h200"), Arithmetic{});
  CHECK_EQ(durations.size(), std::size_t{6});
  CHECK(std::abs(durations[4] - 0.75 * 4.0005) < 1e-9);
  CHECK(std::abs(durations[5] - 0.25 * 4.0005) < 1e-9);
  const std::vector<Figures> figures = Player(trace, settings_of(50 * kWeight)).play(8);
  CHECK(std::abs(figures.back().compute_ms - 4.0005) < 1e-9);
  CHECK(std::abs(figures.back().ms - 4.0005) < 1e-9);
}

/// The sum of a step's groups in a trace is the time of its operators, however long they waited for memory.
void check_that_waits_are_not_timed(std::size_t temporary) {
  std::string path = (std::filesystem::temp_directory_path() / "torch_uvm_timed_XXXXXX").string();
  const int file = ::mkstemp(path.data());
  CHECK(file >= 0);
  ::close(file);
  constexpr int kSteps = 20;
  double computed = 0;
  {
    const Trace trace = weights_in_turn(4, temporary);
    Settings settings = settings_of(24 * MiB);
    settings.host_us = 0; // a host that is slower than the device counts as the operators' time
    Player player(trace, settings);
    player.engine().start_recording(path);
    double waited = 0;
    for (const Figures& step : player.play(kSteps)) {
      computed += step.compute_ms;
      waited += step.ms - step.compute_ms;
    }
    player.engine().stop_recording();
    CHECK(waited > computed); // the link is slower than the device's memory
  }
  std::ifstream written(path);
  const Trace timed = TraceReader::read(written);
  std::filesystem::remove(path);
  double us = 0;
  std::size_t operators = 0;
  for (const Group& group : timed.groups) {
    CHECK_EQ(group.first, operators);
    operators += group.ops;
    us += group.us;
  }
  CHECK_EQ(operators, std::size_t{4} * (kSteps + 3));
  CHECK(std::abs(us / 1e3 - computed) < 1e-4 * computed); // a trace has nanoseconds
}

TEST(a_recording_times_operators_without_waits_for_operands) {
  check_that_waits_are_not_timed(0);
}

TEST(a_recording_times_operators_without_waits_for_the_memory_of_results) {
  check_that_waits_are_not_timed(kWeight); // a weight leaves for each
}

TEST(an_operator_has_its_workspace_while_it_runs) {
  Script script;
  script.storage(1, kWeight).storage(2, kWeight);
  for (int step = 0; step < 3; ++step) {
    script.op("aten::sin_", "", "1").line(R"({"workspace": 8388608})").line(R"({"held": 50000.000})");
    script.op("aten::sin_", "", "2").end_step();
  }
  const Trace trace = script.read();
  const Figures last = Player(trace, settings_of(2 * kWeight + 4 * MiB)).play(3).back();
  CHECK(last.fetched >= static_cast<std::int64_t>(kWeight)); // the second weight made way for it
  CHECK_EQ(last.over_budget, 0);
}

/// As an LSTM with a large vocabulary, after measured ones: what the recurrent layers need while they run, beside
/// results of other sizes, is a sixth of the budget.
Trace recurrent_layers(int steps) {
  constexpr std::size_t kEmbedding = 469 * MiB / 16, kWeights = 768 * MiB / 16, kHidden = 3 * MiB, kLogits = 88 * MiB,
                        kReserve = 106 * MiB;
  const std::string workspace = "{\"workspace\": " + std::to_string(76 * MiB) + "}";
  Script script;
  script.storage(1, kEmbedding).storage(2, kWeights).storage(3, kEmbedding);
  std::string averages[2];
  for (Id moment = 10; moment < 38; ++moment) {
    script.storage(moment, moment < 12 || moment > 35 ? kEmbedding : 4 * MiB);
    averages[moment % 2] += (moment < 12 ? "" : ", ") + std::to_string(moment);
  }
  Id next = 100;
  for (int step = 0; step < steps; ++step, next += 100) {
    const auto id = [next](Id number) { return next + number; };
    const auto ids = [&](std::initializer_list<Id> numbers) {
      std::string text;
      for (const Id number : numbers) {
        text += (text.empty() ? "" : ", ") + std::to_string(number < 10 ? number : id(number));
      }
      return text;
    };
    script.op("aten::embedding", ids({1}), "").birth(id(10), kHidden);
    script.op("aten::lstm", ids({10, 2}), "").birth(id(11), kHidden).birth(id(12), kReserve).line(workspace);
    script.op("aten::linear", ids({11, 3}), "").birth(id(13), kHidden).birth(id(14), kLogits);
    script.op("aten::cross_entropy_loss", ids({14}), "").birth(id(15), kLogits).death(id(14));
    for (int old = 0; step > 0 && old < 3; ++old) {
      script.death(next - 100 + 20 + static_cast<Id>(old));
    }
    script.op("aten::nll_loss_backward", ids({15}), "").birth(id(16), kLogits);
    script.op("aten::_log_softmax_backward_data", ids({16, 15}), "").birth(id(17), kLogits);
    script.death(id(16)).death(id(15));
    script.op("aten::mm", ids({17, 13}), "").birth(id(20), kEmbedding);
    script.op("aten::mm", ids({17, 3}), "").birth(id(18), kHidden).death(id(17)).death(id(13));
    script.op("aten::_cudnn_rnn_backward", ids({10, 2, 11, 18}), ids({12}));
    script.birth(id(19), kHidden).birth(id(21), kWeights).line(workspace);
    script.death(id(18)).death(id(10)).death(id(11)).death(id(12));
    script.op("aten::embedding_dense_backward", ids({19}), "").birth(id(22), kEmbedding).death(id(19));
    script.op("aten::_foreach_lerp_", ids({20, 21, 22}), averages[0]);
    script.op("aten::_foreach_addcmul_", ids({20, 21, 22}), averages[1]);
    script.op("aten::_foreach_sqrt", averages[1], "");
    std::string roots;
    for (Id root = 30; root < 44; ++root) {
      script.birth(id(root), root == 30 || root == 43 ? kEmbedding : 4 * MiB);
      roots += ", " + std::to_string(id(root));
    }
    script.op("aten::_foreach_addcdiv_", averages[0] + roots, "1, 2, 3");
    for (Id root = 30; root < 44; ++root) {
      script.death(id(root));
    }
    script.end_step();
  }
  return script.read();
}

TEST(results_and_workspace_that_fit_do_not_exceed_the_budget) {
  const Trace trace = recurrent_layers(6);
  for (std::size_t budget = 440 * MiB; budget <= 470 * MiB; budget += 3 * MiB) {
    Settings settings;
    settings.budget = budget;
    std::int64_t exceeded = 0;
    const std::vector<Figures> figures = Player(trace, settings).play(24);
    for (std::size_t step = 8; step < figures.size(); ++step) {
      exceeded += figures[step].over_budget;
    }
    CHECK_EQ(exceeded, 0);
  }
}

TEST(invalid_lines_are_named) {
  const auto message = [](const Script& script) -> std::string {
    try {
      script.read();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message(Script().op("x", "7", "")).find("line 2") != std::string::npos);
  CHECK(message(Script().line(R"({"storage": 1, "device": 1, "bytes": 5, "resident": true})")).find("device") !=
        std::string::npos);
  CHECK(message(Script().line(R"({"ran": 0, "operators": 1, "us": 1})")).find("not begun") != std::string::npos);
  CHECK(message(Script().line("nonsense")).find("line 2") != std::string::npos);
  CHECK(message(Script().storage(1, 5).op("x", "1", "")).empty());
  std::istringstream other(R"({"format": "something else", "version": 1})");
  CHECK_THROWS(InvalidArgument, TraceReader::read(other));
  std::istringstream nothing("");
  CHECK_THROWS(InvalidArgument, TraceReader::read(nothing));
  CHECK_THROWS(InvalidArgument, repeated_step(weights_in_turn(2)));
}

} // namespace

HARNESS_MAIN()
