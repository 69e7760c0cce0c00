#include <brim/adapt/detail/random_state.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <atomic>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory/backend.h"
#include "per_thread.h"
#include "waiting.h"

// This header needs none of CUDA's. Where torch comes without it there is no such generator.
#if __has_include(<ATen/cuda/CUDAGeneratorImpl.h>)
#include <ATen/cuda/CUDAGeneratorImpl.h>
#define BRIM_READS_CUDA_GENERATORS 1
#else
#define BRIM_READS_CUDA_GENERATORS 0
#endif

namespace brim {
namespace {

// CPUGeneratorImpl returns its engine only by value, and a call that fits should not copy 2.5 kB.
// CUDAGeneratorImpl asks the driver whether a graph is being captured, which takes a microsecond,
// and refuses to tell its seed then. An explicit instantiation may name a private member. Both are
// read under the generator's lock.
template <auto Engine, auto NextFloat, auto NextDouble>
struct CpuAccess {
  friend const at::mt19937& engine_of(const at::CPUGeneratorImpl& generator) {
    return generator.*Engine;
  }
  friend bool normal_samples_are(const at::CPUGeneratorImpl& generator, std::optional<float> f,
                                 std::optional<double> d) {
    return generator.*NextFloat == f && generator.*NextDouble == d;
  }
};
const at::mt19937& engine_of(const at::CPUGeneratorImpl& generator);
bool normal_samples_are(const at::CPUGeneratorImpl& generator, std::optional<float> f,
                        std::optional<double> d);
template struct CpuAccess<&at::CPUGeneratorImpl::engine_,
                          &at::CPUGeneratorImpl::next_float_normal_sample_,
                          &at::CPUGeneratorImpl::next_double_normal_sample_>;

#if BRIM_READS_CUDA_GENERATORS
template <auto Member>
struct StateAccess {
  friend const at::CUDAGeneratorState& state_of(const at::CUDAGeneratorImpl& generator) {
    return *(generator.*Member);
  }
};
const at::CUDAGeneratorState& state_of(const at::CUDAGeneratorImpl& generator);
template struct StateAccess<&at::CUDAGeneratorImpl::state_>;
#endif

const at::mt19937_data_pod& data_of(const at::mt19937& engine) {
  // The engine is a standard-layout class whose only member is its data.
  static_assert(std::is_standard_layout_v<at::mt19937> &&
                sizeof(at::mt19937) == sizeof(at::mt19937_data_pod));
  return reinterpret_cast<const at::mt19937_data_pod&>(engine);
}

at::CPUGeneratorImpl& cpu_generator() {
  return *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
}

struct Snapshot final : CpuRandomSnapshot {
  at::mt19937 engine{};
  std::optional<float> next_float{};
  std::optional<double> next_double{};

  /// Whether the generator is still where it was, without comparing all 624 words: a block of words
  /// follows from the seed and its number, so equal seeds, equal positions and equal first words
  /// mean equal blocks. The caller holds the generator's lock.
  bool is_current(const at::CPUGeneratorImpl& generator) const {
    const at::mt19937_data_pod& then = data_of(engine);
    const at::mt19937_data_pod& now = data_of(engine_of(generator));
    return then.seed_ == now.seed_ && then.left_ == now.left_ && then.next_ == now.next_ &&
           then.state_[0] == now.state_[0] && then.state_[1] == now.state_[1] &&
           then.state_[2] == now.state_[2] && then.state_[3] == now.state_[3] &&
           normal_samples_are(generator, next_float, next_double);
  }
};

void release(Snapshot* snapshot) {
  if (snapshot != nullptr && --snapshot->users == 0) {
    delete snapshot;
  }
}

/// The CPU's generator and the last snapshot that this thread took of it.
struct Latest {
  at::CPUGeneratorImpl& generator = cpu_generator();
  Snapshot* snapshot = nullptr;
  ~Latest() { release(snapshot); }
};

/// The generator's lock is held.
[[gnu::noinline]] void take_snapshot(Latest& latest) {
  Snapshot*& snapshot = latest.snapshot;
  if (snapshot == nullptr || snapshot->users > 1) {  // else the old one is not needed: reuse it
    release(std::exchange(snapshot, nullptr));
    snapshot = new Snapshot;
    snapshot->users = 1;
  }
  snapshot->engine = engine_of(latest.generator);
  snapshot->next_float = latest.generator.next_float_normal_sample();
  snapshot->next_double = latest.generator.next_double_normal_sample();
}

CpuRandomSnapshot* snapshot_cpu() {
  auto& latest = PerThread<Latest>::get();
  with_lock(latest.generator.mutex_, [&latest] {
    if (latest.snapshot == nullptr || !latest.snapshot->is_current(latest.generator)) {
      take_snapshot(latest);
    }
  });
  ++latest.snapshot->users;
  return latest.snapshot;
}

/// The default generators of all devices of one kind. They live as long as the process.
struct Generators {
  c10::DeviceType kind;
  std::vector<c10::GeneratorImpl*> of_device;
};

/// Null as long as torch has not begun to use such a device: nothing can have been drawn there.
const Generators* generators_in_use(c10::DeviceType kind) {
  static std::atomic<const Generators*> known{nullptr};
  const Generators* generators = known.load(std::memory_order_acquire);
  if (generators != nullptr && generators->kind == kind) {
    return generators;
  }
  if (lost_to_fork(kind) || !device_allocator(kind).initialized()) {
    return nullptr;
  }
  auto found = std::make_unique<Generators>(Generators{kind, {}});
  try {
    for (c10::DeviceIndex i = 0; i < device_count(kind); ++i) {
      found->of_device.push_back(
          at::globalContext().defaultGenerator({kind, i}).unsafeGetGeneratorImpl());
    }
  } catch (const c10::Error&) {
    return nullptr;  // one is not there yet and cannot be made while a graph is being captured
  }
  if (known.compare_exchange_strong(generators, found.get())) {
    generators = found.release();
  }
  return generators;
}

/// The generator's lock is held.
RandomPlace place_of([[maybe_unused]] c10::DeviceType kind, const c10::GeneratorImpl& generator) {
#if BRIM_READS_CUDA_GENERATORS
  if (kind == c10::DeviceType::CUDA) {
    const auto& state = state_of(static_cast<const at::CUDAGeneratorImpl&>(generator));
    return {state.seed_, state.philox_offset_per_thread_};
  }
#endif
  return {generator.current_seed(), generator.get_offset()};
}

}  // namespace

RandomState::RandomState(c10::Device device) : cpu_(snapshot_cpu()), kind_(device.type()) {
  if (device.is_cuda() || device.is_xpu()) {  // the generators that are a seed and an offset
    take_accelerators();
  }
}

void RandomState::take_accelerators() {
  if (const Generators* generators = generators_in_use(kind_)) {
    for (c10::GeneratorImpl* generator : generators->of_device) {
      with_lock(generator->mutex_, [&] { accelerators_.push_back(place_of(kind_, *generator)); });
    }
  }
}

void RandomState::destroy(CpuRandomSnapshot* snapshot) { delete static_cast<Snapshot*>(snapshot); }

bool RandomState::is_current() const {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  bool same = true;
  with_lock(cpu.mutex_, [&] { same = static_cast<const Snapshot&>(*cpu_).is_current(cpu); });
  const Generators* generators = kind_ == c10::DeviceType::CUDA || kind_ == c10::DeviceType::XPU
                                     ? generators_in_use(kind_)
                                     : nullptr;
  for (std::size_t i = 0; generators != nullptr && i < generators->of_device.size(); ++i) {
    c10::GeneratorImpl& generator = *generators->of_device[i];
    with_lock(generator.mutex_, [&] {
      const RandomPlace now = place_of(kind_, generator);
      // A generator that has come since began with the seed that it has, at 0.
      const RandomPlace then =
          i < accelerators_.size() ? accelerators_[i] : RandomPlace{now.seed, 0};
      same = same && now.seed == then.seed && now.offset == then.offset;
    });
  }
  return same;
}

void RandomState::restore() const {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const auto& snapshot = static_cast<const Snapshot&>(*cpu_);
  with_lock(cpu.mutex_, [&] {
    cpu.set_engine(snapshot.engine);
    cpu.set_next_float_normal_sample(snapshot.next_float);
    cpu.set_next_double_normal_sample(snapshot.next_double);
  });
  const Generators* generators = kind_ == c10::DeviceType::CUDA || kind_ == c10::DeviceType::XPU
                                     ? generators_in_use(kind_)
                                     : nullptr;
  if (generators == nullptr) {
    return;
  }
  for (std::size_t i = 0; i < generators->of_device.size(); ++i) {
    c10::GeneratorImpl& generator = *generators->of_device[i];
    with_lock(generator.mutex_, [&] {
      const RandomPlace now = place_of(kind_, generator);
      // A generator that has come since began with the seed that it has, at 0.
      const RandomPlace then =
          i < accelerators_.size() ? accelerators_[i] : RandomPlace{now.seed, 0};
      // Only what moved is put back: torch refuses that while a graph is being captured, and in a
      // forked process, where nothing can have been drawn.
      if (now.seed != then.seed) {
        generator.set_current_seed(then.seed);
      }
      if (now.seed != then.seed || now.offset != then.offset) {
        generator.set_offset(then.offset);
      }
    });
  }
}

}  // namespace brim
