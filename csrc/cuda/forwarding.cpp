// The functions of DelegatingAllocator that only forward to the native allocator.
#include "cuda/delegating_allocator.h"

namespace torch_uvm::cuda {

// Forwarded because callers depend on the native values: cudagraph trees compare the deleter, and name() decides about
// expandable segments.
std::string DelegatingAllocator::name() {
  return native_->name();
}
c10::DeleterFnPtr DelegatingAllocator::raw_deleter() const {
  return native_->raw_deleter();
}
bool DelegatingAllocator::is_simple_data_ptr(const c10::DataPtr& data) const {
  return native_->is_simple_data_ptr(data);
}
void DelegatingAllocator::copy_data(void* dst, const void* src, std::size_t count) const {
  native_->copy_data(dst, src, count);
}
bool DelegatingAllocator::initialized() {
  return native_->initialized();
}
std::pair<std::size_t, std::size_t> DelegatingAllocator::getMemoryInfo(c10::DeviceIndex device) {
  return native_->getMemoryInfo(device);
}
void DelegatingAllocator::init(int device_count) {
  native_->init(device_count);
}
double DelegatingAllocator::getMemoryFraction(c10::DeviceIndex device) {
  return native_->getMemoryFraction(device);
}
void DelegatingAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  native_->setMemoryFraction(fraction, device);
}
std::vector<pytorch::StreamSegmentSize> DelegatingAllocator::getExpandableSegmentSizes(c10::DeviceIndex device) {
  return native_->getExpandableSegmentSizes(device);
}
void DelegatingAllocator::enable(bool value) {
  native_->enable(value);
}
bool DelegatingAllocator::isEnabled() const {
  return native_->isEnabled();
}
// cudnn.benchmark asks how large a workspace may be. Its workspaces are temporary, so the native answer will do.
void DelegatingAllocator::cacheInfo(c10::DeviceIndex device, std::size_t* largest_block) {
  native_->cacheInfo(device, largest_block);
}
void DelegatingAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  native_->releasePool(device, pool);
}
int DelegatingAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
  return native_->getPoolUseCount(device, pool);
}
void DelegatingAllocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                             std::shared_ptr<pytorch::CUDAAllocator> allocator) {
  native_->createOrIncrefPool(device, pool, std::move(allocator));
}
void DelegatingAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) {
  native_->setUseOnOOM(device, pool, use_on_oom);
}
void DelegatingAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
  native_->setNoSplit(device, pool);
}
bool DelegatingAllocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                                   const std::unordered_set<void*>& expected) {
  return native_->checkPoolLiveAllocations(device, pool, expected);
}
std::shared_ptr<void> DelegatingAllocator::getIpcDevPtr(std::string handle) {
  return native_->getIpcDevPtr(std::move(handle));
}
bool DelegatingAllocator::isHistoryEnabled() {
  return native_->isHistoryEnabled();
}
void DelegatingAllocator::recordHistory(bool enabled, pytorch::CreateContextFn context_recorder,
                                        std::size_t max_entries, pytorch::RecordContext when, bool clear,
                                        const std::vector<std::string>& skip_actions) {
  native_->recordHistory(enabled, context_recorder, max_entries, when, clear, skip_actions);
}
void DelegatingAllocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) {
  native_->recordAnnotation(metadata);
}
void DelegatingAllocator::pushCompileContext(std::string& metadata) {
  native_->pushCompileContext(metadata);
}
void DelegatingAllocator::popCompileContext() {
  native_->popCompileContext();
}
void DelegatingAllocator::setUserMetadata(const std::string& metadata) {
  native_->setUserMetadata(metadata);
}
std::string DelegatingAllocator::getUserMetadata() {
  return native_->getUserMetadata();
}
void DelegatingAllocator::attachAllocatorTraceTracker(pytorch::AllocatorTraceTracker tracker) {
  native_->attachAllocatorTraceTracker(std::move(tracker));
}
void DelegatingAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) {
  native_->enablePeerAccess(device, peer);
}
cudaError_t DelegatingAllocator::memcpyAsync(void* dst, int dst_device, const void* src, int src_device,
                                             std::size_t count, cudaStream_t stream, bool p2p_enabled) {
  return native_->memcpyAsync(dst, dst_device, src, src_device, count, stream, p2p_enabled);
}
std::shared_ptr<pytorch::AllocatorState> DelegatingAllocator::getCheckpointState(c10::DeviceIndex device,
                                                                                 c10::MempoolId_t pool) {
  return native_->getCheckpointState(device, pool);
}
pytorch::CheckpointDelta DelegatingAllocator::setCheckpointPoolState(c10::DeviceIndex device,
                                                                     std::shared_ptr<pytorch::AllocatorState> state) {
  return native_->setCheckpointPoolState(device, std::move(state));
}
#if TORCH_UVM_TORCH_AT_LEAST(12)
void DelegatingAllocator::attachOomRejectionObserver(pytorch::OomRejectionObserver observer) {
  native_->attachOomRejectionObserver(std::move(observer));
}
#endif
#if TORCH_UVM_TORCH_AT_LEAST(13)
void DelegatingAllocator::markCaptureBegin(c10::DeviceIndex device) {
  native_->markCaptureBegin(device);
}
void DelegatingAllocator::markCaptureEnd(c10::DeviceIndex device) {
  native_->markCaptureEnd(device);
}
c10::DataPtr DelegatingAllocator::allocateWithAddress(std::size_t size, void* address) {
  return native_->allocateWithAddress(size, address);
}
#endif
#if TORCH_UVM_TORCH_AT_LEAST(14)
bool DelegatingAllocator::supportsUserMetadata() {
  return native_->supportsUserMetadata();
}
#endif

} // namespace torch_uvm::cuda
