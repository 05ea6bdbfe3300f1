#include "emulated/operator_info.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tensor/dispatch/observed_operators.h"

namespace torch_uvm::emulated {
namespace {

ArgumentKind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return ArgumentKind::kTensor;
    case c10::TypeKind::GeneratorType:
      return ArgumentKind::kGenerator;
    case c10::TypeKind::DeviceObjType:
      return ArgumentKind::kDevice;
    case c10::TypeKind::OptionalType:
      return kind_of(type->expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::ListType: {
      const ArgumentKind element = kind_of(type->expectRef<c10::ListType>().getElementType());
      return element == ArgumentKind::kTensor ? element : ArgumentKind::kOther;
    }
    default:
      return ArgumentKind::kOther;
  }
}

// Arguments that CUDA also accepts as CPU tensors: indices, and lengths that are read on the host anyway.
bool may_be_cpu(std::string_view op, std::string_view argument) {
  static const std::unordered_map<std::string_view, std::unordered_set<std::string_view>> accepted = {
      {"aten::index", {"indices"}},
      {"aten::_unsafe_index", {"indices"}},
      {"aten::index_put", {"indices"}},
      {"aten::index_put_", {"indices"}},
      {"aten::_unsafe_index_put", {"indices"}},
      {"aten::_index_put_impl_", {"indices"}},
      {"aten::_pack_padded_sequence", {"lengths"}},
      {"aten::_pack_padded_sequence_backward", {"batch_sizes"}},
      {"aten::_pad_packed_sequence", {"batch_sizes"}},
      {"aten::_nested_from_padded", {"cpu_nested_shape_example"}},
      {"aten::_nested_view_from_buffer", {"nested_size", "nested_strides", "offsets"}},
      {"aten::_nested_view_from_buffer_copy", {"nested_size", "nested_strides", "offsets"}},
      {"aten::_ctc_loss", {"input_lengths", "target_lengths"}},
      {"aten::_ctc_loss_backward", {"input_lengths", "target_lengths"}},
  };
  const auto found = accepted.find(op);
  return found != accepted.end() && found->second.contains(argument);
}

// Operators that access only the rows in their index. An embedding runs as index_select on the CPU.
std::optional<OperatorInfo::Rows> rows_of(const c10::OperatorName& name) {
  static const std::unordered_map<std::string_view, OperatorInfo::Rows> known = {
      {"aten::index_select", {0, 2, 1}},
      {"aten::index_add_", {0, 2, 1}},
      {"aten::index_copy_", {0, 2, 1}},
      {"aten::_embedding_bag", {0, 1, std::nullopt}},
      {"aten::_embedding_bag_forward_only", {0, 1, std::nullopt}},
  };
  const auto found = known.find(name.name);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

OperatorInfo read(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OperatorInfo info(schema.operator_name());
  bool takes_generator = false;
  for (const c10::Argument& argument : schema.arguments()) {
    OperatorInfo::Argument read;
    read.kind = kind_of(argument.type());
    read.written = (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
                   writes_unsaid(schema.name(), argument.name());
    read.may_be_cpu = may_be_cpu(schema.name(), argument.name());
    // Kernels accept a 0-dim CPU tensor as a number, except for written arguments and indices.
    read.may_be_number = !read.written && argument.name() != "index";
    takes_generator = takes_generator || read.kind == ArgumentKind::kGenerator;
    info.arguments.push_back(read);
  }
  info.returns = schema.returns().size();
  info.is_view = std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
  const auto tags = op.getTags();
  info.draws_by_default =
      !takes_generator && std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
  if (schema.name() == "aten::_pack_padded_sequence") {
    info.cpu_returns = 1u << 1; // batch_sizes
  } else if (schema.name() == "aten::_nested_tensor_size" || schema.name() == "aten::_nested_tensor_strides" ||
             schema.name() == "aten::_nested_tensor_storage_offsets") {
    info.cpu_returns = 1u;
  }
  info.rows = rows_of(info.name);
  return info;
}

} // namespace

const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  // Keyed by the schema's address. The name is compared too, because a deregistered operator's address may be reused
  // (by a torch.library in a test). The map is per thread, so it needs no lock. Infos are leaked, because kernels run
  // at exit.
  thread_local std::unordered_map<const c10::FunctionSchema*, const OperatorInfo*> known;
  const OperatorInfo*& info = known[&op.schema()];
  if (info == nullptr || info->name != op.operator_name()) {
    info = new OperatorInfo(read(op));
  }
  return *info;
}

} // namespace torch_uvm::emulated
