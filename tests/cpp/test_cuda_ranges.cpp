// Address ranges of CudaRuntime, over the fake driver: a range is accessible only while a piece is mapped.
#include <cstring>
#include <vector>

#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

namespace {

constexpr std::size_t kPiece = 2 * MiB;

} // namespace

TEST(an_address_stays_while_its_memory_changes) {
  const auto runtime = made();
  AddressRanges& ranges = *runtime->address_ranges();
  CHECK_EQ(ranges.granularity(0), kPiece);
  void* const first = ranges.reserve(2 * kPiece, 0);
  void* const second = ranges.reserve(2 * kPiece, 0);
  const Piece piece = ranges.allocate_piece(2 * kPiece, 0);
  ranges.map(first, piece, 0);
  std::vector<char> host(2 * kPiece, 7);
  runtime->copy_async(first, host.data(), host.size(), kStream);
  ranges.map(second, piece, 0); // before the first mapping goes
  ranges.unmap(first, piece);
  std::memset(host.data(), 0, host.size());
  runtime->copy_async(host.data(), second, host.size(), kStream);
  CHECK_EQ(int{host[0]} + int{host.back()}, 14);
  ranges.unmap(second, piece);
  ranges.map(first, piece, 0);
  runtime->zero_async(first, 2 * kPiece, kStream);
  ranges.free_piece(piece); // it goes with its mapping
  CHECK_EQ(fake_cuda_live_ranges(), std::size_t{3});
  ranges.unmap(first, piece);
  ranges.release(first, 2 * kPiece);
  ranges.release(second, 2 * kPiece);
  all_is_well();
}

TEST(a_device_that_is_full_refuses_a_piece) {
  const auto runtime = made();
  AddressRanges& ranges = *runtime->address_ranges();
  void* const range = ranges.reserve(4 * kMemory, 1); // addresses take no memory
  const Piece all = ranges.allocate_piece(kMemory, 1);
  CHECK_EQ(runtime->memory_info(1).free, std::size_t{0});
  contains(message_of([&] { ranges.allocate_piece(kPiece, 1); }), "cuMemCreate of 2.00 MiB failed: out of memory");
  CHECK_THROWS(OutOfMemory, ranges.allocate_piece(kPiece, 1));
  ranges.free_piece(ranges.allocate_piece(kPiece, 0));
  ranges.free_piece(all);
  CHECK_EQ(runtime->memory_info(1).free, kMemory);
  ranges.release(range, 4 * kMemory);
  all_is_well();
}

TEST(each_call_that_fails_changes_nothing) {
  const auto runtime = made();
  AddressRanges& ranges = *runtime->address_ranges();
  const auto fail = [](const char* name) { fake_cuda_fail(name, 1, cudaErrorInvalidValue); };
  fail("cuMemAddressReserve");
  CHECK_THROWS(RuntimeFailure, ranges.reserve(kPiece, 0));
  fake_cuda_fail("cuMemAddressReserve", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS(OutOfMemory, ranges.reserve(kPiece, 0));
  fail("cuMemCreate");
  CHECK_THROWS(RuntimeFailure, ranges.allocate_piece(kPiece, 0));
  CHECK_EQ(fake_cuda_live_ranges(), std::size_t{0});
  void* const range = ranges.reserve(kPiece, 0);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  fail("cuMemSetAccess");
  CHECK_THROWS(RuntimeFailure, ranges.map(range, piece, 0)); // and undoes cuMemMap
  ranges.map(range, piece, 0);
  runtime->zero_async(range, kPiece, kStream);
  fake_cuda_fail("cuMemUnmap", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS(RuntimeFailure, ranges.unmap(range, piece));
  runtime->zero_async(range, kPiece, kStream);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  ranges.unmap(range, piece);
  ranges.free_piece(piece);
  ranges.release(range, kPiece);
  all_is_well();
}

TEST(bad_calls_are_refused) {
  const auto runtime = made();
  AddressRanges& ranges = *runtime->address_ranges();
  CHECK_THROWS(InvalidArgument, ranges.reserve(kPiece + 1, 0));
  CHECK_THROWS(InvalidArgument, ranges.reserve(0, 0));
  CHECK_THROWS(InvalidArgument, ranges.allocate_piece(kPiece, 2));
  CHECK_THROWS(InvalidArgument, static_cast<void>(ranges.granularity(-2)));
  void* const range = ranges.reserve(kPiece, 0);
  const Piece piece = ranges.allocate_piece(kPiece, 0);
  CHECK_THROWS(InvalidArgument, ranges.unmap(range, piece));
  ranges.map(range, piece, 0);
  CHECK_THROWS(InvalidArgument, ranges.map(range, piece, 0));
  ranges.unmap(range, piece);
  ranges.free_piece(piece);
  ranges.release(range, kPiece);
  all_is_well();
}

TEST(a_piece_of_the_host_is_used_at_two_addresses) {
  const auto runtime = made();
  AddressRanges& ranges = *runtime->address_ranges();
  CHECK_EQ(ranges.granularity(-1), kPiece);
  void* const own = ranges.reserve(kPiece, -1);
  void* const range = ranges.reserve(kPiece, 1);
  const Piece piece = ranges.allocate_piece(kPiece, -1);
  CHECK_EQ(runtime->memory_info(0).free, kMemory);
  CHECK_EQ(runtime->memory_info(1).free, kMemory);
  ranges.map(own, piece, -1); // the host and all devices may access it
  ranges.map(range, piece, 1);
  std::memset(own, 7, kPiece);
  std::vector<char> seen(kPiece);
  const Stream stream = Stream::default_of(1);
  runtime->copy_async(seen.data(), range, kPiece, stream);
  CHECK_EQ(int{seen.back()}, 7);
  runtime->zero_async(range, kPiece, stream);
  CHECK_EQ(int{static_cast<char*>(own)[1]}, 0);
  const Piece devices = ranges.allocate_piece(kPiece, 0);
  CHECK_THROWS(InvalidArgument, ranges.map(own, devices, -1));
  ranges.free_piece(devices);
  ranges.unmap(range, piece);
  ranges.unmap(own, piece);
  ranges.free_piece(piece);
  ranges.release(own, kPiece);
  ranges.release(range, kPiece);
  all_is_well();
}

TEST(a_driver_without_pieces_of_the_host_says_so) {
  const auto runtime = made();
  fake_cuda_have_host_pieces(0);
  AddressRanges& ranges = *runtime->address_ranges();
  CHECK_EQ(ranges.granularity(-1), std::size_t{0});
  CHECK_EQ(ranges.granularity(0), kPiece);
  CHECK_THROWS(RuntimeFailure, ranges.allocate_piece(kPiece, -1));
  all_is_well();
}

TEST(the_device_of_a_range_gets_a_context_and_no_other_does) {
  const auto runtime = made();
  AddressRanges& ranges = *runtime->address_ranges();
  CHECK(!fake_cuda_has_context(0) && !fake_cuda_has_context(1));
  CHECK(cudaSetDevice(1) == cudaSuccess);
  void* const range = ranges.reserve(kPiece, 1);
  ranges.free_piece(ranges.allocate_piece(kPiece, 1));
  ranges.release(range, kPiece);
  CHECK(!fake_cuda_has_context(0) && fake_cuda_has_context(1));
  CHECK(cudaSetDevice(0) == cudaSuccess);
  all_is_well();
}

TEST(a_device_without_virtual_memory_management_has_no_ranges) {
  const auto runtime = made();
  fake_cuda_have_ranges(0);
  AddressRanges& ranges = *runtime->address_ranges();
  CHECK_EQ(ranges.granularity(0), std::size_t{0});
  CHECK_THROWS(RuntimeFailure, ranges.reserve(kPiece, 0));
  CHECK_THROWS(RuntimeFailure, ranges.allocate_piece(kPiece, 0));
  all_is_well();
}

HARNESS_MAIN()
