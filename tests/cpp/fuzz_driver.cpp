// A driver for fuzzers without libFuzzer, which comes with clang. It runs the inputs of a corpus, then mutations of
// them. A mutation that reaches new code is kept and mutated in turn. The options are libFuzzer's.
//
//   fuzz_x [-runs=N] [-max_total_time=SECONDS] [-seed=N] [-max_len=BYTES] [-artifact_prefix=PATH] [FOLDER or FILE ...]
//
// With GCC, -fsanitize-coverage=trace-pc reports the reached code. Without it, inputs are mutated without feedback. An
// input that crashes the program is written to PATH; running the program on that file reproduces the crash.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <vector>

#include "fuzz_coverage.h"
#include "fuzz_input.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kPlaces = fuzz::reached.size();
std::array<std::uint8_t, kPlaces> known;

struct Settings {
  std::uint64_t runs = 0; ///< 0: unlimited
  double seconds = 0; ///< 0: unlimited
  std::uint64_t seed = 1;
  std::size_t longest = 4096;
  std::string artifact = "crash";
  Bytes current;
};

// Leaked: the artifact is written while the program exits.
Settings& settings() {
  static auto* all = new Settings();
  return *all;
}

void keep_current() {
  const Settings& s = settings();
  std::ofstream(s.artifact, std::ios::binary)
      .write(reinterpret_cast<const char*>(s.current.data()), static_cast<std::streamsize>(s.current.size()));
  std::fprintf(stderr, "seed %llu; the input, %zu bytes, is in %s\n", static_cast<unsigned long long>(s.seed),
               s.current.size(), s.artifact.c_str());
}

void on_signal(int signal) {
  std::signal(signal, SIG_DFL);
  keep_current();
  std::raise(signal);
}

/// Runs an input.
/// \return the number of edges that were new
std::size_t run(const Bytes& input) {
  settings().current = input;
  fuzz::reached.fill(0);
  // A copy of exactly the input's size, so that a sanitizer detects an access beyond its end.
  const Bytes exact(input);
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  std::size_t fresh = 0;
  for (std::size_t place = 0; place < kPlaces; ++place) {
    fresh += fuzz::reached[place] != 0 && known[place] == 0 ? 1 : 0;
    known[place] |= fuzz::reached[place];
  }
  return fresh;
}

std::optional<std::string> value_of(const std::string& argument, const std::string& option) {
  const std::string begin = "-" + option + "=";
  return argument.starts_with(begin) ? std::optional(argument.substr(begin.size())) : std::nullopt;
}

void read(const std::filesystem::path& path, std::vector<Bytes>& corpus) {
  if (std::filesystem::is_directory(path)) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) {
        files.push_back(entry.path());
      }
    }
    std::ranges::sort(files); // so that a seed reproduces a run
    for (const auto& file : files) {
      read(file, corpus);
    }
    return;
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t bound) {
    return random_() % bound;
  }

  Bytes change(Bytes input, const std::vector<Bytes>& corpus) {
    for (std::size_t left = 1 + below(6); left > 0; --left) {
      change_once(input, corpus[below(corpus.size())]);
    }
    if (input.size() > settings().longest) {
      input.resize(settings().longest);
    }
    return input;
  }

 private:
  void change_once(Bytes& input, const Bytes& other) {
    constexpr std::array<std::uint8_t, 8> kTelling{0, 1, 0x7f, 0x80, 0xff, 0xfe, 0x10, 0x40};
    if (input.empty()) {
      input.push_back(static_cast<std::uint8_t>(random_()));
      return;
    }
    const std::size_t at = below(input.size());
    const std::size_t length = 1 + below(std::min<std::size_t>(input.size() - at, 32));
    const auto begin = input.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = begin + static_cast<std::ptrdiff_t>(length);
    switch (below(8)) {
      case 0:
        input[at] ^= static_cast<std::uint8_t>(1U << below(8));
        break;
      case 1:
        input[at] = static_cast<std::uint8_t>(random_());
        break;
      case 2:
        input[at] = kTelling[below(kTelling.size())];
        break;
      case 3:
        input.erase(begin, end);
        break;
      case 4: {
        const Bytes piece(begin, end);
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(below(input.size() + 1)), piece.begin(), piece.end());
        break;
      }
      case 5:
        input.insert(begin, static_cast<std::uint8_t>(random_()));
        break;
      case 6: // append the end of another input
        if (!other.empty()) {
          input.erase(begin, input.end());
          const std::size_t from = below(other.size());
          input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        }
        break;
      default: // insert a part of another input
        if (!other.empty()) {
          const std::size_t from = below(other.size());
          const std::size_t count = 1 + below(std::min<std::size_t>(other.size() - from, 64));
          input.insert(begin, other.begin() + static_cast<std::ptrdiff_t>(from),
                       other.begin() + static_cast<std::ptrdiff_t>(from + count));
        }
    }
  }

  std::mt19937_64 random_;
};

} // namespace

extern "C" {
// Defined by AddressSanitizer, if the program is built with it.
void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
}

int main(int argc, char** argv) {
  Settings& s = settings();
  std::vector<Bytes> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (const auto runs = value_of(argument, "runs")) {
      s.runs = std::stoull(*runs);
    } else if (const auto seconds = value_of(argument, "max_total_time")) {
      s.seconds = std::stod(*seconds);
    } else if (const auto seed = value_of(argument, "seed")) {
      s.seed = std::stoull(*seed);
    } else if (const auto longest = value_of(argument, "max_len")) {
      s.longest = std::stoull(*longest);
    } else if (const auto artifact = value_of(argument, "artifact_prefix")) {
      s.artifact = *artifact + "crash";
    } else if (argument.starts_with('-')) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    } else {
      read(argument, corpus);
    }
  }
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(&keep_current);
  }
  std::signal(SIGABRT, &on_signal);

  corpus.emplace_back(); // the empty input
  const std::size_t given = corpus.size();
  for (const Bytes& input : corpus) {
    run(input);
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto over = [&](std::uint64_t done) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    return (s.runs != 0 && done >= s.runs) || (s.seconds != 0 && spent.count() >= s.seconds) ||
           (s.runs == 0 && s.seconds == 0);
  };
  Mutator mutator(s.seed);
  std::uint64_t done = 0;
  while (!over(done)) {
    const Bytes input = mutator.change(corpus[mutator.below(corpus.size())], corpus);
    if (run(input) > 0) {
      corpus.push_back(input);
    }
    ++done;
  }
  std::printf("%llu runs with seed %llu, %zu inputs that reached new code, %td places\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(s.seed), corpus.size() - given,
              std::ranges::count_if(known, [](std::uint8_t it) { return it != 0; }));
  return 0;
}
