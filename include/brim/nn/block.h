#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// How a program, such as brim's Python package, runs a part of a model so that all that autograd
// keeps in it can be given up for want of memory, and the part runs again in backward. While there
// is room, the tensors stay as they are.

namespace brim::nn {

struct Slot;

/// One call of such a part. It ends with the last of the tensors that were saved in it.
class BRIM_API Block : public std::enable_shared_from_this<Block> {
 public:
  /// A tensor that autograd saved in a block, as a saved-tensor hook is to hold it.
  class BRIM_API Saved {
   public:
    Saved(Saved&&) noexcept;
    Saved& operator=(Saved&&) = delete;
    ~Saved();

    /// As get(), but undefined where that would run the block again, or throw.
    [[nodiscard]] at::Tensor get_if_there() const;

    /// Without a place in the graph. @throws c10::Error if it was written to.
    [[nodiscard]] at::Tensor get() const;

   private:
    friend class Block;
    Saved() = default;

    at::Tensor value_;  // of what is held by others anyway
    std::uint32_t version_ = 0;
    std::unique_ptr<Slot> slot_;
  };

  /// Whether a call that begins now can be one: it records a graph of its own, in no other block,
  /// under no saved-tensor hooks or modes, and nothing traces or captures it.
  [[nodiscard]] static bool can_begin(const std::vector<at::Tensor>& inputs);

  /// Whether memory may run out before the backward of a call like this: not if there was room for
  /// the last ones of this part with inputs of these shapes, and now is for a quarter more; nor if
  /// steps like this one have settled without a block that went. To hold what autograd saves takes
  /// time.
  /// @param part identifies the part of the model
  [[nodiscard]] static bool may_run_short(const void* part, const std::vector<at::Tensor>& inputs);

  /// What runs in this thread, until end(), is the block. can_begin() was true.
  /// @param inputs those of the call, not empty. The device of the first one is that of the block
  /// @param name for error messages
  [[nodiscard]] static std::shared_ptr<Block> begin(const void* part,
                                                    const std::vector<at::Tensor>& inputs,
                                                    std::string name);

  /// The call is over.
  /// @param reads what its values depend on, beside the inputs: parameters, buffers
  /// @param run_again the call once more: with save() for each tensor that autograd saves, until
  ///        has_all(). Called in the threads of backward, with the random numbers, the autocast and
  ///        the region of the first time. Without it, the block keeps what it has.
  void end(const std::vector<at::Tensor>& reads, std::function<void()> run_again);

  /// For the block that runs in this thread, also again. There must be one.
  [[nodiscard]] static Saved save(const at::Tensor& tensor);

  /// While it runs again: everything is there, the rest need not run. Whatever run_again throws is
  /// its end then.
  [[nodiscard]] static bool has_all();

  /// @throws c10::Error if has_all()
  static void stop_if_all_is_there();

  /// The same values for a graph of their own, for what is to run again. The graph that gave them
  /// may lead back to whoever holds them: with `x += block(x)` it does, and neither would ever end.
  [[nodiscard]] static at::Tensor without_past(const at::Tensor& tensor);

  /// Unless it did. Gives what was dropped to those that hold it.
  void run_again();

  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

 private:
  struct State;

  explicit Block(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace brim::nn
