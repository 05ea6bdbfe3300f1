// One boxed kernel serves every c10d operator: it runs the operator's CPU kernel, which calls the group's CPU backend,
// on CPU aliases of the accelerator's tensors. It works for every torch version, whatever operators that has. A
// subclass of c10d::Backend would not: its virtual functions differ between versions, and its Python trampoline lacks
// half of them.
//
// A collective continues after its operator has returned. gloo keeps the CPU aliases, which keep the storages alive. A
// WorkUnderWay pins them, so that they do not move.
#include "emulated/backend.h"

#ifdef TORCH_UVM_WITHOUT_DISTRIBUTED // such a torch has no c10d operators and no c10d::Work

namespace torch_uvm::emulated {

void register_collectives() {}

} // namespace torch_uvm::emulated

#else

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "emulated/kernels.h"
#include "emulated/operands.h"
#include "tensor/dispatch/regions.h"

namespace torch_uvm::emulated {
namespace {

/// A CPU alias and its original, the accelerator's tensor.
using Pair = std::pair<at::Tensor, at::Tensor>;
using Pairs = std::vector<Pair>;

at::Tensor original_of(const Pairs& pairs, const at::Tensor& cpu) {
  for (const auto& [alias, original] : pairs) {
    if (alias.is_same(cpu)) {
      return original;
    }
  }
  return cpu;
}

/// Pins the tensors of a collective until `end`. The first callback or waiter that sees the collective done calls it.
class UnderWay {
 public:
  explicit UnderWay(std::span<const at::Tensor> tensors) : work_(std::in_place, tensors) {}
  void end() {
    const std::lock_guard lock(mutex_);
    work_.reset();
  }

 private:
  std::mutex mutex_; ///< in the lock order before the engine's
  std::optional<WorkUnderWay> work_;
};

/// Wraps gloo's Work and returns the accelerator's tensors as results, which DistributedDataParallel and its hooks use.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(c10::intrusive_ptr<c10d::Work> work, Pairs pairs, std::shared_ptr<UnderWay> under_way)
      : work_(std::move(work)), pairs_(std::move(pairs)), under_way_(std::move(under_way)) {
    try {
      work_->getFuture()->addCallback([under_way = under_way_](c10::ivalue::Future&) { under_way->end(); });
    } catch (const c10::Error&) {
      // The Work of send and recv has no future. Then `wait` or the destructor unpins the tensors.
    }
  }

  bool isCompleted() override {
    return work_->isCompleted();
  }
  bool isSuccess() const override {
    return work_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return work_->exception();
  }
  int sourceRank() const override {
    return work_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> results = work_->result();
    for (at::Tensor& result : results) {
      result = original_of(pairs_, result);
    }
    return results;
  }
  void synchronize() override {
    work_->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = work_->wait(timeout);
    under_way_->end();
    return done;
  }
  void abort() override {
    work_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::intrusive_ptr<c10::ivalue::Future> future = work_->getFuture();
    return future->then(
        [pairs = pairs_](c10::ivalue::Future& done) {
          return replaced(done.value(), [&](const at::Tensor& cpu) { return original_of(pairs, cpu); });
        },
        future->elementType());
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return work_->getFutureResult();
  }
  float getDuration() const override {
    return work_->getDuration();
  }
  std::uint64_t getSequencenumber() const override {
    return work_->getSequencenumber();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  Pairs pairs_;
  std::shared_ptr<UnderWay> under_way_;
};

void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t arguments = op.schema().arguments().size();
  int device = -1;
  for (std::size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    replaced((*stack)[i], [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(device < 0 || device == tensor.device().index(), op.schema().name(),
                    " takes tensors of one device, ", "and found them on emu:", device, " and ", tensor.device());
        device = tensor.device().index();
      } else {
        TORCH_CHECK(!tensor.defined(), op.schema().name(), " takes tensors of one device, and found one on ",
                    tensor.device(), " beside those on emu");
      }
      return tensor;
    });
  }
  check_not_forked();

  Operands operands(device);
  Pairs pairs;
  std::vector<at::Tensor> originals;
  c10::SmallVector<Touch, 8> accesses;
  for (std::size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    (*stack)[i] = replaced((*stack)[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      // c10d schemas do not mark which arguments are written.
      at::Tensor cpu = operands.to_cpu(tensor, /*written=*/true);
      accesses.push_back(access_of(tensor, /*write=*/true));
      pairs.emplace_back(cpu, tensor);
      originals.push_back(tensor);
      return cpu;
    });
  }
  auto under_way = std::make_shared<UnderWay>(originals);
  // Also waits for the work queued on the stream: gloo's threads do not know streams and access the bytes at once.
  runtime().begin_kernel(current_stream(device), std::span<const Touch>(accesses.data(), accesses.size()));
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (std::size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isObject()) {
      if (auto work = value.toCustomClass<c10d::Work>()) {
        value = c10::IValue(c10::static_intrusive_pointer_cast<c10d::Work>(
            c10::make_intrusive<DeviceWork>(std::move(work), std::move(pairs), std::move(under_way))));
      }
    } else {
      value = replaced(value, [&](const at::Tensor& cpu) { return operands.to_device(cpu); });
    }
  }
}

/// Suppresses PyTorch's warning, once per process, that a kernel is overridden: it is intended here.
class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

} // namespace

void register_collectives() {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard guard(&none);
  auto& library = *new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for_each_operator("c10d::", c10::DispatchKey::CPU, [&](const c10::OperatorName& name, const auto& /*op*/) {
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&collective>());
  });
}

} // namespace torch_uvm::emulated

#endif
