// Programs that resemble training, for the simulator.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "residency_simulator.h"

namespace simulator {

/// A transformer like the measured one: width 2048, bf16, fused optimizer.
struct Transformer {
  int layers = 12;
  std::size_t width = 2048;
  std::size_t tokens = 2048;
  bool checkpointing = false;
  bool fused_optimizer = true;
  bool deferred = false; ///< each parameter is updated just before its next use
  std::string prefix = "";

  static constexpr double kFlopsPerMs = 600e9; // throughput of the measured steps
  static constexpr double kBytesPerMs = 3e9;

  std::size_t activation(double widths = 1) const {
    return static_cast<std::size_t>(static_cast<double>(tokens * width * 2) * widths);
  }
  std::size_t weight(double widths) const {
    return static_cast<std::size_t>(static_cast<double>(width * width * 2) * widths);
  }
  double product_ms(double widths) const {
    return 2.0 * static_cast<double>(tokens) * static_cast<double>(width * width) * widths / kFlopsPerMs;
  }
  double pass_ms(double widths) const {
    return static_cast<double>(activation(widths)) / kBytesPerMs;
  }
  std::string at(const std::string& name, int layer) const {
    return prefix + name + std::to_string(layer);
  }

  struct Product {
    const char* weight;
    const char* in;
    const char* out;
    double wide; ///< size of the weight, as a multiple of width * width
    double out_wide;
  };
  static const std::vector<Product>& products() {
    static const std::vector<Product> all = {
        {"qkv", "n1_", "q_", 3, 3}, {"proj", "a_", "p_", 1, 1}, {"fc1", "n2_", "f_", 4, 4}, {"fc2", "g_", "o_", 4, 1}};
    return all;
  }

  void declare(Simulator& simulator) const {
    for (int layer = 0; layer < layers; ++layer) {
      for (const Product& product : products()) {
        simulator.declare(at(product.weight, layer), weight(product.wide));
      }
    }
    for (int layer = 0; layer < layers; ++layer) {
      for (const Product& product : products()) {
        simulator.declare(at(std::string("m_") + product.weight, layer), weight(product.wide));
        simulator.declare(at(std::string("v_") + product.weight, layer), weight(product.wide));
      }
    }
  }

  /// Computes x_<layer + 1> from x_<layer>. With `keep`, keeps the activations that backward needs.
  void forward_layer(Program& program, int layer, bool keep, bool keep_updates = false) const {
    const auto n = [&](const char* name) { return at(name, layer); };
    const auto op = [&](const char* name, std::vector<Use> uses,
                        std::vector<std::pair<std::string, std::size_t>> births, double ms,
                        std::vector<std::string> dead) {
      program.push_back(
          {prefix + name, std::move(uses), std::move(births), keep ? std::vector<std::string>{} : dead, 0, false, ms});
    };
    const auto update = [&](const char* weight_name, double wide) {
      if (deferred && keep_updates) {
        const std::string w = n(weight_name), suffix = weight_name;
        program.push_back({prefix + "adamw",
                           {{w, true},
                            {n(("d_" + suffix).c_str())},
                            {n(("m_" + suffix).c_str()), true},
                            {n(("v_" + suffix).c_str()), true}},
                           {},
                           {n(("d_" + suffix).c_str())},
                           0,
                           false,
                           static_cast<double>(weight(wide)) * 7 / kBytesPerMs});
      }
    };
    const std::string x = at("x_", layer), y = at("x_", layer + 1);
    op("norm", {{x}}, {{n("n1_"), activation()}}, pass_ms(2), {});
    update("qkv", 3);
    op("mm", {{n("n1_")}, {n("qkv")}}, {{n("q_"), activation(3)}}, product_ms(3), {n("n1_")});
    op("sdpa", {{n("q_")}}, {{n("a_"), activation()}}, product_ms(1), {n("q_")});
    update("proj", 1);
    op("mm", {{n("a_")}, {n("proj")}}, {{n("p_"), activation()}}, product_ms(1), {n("a_")});
    op("add", {{x}, {n("p_")}}, {{n("h_"), activation()}}, pass_ms(3), {});
    program.back().deaths = {n("p_")};
    op("norm", {{n("h_")}}, {{n("n2_"), activation()}}, pass_ms(2), {});
    update("fc1", 4);
    op("mm", {{n("n2_")}, {n("fc1")}}, {{n("f_"), activation(4)}}, product_ms(4), {n("n2_")});
    op("gelu", {{n("f_")}}, {{n("g_"), activation(4)}}, pass_ms(8), {n("f_")});
    update("fc2", 4);
    op("mm", {{n("g_")}, {n("fc2")}}, {{n("o_"), activation()}}, product_ms(4), {n("g_")});
    op("add", {{n("h_")}, {n("o_")}}, {{y, activation()}}, pass_ms(3), {n("h_")});
    program.back().deaths.push_back(n("o_"));
  }

  /// Computes the gradient dx_<layer> from dx_<layer + 1>. Weight gradients are created or, with `accumulate`, added
  /// to.
  void backward_layer(Program& program, int layer, bool accumulate) const {
    const auto n = [&](const char* name) { return at(name, layer); };
    const auto product = [&](const Product& it, const std::string& d_out, const std::string& d_in, double in_wide) {
      program.push_back({prefix + "mm_dx",
                         {{d_out}, {n(it.weight)}},
                         {{d_in, activation(in_wide)}},
                         {},
                         0,
                         false,
                         product_ms(it.wide)});
      const std::string grad = n((std::string("d_") + it.weight).c_str());
      const std::string made = accumulate ? grad + "_new" : grad;
      program.push_back({prefix + "mm_dw",
                         {{d_out}, {n(it.in)}},
                         {{made, weight(it.wide)}},
                         {d_out, n(it.in)},
                         0,
                         false,
                         product_ms(it.wide)});
      if (accumulate) {
        program.push_back({prefix + "add_", {{grad, true}, {made}}, {}, {made}, 0, false, pass_ms(1)});
      }
    };
    const std::vector<Product>& all = products();
    const std::string dy = at("dx_", layer + 1), dx = at("dx_", layer);
    // dy is also the gradient of the residual. A copy of it is freed after fc2's product.
    program.push_back({prefix + "clone", {{dy}}, {{n("do_"), activation()}}, {}, 0, false, pass_ms(2)});
    product(all[3], n("do_"), n("dg_"), 4);
    program.push_back({prefix + "gelu_backward",
                       {{n("dg_")}, {n("f_")}},
                       {{n("df_"), activation(4)}},
                       {n("dg_"), n("f_")},
                       0,
                       false,
                       pass_ms(12)});
    product(all[2], n("df_"), n("dn2_"), 1);
    program.push_back({prefix + "norm_backward",
                       {{n("dn2_")}, {n("h_")}, {dy}},
                       {{n("dh_"), activation()}},
                       {n("dn2_"), n("h_"), dy},
                       0,
                       false,
                       pass_ms(4)});
    program.push_back({prefix + "clone", {{n("dh_")}}, {{n("dp_"), activation()}}, {}, 0, false, pass_ms(2)});
    product(all[1], n("dp_"), n("da_"), 1);
    program.push_back({prefix + "sdpa_backward",
                       {{n("da_")}, {n("q_")}},
                       {{n("dq_"), activation(3)}},
                       {n("da_"), n("q_")},
                       0,
                       false,
                       product_ms(2.5)});
    product(all[0], n("dq_"), n("dn1_"), 1);
    program.push_back({prefix + "norm_backward",
                       {{n("dn1_")}, {at("x_", layer)}, {n("dh_")}},
                       {{dx, activation()}},
                       {n("dn1_"), at("x_", layer), n("dh_")},
                       0,
                       false,
                       pass_ms(4)});
  }

  void micro_batch(Program& program, bool accumulate, bool update = false) const {
    program.push_back({prefix + "randn", {}, {{at("x_", 0), activation()}}, {}, 0, false, pass_ms(1)});
    for (int layer = 0; layer < layers; ++layer) {
      forward_layer(program, layer, !checkpointing, update);
    }
    program.push_back({prefix + "loss",
                       {{at("x_", layers)}},
                       {{at("dx_", layers), activation()}},
                       {at("x_", layers)},
                       0,
                       false,
                       pass_ms(3)});
    for (int layer = layers; layer-- > 0;) {
      if (checkpointing) {
        Program again;
        forward_layer(again, layer, true);
        again.resize(again.size() - 2); // the layer's output is not recomputed
        program.insert(program.end(), again.begin(), again.end());
      }
      backward_layer(program, layer, accumulate);
    }
    program.back().deaths.push_back(at("dx_", 0));
  }

  void optimizer(Program& program) const {
    Op all{prefix + "adamw", {}, {}, {}, 0, true, 0};
    for (int layer = 0; layer < layers; ++layer) {
      for (const Product& product : products()) {
        const std::string& weight_name = product.weight;
        if (!fused_optimizer) {
          all = {prefix + "adamw", {}, {}, {}, 0, true, 0};
        }
        all.uses.push_back({at(weight_name, layer), true});
        all.uses.push_back({at("d_" + weight_name, layer)});
        all.uses.push_back({at("m_" + weight_name, layer), true});
        all.uses.push_back({at("v_" + weight_name, layer), true});
        all.deaths.push_back(at("d_" + weight_name, layer));
        all.ms += static_cast<double>(weight(product.wide)) * 7 / kBytesPerMs;
        if (!fused_optimizer) {
          program.push_back(all);
        }
      }
    }
    if (fused_optimizer) {
      program.push_back(all);
    }
    program.back().mark = true;
  }

  /// A step that updates each parameter at its first use, with the gradients of the previous step.
  Program deferred_step(bool first) const {
    Program program;
    micro_batch(program, false, !first);
    return program;
  }

  Program step(int micro_batches = 1) const {
    Program program;
    for (int at = 0; at < micro_batches; ++at) {
      micro_batch(program, at > 0);
    }
    optimizer(program);
    return program;
  }

  /// A forward pass only.
  Program evaluation() const {
    Program program;
    program.push_back({prefix + "randn", {}, {{at("x_", 0), activation()}}, {}, 0, false, pass_ms(1)});
    for (int layer = 0; layer < layers; ++layer) {
      forward_layer(program, layer, false);
      program.back().deaths.push_back(at("x_", layer));
    }
    program.push_back({prefix + "loss", {{at("x_", layers)}}, {}, {at("x_", layers)}, 0, false, pass_ms(1)});
    return program;
  }
};

/// The peak of live bytes, with everything resident.
inline std::size_t peak_of(const Program& program, std::size_t lasting) {
  std::map<std::string, std::size_t> live;
  std::size_t now = lasting, most = lasting;
  for (const Op& op : program) {
    for (const auto& [name, bytes] : op.births) {
      live[name] = bytes;
      now += bytes;
    }
    most = std::max(most, now + op.workspace);
    for (const std::string& name : op.deaths) {
      now -= live[name];
    }
  }
  return most;
}

inline double compute_ms(const Program& program) {
  double ms = 0;
  for (const Op& op : program) {
    ms += op.ms;
  }
  return ms;
}

} // namespace simulator
