// Selects the parameter updates of an optimizer step that can be deferred.
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/storage_records.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/labels.h"

namespace torch_uvm {
namespace {

// Small parameters are updated together, because each call costs the host as much as the link needs for some MiB: until
// they have as many bytes as a copy needs to reach the link's rate, or all their tensors this share of the budget.
constexpr std::size_t kEnough = std::size_t{32} << 20;
constexpr std::size_t kShareOfBudget = 32;

/// Whether the thread is in no dispatch mode. Modes (functorch, Python dispatch) give the calls another meaning or have
/// to observe them now.
bool is_plain_thread() {
  const c10::DispatchKeySet modes = c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set;
  return modes.empty() && !c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.layout() == c10::kStrided && !tensor.is_meta() &&
         !tensor.key_set().has_any(c10::python_ks) && !tensor.is_complex() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor() && !tensor.is_inference() && tensor.is_non_overlapping_and_dense();
}

bool alike(const at::Tensor& left, const at::Tensor& right) {
  return left.dtype() == right.dtype() && left.device() == right.device() && left.sizes() == right.sizes() &&
         left.strides() == right.strides();
}

/// Whether no written tensor shares its storage with another operand. Gradients may share storage among themselves.
bool apart(const std::vector<std::vector<at::Tensor>>& operands) {
  constexpr std::size_t kGradients = 1;
  std::unordered_set<const c10::StorageImpl*> written;
  for (std::size_t list = 0; list < operands.size(); ++list) {
    for (const at::Tensor& tensor : operands[list]) {
      if (list != kGradients && !written.insert(tensor.storage().unsafeGetStorageImpl()).second) {
        return false;
      }
    }
  }
  return std::ranges::none_of(operands[kGradients], [&](const at::Tensor& gradient) {
    return written.contains(gradient.storage().unsafeGetStorageImpl());
  });
}

/// Whether all code that uses the storage asks for it: if it is pinned, code expects the result of an update there.
bool is_asked_for(Engine& engine, const at::Tensor& tensor) {
  if (tensor.device().is_cpu() || has_owner(data_of(tensor.storage()))) {
    return false;
  }
  const Record* const record = record_of(engine, tensor.storage().unsafeGetStorageImpl());
  return record != nullptr && record->pins == 0;
}

} // namespace

std::vector<std::vector<std::size_t>> deferrable(const std::vector<std::vector<at::Tensor>>& operands) {
  std::vector<std::vector<std::size_t>> found;
  Engine* const engine = engine_in_use();
  if (engine == nullptr || !engine->is_awake() || !is_plain_thread()) {
    return found;
  }
  const std::vector<at::Tensor>& parameters = operands.front();
  for (const std::vector<at::Tensor>& list : operands) {
    for (std::size_t index = 0; index < list.size(); ++index) {
      if (!is_plain(list[index]) || !alike(list[index], parameters[index])) {
        return found;
      }
    }
  }
  if (!apart(operands)) {
    return found;
  }
  std::vector<std::size_t> most; // by parameter: bytes of its group's parameters
  for (const at::Tensor& parameter : parameters) {
    const std::size_t budget = parameter.is_cpu() ? 0 : engine->budget(parameter.get_device()).value_or(0);
    most.push_back(budget / kShareOfBudget / operands.size());
  }
  const Engine::Lock lock(*engine);
  std::size_t together = 0; // bytes of the last group's parameters
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    if (!std::ranges::all_of(operands, [&](const auto& list) { return is_asked_for(*engine, list[index]); })) {
      continue;
    }
    const at::Tensor& parameter = parameters[index];
    const bool joins = !found.empty() && together < kEnough && together + parameter.nbytes() <= most[index] &&
                       parameters[found.back().back()].device() == parameter.device();
    if (!joins) {
      found.emplace_back();
      together = 0;
    }
    found.back().push_back(index);
    together += parameter.nbytes();
  }
  return found;
}

void defer_beside_operators(std::vector<std::unique_ptr<DeferredUpdate>> updates) {
  Engine* const engine = engine_in_use();
  std::optional<Engine::Lock> lock;
  if (engine != nullptr) {
    lock.emplace(*engine);
  }
  defer(std::move(updates), [&](const DeferredUpdate& update) {
    return engine == nullptr || std::ranges::any_of(update.accesses(), [&](const auto& access) {
             const Record* const record = access.second ? known_record_of(*engine, access.first) : nullptr;
             return record != nullptr && record->in_use != 0;
           });
  });
}

} // namespace torch_uvm
