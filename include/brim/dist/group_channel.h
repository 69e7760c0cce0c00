#pragma once

#include <brim/adapt/agreement.h>
#include <brim/export.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace at {
class Tensor;
}
namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace brim {

/// The ranks of a torch.distributed group. Messages go over a gloo backend of their own, on the
/// CPU: a stalled collective of the program does not stop them, and a connection that closes tells
/// at once that a process is gone. A rank that is merely slow is waited for, as long as the
/// backend's timeout. What ranks must know when that backend has failed is in the store.
///
///     auto channel = std::make_shared<brim::GroupChannel>(std::move(gloo), store, group);
///     brim::Agreement agreement(channel);
///     brim::batch(512, step, {.memory = &sizes, .ranks = &agreement});
///
/// An exchange allocates no tensor memory, so that it works where none is left.
class BRIM_API GroupChannel final : public RankChannel {
 public:
  /// @param messages used by nothing else, and not held by anything else: to let go of it closes
  ///     its connections, which the other ranks notice.
  /// @param store shared by these ranks and by nothing else (a PrefixStore).
  /// @param program the group whose collectives are aborted when a rank calls the work off; may be
  ///     null. NCCL's can be aborted; gloo's end when the process that failed ends.
  GroupChannel(c10::intrusive_ptr<c10d::Backend> messages, c10::intrusive_ptr<c10d::Store> store,
               const c10::intrusive_ptr<c10d::ProcessGroup>& program);
  ~GroupChannel() override;

  /// Ends the connections; later exchanges fail. Before the process ends, whose threads must not
  /// outlive it.
  void close() noexcept;

  [[nodiscard]] std::int64_t rank() const override;
  [[nodiscard]] std::int64_t ranks() const override;
  void least(std::span<std::int64_t> numbers) override;
  std::vector<std::string> texts(const std::string& own) override;
  void watch(bool on) override;
  void call_off(const std::string& reason) noexcept override;
  std::optional<std::pair<std::int64_t, std::string>> called_off() noexcept override;

 private:
  class Watcher;
  struct Program;

  void reduce(const at::Tensor& tensor, bool to_least);
  [[noreturn]] void lost(const std::string& why);

  std::int64_t rank_;
  std::int64_t ranks_;
  c10::intrusive_ptr<c10d::Backend> messages_;  // null once a rank was lost
  c10::intrusive_ptr<c10d::Store> store_;
  // Not owned: to destroy a group while holding Python's GIL may wait for a thread that wants it.
  std::unique_ptr<Program> program_;
  std::unique_ptr<Watcher> watcher_{};
  std::optional<std::pair<std::int64_t, std::string>> called_off_{};
};

}  // namespace brim
