#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/detail/joint_pass.h>

#include <cstddef>
#include <vector>

namespace brim::detail {

/// The buffers that the encoders' forwards change, see JointPass.
class EncoderBuffers {
 public:
  EncoderBuffers(const NamedTensors& named, const std::vector<at::Tensor>& carried);

  /// The next part is an encoder's first.
  void begin_encoder();
  /// After a part of step 1: the next one begins with what this one found.
  void end_part();
  void end_encoder();
  /// After step 2: the loss may have changed buffers too.
  void end_loss();
  /// Ahead of a part of step 3.
  void begin_part_again(std::size_t encoder);
  /// For a step that other ranks may make this one repeat after it has ended.
  /// @throws c10::ValueError if a buffer is not as it was at first.
  void refuse_changes(const char* function) const;
  /// After step 3, which does not count.
  void end();
  /// Allocates nothing, and counts no versions: the values are those that were there.
  void undo() const;

 private:
  const NamedTensors& named_;
  const std::vector<at::Tensor>& carried_;
  std::vector<at::Tensor> at_first_;
  std::vector<at::Tensor> carried_at_first_;
  std::vector<at::Tensor> at_last_;
  std::vector<at::Tensor> carried_at_last_;
  std::vector<at::Tensor> before_;               // this encoder's parts
  std::vector<at::Tensor> after_;                // its first part; undefined: not changed
  std::vector<std::vector<at::Tensor>> starts_;  // by encoder
  bool is_first_ = true;
  bool changes_ = false;
};

}  // namespace brim::detail
