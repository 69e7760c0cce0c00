// Samples of several sources, with weights that may change while they are read.
#include <brim/batching/mixture.h>
#include <pybind11/stl.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "interpreter.h"
#include "numbers.h"
#include "tensor_argument.h"

namespace brim::python {
namespace {

using batching::Mixture;

/// Weights in memory that processes share: a number that is odd while they are written, a word of
/// Python's, when they were set, and the weights.
class SharedWeights {
 public:
  struct Setting {
    std::int64_t stamp;
    std::vector<double> weights;
  };

  explicit SharedWeights(const py::object& words) {
    const at::Tensor* const tensor = tensor_in(words.ptr());
    TORCH_CHECK_TYPE(tensor != nullptr && tensor->scalar_type() == at::kLong && tensor->numel() > 3,
                     "words must be an int64 tensor of more than 3");
    words_ = *tensor;
    values_ = words_.mutable_data_ptr<std::int64_t>();
  }

  /// Changes with each setting.
  [[nodiscard]] std::int64_t sequence() const { return word(0).load(std::memory_order_acquire); }

  /// Empty while they are written.
  [[nodiscard]] std::optional<Setting> read() const {
    const std::int64_t before = sequence();
    Setting setting{word(2).load(std::memory_order_relaxed), std::vector<double>(count())};
    for (std::size_t i = 0; i < count(); ++i) {
      setting.weights[i] = std::bit_cast<double>(word(3 + i).load(std::memory_order_relaxed));
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool same = before % 2 == 0 && word(0).load(std::memory_order_relaxed) == before;
    return same ? std::optional(std::move(setting)) : std::nullopt;
  }

  /// Sets them, unless what is there was set later.
  void write(const Setting& setting) {
    Mixture::check(setting.weights);
    TORCH_CHECK_VALUE(setting.weights.size() == count(), "weights must be ", count(),
                      ", one per source, got ", setting.weights.size());
    std::int64_t before = sequence();
    constexpr int kPatience = 1'000'000;  // a process that was killed between two lines below
    for (int i = 0; before % 2 != 0 || !word(0).compare_exchange_weak(before, before + 1); ++i) {
      TORCH_CHECK(i < kPatience, "the weights of a mixture are being set by a process that ended");
      before = sequence();
    }
    std::atomic_thread_fence(std::memory_order_release);
    if (setting.stamp >= word(2).load(std::memory_order_relaxed)) {
      word(2).store(setting.stamp, std::memory_order_relaxed);
      for (std::size_t i = 0; i < count(); ++i) {
        word(3 + i).store(std::bit_cast<std::int64_t>(setting.weights[i]),
                          std::memory_order_relaxed);
      }
    }
    word(0).store(before + 2, std::memory_order_release);
  }

 private:
  [[nodiscard]] std::atomic_ref<std::int64_t> word(std::size_t place) const {
    return std::atomic_ref(values_[place]);
  }
  [[nodiscard]] std::size_t count() const { return static_cast<std::size_t>(words_.numel()) - 3; }

  at::Tensor words_;
  std::int64_t* values_ = nullptr;
};

enum class AtEnd : std::uint8_t { stop, restart, drop };

/// The samples one after the other. Weights that are set meanwhile hold from the next one on.
class MixedSamples {
 public:
  /// The number of samples before, when they were set, and the weights.
  using Change = std::tuple<std::int64_t, std::int64_t, std::vector<double>>;

  /// @param begin gives an iterator over the source of this number.
  /// @param sizeof_sample what a sample counts; None: 1.
  /// @param past weights of an earlier run of these samples, which come again at the same places.
  /// @param drawn how many samples that run had read: later ones follow what is set now.
  /// @param follow whether weights that are set while samples are read hold at once.
  MixedSamples(py::object begin, const py::object& words, std::uint64_t seed,
               const std::string& at_end, py::object sizeof_sample, std::vector<Change> past,
               std::int64_t drawn, bool follow)
      : begin_(std::move(begin)),
        sizeof_(std::move(sizeof_sample)),
        shared_(words),
        seen_(shared_.sequence()),
        at_end_(word_argument<AtEnd>("at_end", at_end, {"stop", "restart", "drop"})),
        past_(std::move(past)),
        drawn_(drawn),
        follow_(follow),
        mixture_(first_weights(), seed) {
    const std::size_t sources = mixture_.weights().size();
    for (std::size_t i = 0; i < sources; ++i) {
      iterators_.push_back(invoke(begin_, i));
    }
    ended_.resize(sources);
    fresh_.resize(sources);
  }

  /// @throws py::error_already_set with StopIteration at the end.
  py::object next() {
    follow_weights();
    if (mixture_.taken() % kBetweenSignals == 0 && PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    while (const std::optional<std::size_t> source = over_ ? std::nullopt : mixture_.next()) {
      py::object sample = read(*source);
      if (!sample) {
        over_ = !goes_on(*source);
        continue;
      }
      fresh_[*source] = false;
      mixture_.took(*source, size_of(sample, *source));
      return sample;
    }
    over_ = true;
    PyErr_SetNone(PyExc_StopIteration);
    throw py::error_already_set();
  }

  [[nodiscard]] std::int64_t taken() const { return mixture_.taken(); }

  [[nodiscard]] std::vector<Change> changes() const {
    std::vector<Change> result;
    for (std::size_t i = 0; i < stamps_.size(); ++i) {
      const auto& [taken, weights] = mixture_.changes()[i];
      result.emplace_back(taken, stamps_[i], weights);
    }
    // A run that ended before its last change came again.
    result.insert(result.end(), past_.begin() + static_cast<std::ptrdiff_t>(next_past_),
                  past_.end());
    return result;
  }

 private:
  static constexpr std::int64_t kBetweenSignals = 4096;  // samples

  std::vector<double> first_weights() {
    if (!past_.empty()) {
      next_past_ = 1;
      stamps_.push_back(std::get<1>(past_[0]));
      return std::get<2>(past_[0]);
    }
    std::optional<SharedWeights::Setting> setting;
    while (!setting) {
      seen_ = shared_.sequence();
      setting = shared_.read();
    }
    stamps_.push_back(setting->stamp);
    return setting->weights;
  }

  void follow_weights() {
    const std::int64_t taken = mixture_.taken();
    for (; next_past_ < past_.size() && std::get<0>(past_[next_past_]) <= taken; ++next_past_) {
      mixture_.set_weights(std::get<2>(past_[next_past_]));
      stamps_.push_back(std::get<1>(past_[next_past_]));
    }
    const std::int64_t sequence = shared_.sequence();
    const bool replayed = past_.empty() || taken >= drawn_;
    if (!follow_ || !replayed || (sequence == seen_ && (past_.empty() || looked_))) {
      return;
    }
    if (const auto setting = shared_.read()) {
      looked_ = true;
      seen_ = sequence;
      if (setting->stamp > stamps_.back()) {
        mixture_.set_weights(setting->weights);
        stamps_.push_back(setting->stamp);
      }
    }
  }

  py::object read(std::size_t source) {
    PyObject* const iterator = iterators_[source].ptr();
    auto sample =
        py::reinterpret_steal<py::object>(entering_python([&] { return PyIter_Next(iterator); }));
    if (!sample && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return sample;
  }

  double size_of(const py::object& sample, std::size_t source) const {
    if (sizeof_.is_none()) {
      return 1.0;
    }
    const py::object size = invoke(sizeof_, sample);
    return size_number(size.ptr(), {"sizes", "source", static_cast<std::int64_t>(source)});
  }

  /// Whether there are more samples though a source has ended.
  bool goes_on(std::size_t source) {
    if (at_end_ == AtEnd::drop) {
      mixture_.drop(source);
      return true;
    }
    if (at_end_ == AtEnd::stop) {
      return false;
    }
    // Else it would be asked for ever.
    TORCH_CHECK_VALUE(!fresh_[source], "source ", source,
                      " of the mixture gives no samples, so it cannot begin anew");
    ended_[source] = true;
    const std::vector<double>& weights = mixture_.weights();
    bool all = true;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      all = all && (ended_[i] || weights[i] == 0);
    }
    if (!all) {
      iterators_[source] = invoke(begin_, source);
      fresh_[source] = true;
    }
    return !all;
  }

  py::object begin_;
  py::object sizeof_;
  SharedWeights shared_;
  std::int64_t seen_;
  AtEnd at_end_;
  std::vector<Change> past_;
  std::int64_t drawn_;
  bool follow_;
  std::size_t next_past_ = 0;
  std::vector<std::int64_t> stamps_;  // of the mixture's changes
  Mixture mixture_;
  std::vector<py::object> iterators_;
  std::vector<bool> ended_;
  std::vector<bool> fresh_;  // begun anew, and not read since
  bool looked_ = false;      // at what is set now, after the past
  bool over_ = false;
};

}  // namespace

void register_mixture(py::module_& m) {
  using Change = MixedSamples::Change;
  py::class_<MixedSamples>(m, "MixedSamples")
      .def(py::init<py::object, const py::object&, std::uint64_t, const std::string&, py::object,
                    std::vector<Change>, std::int64_t, bool>())
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &MixedSamples::next)
      .def_property_readonly("taken", &MixedSamples::taken)
      .def_property_readonly("changes", &MixedSamples::changes);
  m.def("set_weights",
        [](const py::object& words, std::vector<double> weights, std::int64_t stamp) {
          SharedWeights(words).write({stamp, std::move(weights)});
        });
  m.def("weights_now", [](const py::object& words) {
    const auto setting = SharedWeights(words).read();
    return setting ? setting->weights : std::vector<double>();
  });
}

}  // namespace brim::python
