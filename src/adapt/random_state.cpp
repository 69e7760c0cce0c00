#include <brim/adapt/random_state.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>
#include <type_traits>
#include <utility>

namespace brim {

struct CpuRandomSnapshot {
  at::mt19937 engine{};
  std::optional<float> next_float{};
  std::optional<double> next_double{};
  int users = 0;  // RandomStates, and the thread's latest; not atomic, since all are on one thread
};

namespace {

// CPUGeneratorImpl hands its engine out by value only, and copying 2.5 kB on every call is what we
// want to avoid. Naming a private member in an explicit instantiation is the one way to it that the
// language allows.
template <auto Member>
struct EngineAccess {
  friend const at::mt19937& engine_of(const at::CPUGeneratorImpl& generator) {
    return generator.*Member;
  }
};
const at::mt19937& engine_of(const at::CPUGeneratorImpl& generator);
template struct EngineAccess<&at::CPUGeneratorImpl::engine_>;

const at::mt19937_data_pod& data_of(const at::mt19937& engine) {
  // The engine is a standard-layout class whose only member is its data.
  static_assert(std::is_standard_layout_v<at::mt19937> &&
                sizeof(at::mt19937) == sizeof(at::mt19937_data_pod));
  return reinterpret_cast<const at::mt19937_data_pod&>(engine);
}

/// Whether two engines are in the same state, without comparing all 624 words: a block of words
/// follows from the seed and its number, so equal seeds, equal positions and equal first words mean
/// equal blocks.
bool same_state(const at::mt19937& left, const at::mt19937& right) {
  const at::mt19937_data_pod& a = data_of(left);
  const at::mt19937_data_pod& b = data_of(right);
  return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ &&
         a.state_[0] == b.state_[0] && a.state_[1] == b.state_[1] && a.state_[2] == b.state_[2] &&
         a.state_[3] == b.state_[3];
}

at::CPUGeneratorImpl& cpu_generator() {
  static auto* const generator = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  return *generator;
}

void release(CpuRandomSnapshot* snapshot) {
  if (snapshot != nullptr && --snapshot->users == 0) {
    delete snapshot;
  }
}

/// The last snapshot that this thread took.
struct Latest {
  CpuRandomSnapshot* snapshot = nullptr;
  ~Latest() { release(snapshot); }
};

CpuRandomSnapshot* snapshot_cpu() {
  thread_local Latest latest;
  CpuRandomSnapshot*& snapshot = latest.snapshot;
  at::CPUGeneratorImpl& generator = cpu_generator();
  const std::lock_guard lock(generator.mutex_);
  const std::optional<float> next_float = generator.next_float_normal_sample();
  const std::optional<double> next_double = generator.next_double_normal_sample();
  const at::mt19937& engine = engine_of(generator);
  const bool unchanged = snapshot != nullptr && same_state(snapshot->engine, engine) &&
                         snapshot->next_float == next_float && snapshot->next_double == next_double;
  if (!unchanged) {
    if (snapshot == nullptr || snapshot->users > 1) {  // else nobody needs the old one: reuse it
      release(std::exchange(snapshot, nullptr));
      snapshot = new CpuRandomSnapshot{.users = 1};
    }
    snapshot->engine = engine;
    snapshot->next_float = next_float;
    snapshot->next_double = next_double;
  }
  ++snapshot->users;
  return snapshot;
}

}  // namespace

RandomState::RandomState(c10::Device device) : cpu_(snapshot_cpu()) {
  if (device.is_cuda() || device.is_xpu()) {  // the generators that are a seed and an offset
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    accelerator_ = Accelerator{device, generator.current_seed(), generator.get_offset()};
  }
}

RandomState::~RandomState() { release(cpu_); }

void RandomState::restore() const {
  {
    at::CPUGeneratorImpl& generator = cpu_generator();
    const std::lock_guard lock(generator.mutex_);
    generator.set_engine(cpu_->engine);
    generator.set_next_float_normal_sample(cpu_->next_float);
    generator.set_next_double_normal_sample(cpu_->next_double);
  }
  if (accelerator_) {
    at::Generator generator = at::globalContext().defaultGenerator(accelerator_->device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(accelerator_->seed);
    generator.set_offset(accelerator_->offset);
  }
}

}  // namespace brim
