// Rows of figures: printed as they come, and written as JSON.
#pragma once

#include <cstdio>
#include <exception>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/error.h"

namespace bench {

class Report {
 public:
  using Figure = std::pair<const char*, double>;

  void add(const std::string& section, const std::string& what, std::initializer_list<Figure> figures) {
    std::string row = "\"what\": \"" + what + "\"";
    std::printf("%-10s %-40s", section.c_str(), what.c_str());
    for (const auto& [name, value] : figures) {
      char number[32];
      std::snprintf(number, sizeof number, "%.10g", value);
      row += std::string(", \"") + name + "\": " + number;
      std::printf("  %s %.6g", name, value);
    }
    std::printf("\n");
    std::fflush(stdout);
    std::string& rows = sections_[section];
    rows += (rows.empty() ? "\n  {" : ",\n  {") + row + "}";
  }

  /// \throws RuntimeFailure
  void write(const std::string& path) const {
    std::ofstream file(path);
    const char* separator = "{";
    for (const auto& [name, rows] : sections_) {
      file << separator << "\"" << name << "\": [" << rows << "\n]";
      separator = ",\n ";
    }
    file << "}\n";
    if (!file.flush()) {
      throw torch_uvm::RuntimeFailure("cannot write " + path);
    }
  }

 private:
  std::map<std::string, std::string> sections_; ///< their rows as JSON
};

/// The main function of a benchmark, whose command line is [FILE].
inline int run(int argc, char** argv, void (*measure)(Report&)) {
  try {
    if (argc > 2) {
      throw torch_uvm::InvalidArgument("accepted: [FILE], for the figures as JSON");
    }
    Report report;
    measure(report);
    if (argc == 2) {
      report.write(argv[1]);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 2;
  }
}

} // namespace bench
