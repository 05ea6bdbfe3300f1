#include "tensor/storage/adopted_storage.h"

#include <atomic>
#include <exception>
#include <memory>
#include <utility>

#include "tensor/process/context.h"

namespace torch_uvm {
namespace {

struct Adopted {
  explicit Adopted(c10::DataPtr mapped) : mapped(std::move(mapped)) {}

  void wait() const {
    for (int device = 0; device <= last_device.load(); ++device) {
      Context::get().runtime().synchronize_device(device);
    }
  }

  const c10::DataPtr mapped;
  std::atomic<int> last_device{-1}; ///< devices up to this one may use the bytes
};

void delete_adopted(void* context) {
  std::unique_ptr<Adopted> adopted(static_cast<Adopted*>(context));
  if (Context::forked()) {
    return; // the child's mapping is its own, and no device uses it
  }
  try {
    adopted->wait();
  } catch (const std::exception&) {
    static_cast<void>(adopted.release()); // a device may still use the bytes: leaking them is safer
  }
}

Adopted& adopted_of(const c10::DataPtr& data) {
  return *static_cast<Adopted*>(data.get_context());
}

} // namespace

c10::DataPtr adopted_data(c10::DataPtr mapped) {
  void* const bytes = mapped.get();
  const c10::Device device = mapped.device();
  return {bytes, new Adopted(std::move(mapped)), &delete_adopted, device};
}

bool is_adopted(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_adopted;
}

void note_adopted_use(const c10::DataPtr& data, int device) {
  std::atomic<int>& last = adopted_of(data).last_device;
  int before = last.load();
  while (before < device && !last.compare_exchange_weak(before, device)) {
  }
}

void wait_for_adopted(const c10::DataPtr& data) {
  adopted_of(data).wait();
}

} // namespace torch_uvm
