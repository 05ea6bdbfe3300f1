// The allocation-site profiler's view of Python: finds the Python line that allocates a storage, for
// residency/trace/allocation_sites.h.
//
// Runs only while profiling is on. The allocating thread takes the GIL, with none of our locks held. A thread that
// never ran Python has no line. In a backward pass no line of the script runs, so the name of the graph's node is used.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <compare>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "python/bindings.h"
#include "residency/trace/allocation_sites.h"
#include "tensor/dispatch/deferred_updates.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

constexpr std::size_t kMaxPlaces = 1 << 16;

/// An allocation site: a line of Python, or a node of the backward graph.
struct Place {
  PyCodeObject* code = nullptr; ///< a reference, so that its address is not reused
  int line = 0;
  std::string node; ///< its name; empty for a line

  auto operator<=>(const Place&) const = default;
};

/// All allocation sites. Guarded by the GIL. Leaked, because storages are created even after static destructors.
class Places {
 public:
  static Places& get() {
    static auto* const places = new Places();
    return *places;
  }

  /// \param skipped prefixes of file names whose frames are skipped
  void start(std::vector<std::string> skipped) {
    skipped_ = std::move(skipped);
  }

  const Place& operator[](AllocationSite site) const {
    return all_[site < all_.size() ? site : kUnknown];
  }

  /// This thread's innermost frame that is not skipped. If all are: the node of the backward graph that runs, or the
  /// innermost frame.
  AllocationSite here() {
    PyFrameObject* frame = PyEval_GetFrame();
    if (frame == nullptr) {
      return in_backward();
    }
    Py_INCREF(frame);
    PyFrameObject* const innermost = frame;
    Py_INCREF(innermost);
    while (frame != nullptr && is_passed_over(frame)) {
      PyFrameObject* const outer = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = outer;
    }
    AllocationSite site = frame != nullptr ? at(frame) : in_backward();
    if (frame == nullptr && site == kUnknown) {
      site = at(innermost);
    }
    Py_XDECREF(frame);
    Py_DECREF(innermost);
    return site;
  }

  AllocationSite in_backward() {
    const auto node = torch::autograd::get_current_node();
    return node ? at({nullptr, 0, node->name()}) : kUnknown;
  }

 private:
  static constexpr AllocationSite kUnknown = 1;

  Places() : all_(2) {}

  AllocationSite at(const Place& place) {
    if (const auto found = sites_.find(place); found != sites_.end()) {
      return found->second;
    }
    if (all_.size() >= kMaxPlaces) {
      return kUnknown;
    }
    Py_XINCREF(reinterpret_cast<PyObject*>(place.code));
    all_.push_back(place);
    return sites_[place] = static_cast<AllocationSite>(all_.size() - 1);
  }

  bool is_passed_over(PyFrameObject* frame) const {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const char* const file = PyUnicode_AsUTF8(code->co_filename);
    if (file == nullptr) {
      PyErr_Clear(); // a file name that is not valid text is not skipped
    }
    const bool passed_over = file != nullptr && std::ranges::any_of(skipped_, [&](const std::string& beginning) {
                               return std::string_view(file).starts_with(beginning);
                             });
    Py_DECREF(code);
    return passed_over;
  }

  AllocationSite at(PyFrameObject* frame) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const AllocationSite site = at({code, PyFrame_GetLineNumber(frame), {}});
    Py_DECREF(code);
    return site;
  }

  std::vector<std::string> skipped_;
  std::vector<Place> all_; ///< by site; 0: created before profiling, 1: unknown
  std::map<Place, AllocationSite> sites_;
};

AllocationSite where_this_thread_is() noexcept {
  if (PyGILState_GetThisThreadState() == nullptr || runs_deferred_update()) {
    return 1; // this thread never ran Python; or the line is that of the next use, not of the optimizer
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  AllocationSite site = 1;
  try {
    const py::error_scope error; // preserves a pending Python exception
    site = Places::get().here();
  } catch (...) {
    // Out of memory: the site stays unknown.
  }
  PyGILState_Release(gil);
  return site;
}

py::list figures_list() {
  const std::vector<AllocationSiteFigures> figures = without_gil([] { return AllocationSites::get().figures(); });
  py::list list;
  for (const AllocationSiteFigures& it : figures) {
    const Place& place = Places::get()[it.site];
    const auto of = [](const PyObject* name) {
      return py::reinterpret_borrow<py::object>(const_cast<PyObject*>(name));
    };
    py::dict dict;
    dict["file"] = place.code == nullptr ? py::none() : of(place.code->co_filename);
    dict["function"] = place.code == nullptr ? py::none() : of(place.code->co_name);
    dict["line"] = place.line;
    dict["node"] = place.node;
    dict["before"] = it.site == 0;
    dict["bytes"] = it.bytes;
    dict["made"] = it.made;
    dict["alive"] = it.alive;
    dict["most_alive"] = it.most_alive;
    constexpr const char* kKinds[] = {"fetched", "written_back", "dropped_clean", "used_in_place"};
    for (std::size_t kind = 0; kind < std::size(kKinds); ++kind) {
      py::dict moves;
      moves["count"] = it.moves[kind];
      moves["bytes"] = it.moved_bytes[kind];
      dict[kKinds[kind]] = moves;
    }
    list.append(dict);
  }
  return list;
}

} // namespace

void bind_allocation_sites(py::module_& module) {
  module.def(
      "start_counting_allocation_sites",
      [](std::vector<std::string> skipped) {
        Places::get().start(std::move(skipped));
        // Without the GIL: another thread's probe may be waiting for it.
        without_gil([] { AllocationSites::get().start(&where_this_thread_is); });
      },
      py::arg("skipped"), no_gil_inside);
  module.def("stop_counting_allocation_sites", [] { AllocationSites::get().stop(); }, no_gil);
  module.def("allocation_site_figures", &figures_list, no_gil_inside);
}

} // namespace torch_uvm
