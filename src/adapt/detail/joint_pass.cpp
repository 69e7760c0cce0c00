#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/detail/joint_pass.h>
#include <brim/memory/peak_meter.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <utility>

#include "adapt/detail/encoder_buffers.h"
#include "adapt/detail/gradient_of.h"

namespace brim::detail {
namespace {

using Outputs = JointPass::Outputs;

/// The random state, and what else moves on.
class Draws {
 public:
  explicit Draws(const JointPass::Work& work)
      : random_(work.device), more_(work.more.take ? work.more.take() : 0) {}

  bool is_current(const JointPass::Work& work) const {
    return random_.is_current() && (!work.more.take || work.more.take() == more_);
  }
  void restore(const JointPass::Work& work) const {
    random_.restore();
    if (work.more.put_back) {
      work.more.put_back(more_);
    }
  }

 private:
  RandomState random_;
  std::int64_t more_;
};

/// Items that step 3 runs in parts: as one, with the random state of that time, where numbers were
/// drawn.
struct Stretch {
  std::int64_t begin;
  std::int64_t end;
  std::unique_ptr<Draws> draws;
};

struct Encoder {
  std::size_t index = 0;
  std::int64_t items = 0;
  std::int64_t size = 0;  // of its parts
  std::vector<Stretch> stretches{};
  Outputs outputs{};          // of all items; with other ranks, of theirs too
  std::vector<bool> needs{};  // gradients
  Outputs roots{};            // with their graph, where there is one part only
  Outputs gradients{};        // of this rank's outputs
  std::int64_t longest = 0;   // part of step 1
  std::int64_t offset = 0;    // of this rank's items among those of all
  std::int64_t total = 0;     // items of all ranks

  [[nodiscard]] bool has_graph() const { return std::ranges::find(needs, true) != needs.end(); }
};

std::string shape_text(const at::Tensor& output) {
  return c10::str("[", c10::Join(", ", output.sizes().slice(1)), "] ", output.scalar_type());
}

/// What one call of JointPass::run does.
class Joint {
 public:
  Joint(BatchPass& pass, const JointPass::Work& work, std::int64_t size,
        const JointPass::Ranks* ranks)
      : pass_(pass), work_(work), ranks_(ranks) {
    const std::int64_t longest = std::ranges::max(work.items);
    is_one_ = size >= longest;
    for (std::size_t i = 0; i < work.items.size(); ++i) {
      encoders_.push_back(
          {.index = i, .items = work.items[i], .size = part_length(work.items[i], longest, size)});
    }
  }

  at::Tensor run() {
    if (!at::autocast::is_autocast_cache_enabled()) {
      return run_steps();
    }
    // Weights that autocast has cast without a graph must not be used where one is needed.
    at::autocast::clear_cache();
    at::Tensor loss = run_steps();
    at::autocast::clear_cache();
    return loss;
  }

  void undo() {
    at::autocast::clear_cache();
    if (buffers_) {
      buffers_->undo();
    }
  }

 private:
  at::Tensor run_steps() {
    if (is_one_ && ranks_ == nullptr) {
      return run_plain();
    }
    if (ranks_ == nullptr) {
      encode_all();
    } else if (!encode_and_gather()) {
      return {};
    }
    at::autocast::clear_cache();
    at::Tensor loss = run_loss();
    if (ranks_ != nullptr) {
      buffers_->refuse_changes("loss");
    }
    buffers_->end_loss();
    at::autocast::clear_cache();
    const Draws after(work_);
    for (Encoder& encoder : encoders_) {
      pass_on(encoder);
    }
    after.restore(work_);
    buffers_->end();
    return loss;
  }

  /// One forward and one backward, to the bit.
  at::Tensor run_plain() {
    buffers_.emplace(work_.buffers, work_.carried);
    std::vector<Outputs> outputs;
    outputs.reserve(encoders_.size());
    for (Encoder& encoder : encoders_) {
      outputs.push_back(encode(encoder, 0, encoder.items));
    }
    const at::Tensor loss = loss_of(outputs);
    outputs.clear();
    pass_.reach(loss);
    work_.backward({loss}, {});
    return loss.detach();
  }

  Outputs encode(Encoder& encoder, std::int64_t begin, std::int64_t end) {
    Outputs outputs = work_.encode(encoder.index, begin, end);
    TORCH_CHECK_VALUE(!outputs.empty(), "encode must return a tensor, or several, got none");
    for (const at::Tensor& output : outputs) {
      TORCH_CHECK_VALUE(output.defined() && output.layout() == at::kStrided,
                        "encode must return dense tensors");
      TORCH_CHECK_VALUE(output.dim() > 0 && output.size(0) == end - begin,
                        "encode must return tensors whose first dimension is the items of the "
                        "part, here ",
                        end - begin, ", got shape ", output.sizes(),
                        output.dim() == 0 ? ". What belongs to no item, such as a temperature, is "
                                            "the loss's own: use it there"
                                          : "");
    }
    return outputs;
  }

  /// Takes the outputs of a part over.
  void keep(Encoder& encoder, std::int64_t begin, const Outputs& outputs) {
    const at::NoGradGuard no_grad;
    if (encoder.outputs.empty()) {
      for (const at::Tensor& output : outputs) {
        std::vector<std::int64_t> shape = output.sizes().vec();
        shape.front() = encoder.items;
        encoder.outputs.push_back(at::empty(shape, output.options().requires_grad(false)));
      }
      encoder.needs.resize(outputs.size());
    }
    TORCH_CHECK_VALUE(outputs.size() == encoder.outputs.size(), "encode returned ",
                      encoder.outputs.size(), " tensors for one part and ", outputs.size(),
                      " for another");
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor& all = encoder.outputs[i];
      TORCH_CHECK_VALUE(all.sizes().slice(1) == outputs[i].sizes().slice(1) &&
                            all.scalar_type() == outputs[i].scalar_type() &&
                            all.device() == outputs[i].device(),
                        "the outputs of parts must agree in all but their first dimension to be "
                        "put together, but "
                        "encode returned (…, ",
                        shape_text(all), ") for one part and (…, ", shape_text(outputs[i]),
                        ") for another: pad them to one length");
      all.narrow(0, begin, outputs[i].size(0)).copy_(outputs[i].detach());
    }
  }

  /// Step 1. With ranks, all that can fail so far is in here: the others wait for this one's word.
  void encode_all() {
    buffers_.emplace(work_.buffers, work_.carried);
    for (Encoder& encoder : encoders_) {
      buffers_->begin_encoder();
      // Encoders may share weights, which autocast has cast without a graph.
      at::autocast::clear_cache();
      for (std::int64_t begin = 0; begin < encoder.items;) {
        begin = encode_next(encoder, begin);
      }
      buffers_->end_encoder();
    }
  }

  /// The next part, or several. @return the first item after them.
  std::int64_t encode_next(Encoder& encoder, std::int64_t begin) {
    const std::int64_t left = encoder.items - begin;
    const std::int64_t length = std::min(std::max(encoder.longest, encoder.size), left);
    if (length > encoder.size) {
      const Draws before(work_);
      const Outputs outputs = encode_quietly(encoder, begin, begin + length);
      if (before.is_current(work_)) {
        keep(encoder, begin, outputs);
        buffers_->end_part();
        encoder.stretches.back().end = begin + length;
        return begin + length;
      }
      // Step 3 could not draw the same numbers in shorter parts: no longer parts from here on.
      before.restore(work_);
      buffers_->end_part();
      encoder.longest = encoder.size;
      return begin;
    }
    auto before = std::make_unique<Draws>(work_);
    const PeakMeter meter(work_.device);
    if (encoder.has_graph()) {
      keep(encoder, begin, encode_quietly(encoder, begin, begin + length));
      if (encoder.longest == 0 && encoder.size == length) {
        choose_longest(encoder, meter.peak(), before->is_current(work_));
      }
    } else {
      encode_with_graph(encoder, begin, begin + length);
      with_graph_ = meter.peak();
      if (encoder.has_graph() && !is_one_) {
        at::autocast::clear_cache();
      }
    }
    buffers_->end_part();
    const bool drew = !before->is_current(work_);
    if (drew) {
      encoder.longest = encoder.size;
    }
    if (drew || encoder.stretches.empty() || encoder.stretches.back().draws != nullptr) {
      encoder.stretches.push_back({begin, begin + length, drew ? std::move(before) : nullptr});
    } else {
      encoder.stretches.back().end = begin + length;
    }
    return begin + length;
  }

  Outputs encode_quietly(Encoder& encoder, std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;
    return encode(encoder, begin, end);
  }

  /// A part that shows which outputs need gradients.
  void encode_with_graph(Encoder& encoder, std::int64_t begin, std::int64_t end) {
    Outputs outputs = encode(encoder, begin, end);
    keep(encoder, begin, outputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      encoder.needs[i] = outputs[i].requires_grad();
    }
    if (is_one_) {
      encoder.roots = std::move(outputs);
    }
  }

  /// After a part with a graph, and one of the same length without.
  void choose_longest(Encoder& encoder, std::int64_t without_graph, bool same_draws) const {
    // Layers that see the whole batch, and are allowed, see parts of one length.
    const bool may_differ = same_draws && work_.carried.empty();
    const std::int64_t times = may_differ && without_graph > 0
                                   ? std::max<std::int64_t>(with_graph_ / without_graph, 1)
                                   : 1;
    encoder.longest = encoder.size * times;
  }

  // ---- ranks

  /// @return whether all ranks have. If not, and this one has, it stops.
  bool encode_and_gather() {
    std::exception_ptr error = error_of([&] {
      encode_all();
      buffers_->refuse_changes("encode");
    });
    std::vector<std::string> texts;
    if (!meet(error, error ? std::string() : layout(), texts)) {
      return false;
    }
    std::vector<Outputs> all(encoders_.size());
    error = error_of([&] { place(texts, all); });
    if (!meet(error, "ready", texts)) {
      return false;
    }
    const at::NoGradGuard no_grad;
    for (const Outputs& each : all) {  // nothing may fail in between
      for (const at::Tensor& rows : each) {
        ranks_->sum(rows);
      }
    }
    for (std::size_t i = 0; i < encoders_.size(); ++i) {
      for (std::size_t k = 0; k < all[i].size(); ++k) {
        const at::Tensor& own = encoders_[i].outputs[k];
        encoders_[i].outputs[k] =
            own.is_complex() ? at::view_as_complex(all[i][k]) : all[i][k].to(own.scalar_type());
        all[i][k] = at::Tensor();
      }
    }
    return true;
  }

  template <class Step>
  static std::exception_ptr error_of(const Step& step) {
    try {
      step();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  /// Tells the others how far this rank is. @throws the error.
  bool meet(const std::exception_ptr& error, const std::string& own,
            std::vector<std::string>& texts) {
    RankChannel& channel = ranks_->agreement->channel();
    try {
      texts = channel.texts(own);
    } catch (const RankError&) {
      if (!error) {
        throw;
      }
    }
    if (error) {
      std::rethrow_exception(error);
    }
    if (std::ranges::any_of(texts, [](const std::string& text) { return text.empty(); })) {
      ranks_->agreement->stop_attempt();
      undo();
      return false;
    }
    return true;
  }

  /// The items of each encoder, and what its outputs are.
  std::string layout() const {
    std::string text;
    std::string kinds;
    for (const Encoder& encoder : encoders_) {
      text += c10::str(encoder.items, " ");
      for (std::size_t i = 0; i < encoder.outputs.size(); ++i) {
        kinds += c10::str(encoder.index, ": (…, ", shape_text(encoder.outputs[i]),
                          encoder.needs[i] ? ")* " : ") ");
      }
    }
    return text + "| " + kinds.substr(0, RankChannel::kLongestText / 2);
  }

  /// Zeros for the items of all ranks, with this rank's items in their place.
  void place(const std::vector<std::string>& texts, std::vector<Outputs>& all) {
    const at::NoGradGuard no_grad;
    const auto own = static_cast<std::size_t>(ranks_->agreement->channel().rank());
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      const auto kinds = [&](std::size_t of) { return texts[of].substr(texts[of].find('|')); };
      TORCH_CHECK_VALUE(
          kinds(rank) == kinds(0),
          "the outputs of encode differ between the ranks, so that they cannot be put "
          "together: rank 0 has ",
          kinds(0), "and rank ", rank, " has ", kinds(rank),
          "(*: needs a gradient). Pad them to one length on all ranks");
      std::size_t at = 0;
      for (Encoder& encoder : encoders_) {
        std::size_t length = 0;
        const std::int64_t items = std::stoll(texts[rank].substr(at), &length);
        at += length;
        encoder.offset += rank < own ? items : 0;
        encoder.total += items;
      }
    }
    for (const Encoder& encoder : encoders_) {
      for (const at::Tensor& output : encoder.outputs) {
        const at::Tensor own_items = output.is_complex() ? at::view_as_real(output) : output;
        std::vector<std::int64_t> shape = own_items.sizes().vec();
        shape.front() = encoder.total;
        const at::ScalarType type = own_items.scalar_type();
        // What collectives cannot sum travels as what they can.
        const at::ScalarType travels = type == at::kBool    ? at::kByte
                                       : type == at::kShort ? at::kInt
                                                            : type;
        const at::Tensor zeros = at::zeros(shape, own_items.options().dtype(travels));
        zeros.narrow(0, encoder.offset, encoder.items).copy_(own_items);
        all[encoder.index].push_back(zeros);
      }
    }
  }

  // ---- the loss and its gradients

  at::Tensor loss_of(const std::vector<Outputs>& outputs) {
    const at::Tensor loss = work_.loss(outputs);
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "loss must return one element, got ",
                      loss.defined() ? c10::str("shape ", loss.sizes()) : "none");
    TORCH_CHECK_VALUE(loss.requires_grad(),
                      "the loss does not depend on anything that needs a gradient",
                      at::GradMode::is_enabled() ? "" : ": gradients are off, as by no_grad");
    return loss;
  }

  at::Tensor run_loss() {
    std::vector<Outputs> outputs;
    Outputs leaves;
    for (Encoder& encoder : encoders_) {
      for (std::size_t i = 0; i < encoder.outputs.size(); ++i) {
        const at::Tensor leaf = encoder.outputs[i].detach();
        leaf.set_requires_grad(encoder.needs[i]);
        if (encoder.needs[i]) {
          leaves.push_back(leaf);
        }
        encoder.outputs[i] = leaf;
      }
      outputs.push_back(encoder.outputs);
    }
    std::optional<Draws> before;
    if (ranks_ != nullptr) {
      before.emplace(work_);
    }
    const at::Tensor loss = loss_of(outputs);
    TORCH_CHECK_VALUE(!before || before->is_current(work_),
                      "with ranks, loss must not draw random numbers: they would differ between "
                      "the ranks, and with them the gradients");
    outputs.clear();
    for (const at::Tensor& leaf : leaves) {
      TORCH_CHECK_VALUE(!gradient_of(leaf).defined(),
                        "loss called backward itself: it must only return the loss, on which "
                        "Microbatches calls backward");
    }
    pass_.reach(loss, leaves);
    work_.backward({loss}, {});
    at::Tensor value = loss.detach().clone();
    if (ranks_ != nullptr && ranks_->agreement->channel().rank() > 0) {
      // Every rank has all of it, and the ranks' gradients are summed.
      pass_.drop_gradients();
      value.zero_();
    }
    for (Encoder& encoder : encoders_) {
      for (const at::Tensor& output : encoder.outputs) {
        at::Tensor gradient = std::exchange(gradient_of(output), at::Tensor());
        encoder.gradients.push_back(gradient.defined() && ranks_ != nullptr
                                        ? gradient.narrow(0, encoder.offset, encoder.items)
                                        : std::move(gradient));
      }
      encoder.outputs.clear();
    }
    return value;
  }

  /// The gradients of the outputs, to what the encoder made them of.
  void pass_on(Encoder& encoder) {
    if (std::ranges::none_of(encoder.gradients, [](const at::Tensor& g) { return g.defined(); })) {
      return;
    }
    if (is_one_) {
      backward(encoder, std::exchange(encoder.roots, {}), 0);
      return;
    }
    for (const Stretch& stretch : encoder.stretches) {
      for (std::int64_t begin = stretch.begin; begin < stretch.end; begin += encoder.size) {
        buffers_->begin_part_again(encoder.index);
        if (stretch.draws != nullptr) {
          stretch.draws->restore(work_);
        }
        const std::int64_t end = std::min(begin + encoder.size, stretch.end);
        backward(encoder, encode(encoder, begin, end), begin);
      }
    }
  }

  void backward(const Encoder& encoder, Outputs outputs, std::int64_t begin) {
    TORCH_CHECK_VALUE(outputs.size() == encoder.needs.size(), "encode returned ",
                      encoder.needs.size(), " tensors for a part and ", outputs.size(),
                      " for the same part again");
    Outputs roots;
    Outputs gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad()) {
        continue;
      }
      TORCH_CHECK_VALUE(encoder.needs[i],
                        "an output of encode needs a gradient in some parts only, of which the "
                        "first does not show that");
      if (encoder.gradients[i].defined()) {
        pass_.reach(outputs[i]);
        gradients.push_back(encoder.gradients[i].narrow(0, begin, outputs[i].size(0)));
        roots.push_back(std::move(outputs[i]));
      }
    }
    outputs.clear();
    if (!roots.empty()) {
      work_.backward(roots, gradients);
    }
  }

  BatchPass& pass_;
  const JointPass::Work& work_;
  const JointPass::Ranks* ranks_;
  std::optional<EncoderBuffers> buffers_{};
  std::vector<Encoder> encoders_;
  bool is_one_ = false;          // part
  std::int64_t with_graph_ = 0;  // bytes of the last part with a graph, above what was held
};

}  // namespace

at::Tensor JointPass::run(BatchPass& pass, const Work& work, std::int64_t size,
                          const Ranks* ranks) {
  TORCH_CHECK_VALUE(!work.items.empty() && std::ranges::min(work.items) >= 1,
                    "each encoder's batch must have 1 item or more, got ",
                    c10::Join(", ", work.items));
  TORCH_CHECK_VALUE(size >= 1, "the size of a part must be 1 or more, got ", size);
  TORCH_CHECK_VALUE(at::GradMode::is_enabled(), "gradients are off, as by no_grad");
  return pass.run_as([&]() -> at::Tensor {
    Joint joint(pass, work, size, ranks);
    std::exception_ptr error;
    try {
      return joint.run();
    } catch (...) {
      error = std::current_exception();
    }
    joint.undo();
    std::rethrow_exception(std::move(error));
  });
}

}  // namespace brim::detail
