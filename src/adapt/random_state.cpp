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

/// Whether the generator is still where `snapshot` was taken, without comparing all 624 words: a
/// block of words follows from the seed and its number, so equal seeds, equal positions and equal
/// first words mean equal blocks. Read without the generator's lock, which would take longer than
/// all the rest: where another thread draws at the same moment, what this one draws is not
/// determined anyway.
bool unchanged(const CpuRandomSnapshot& snapshot, at::CPUGeneratorImpl& generator) {
  const at::mt19937_data_pod& then = data_of(snapshot.engine);
  const at::mt19937_data_pod& now = data_of(engine_of(generator));
  return then.seed_ == now.seed_ && then.left_ == now.left_ && then.next_ == now.next_ &&
         then.state_[0] == now.state_[0] && then.state_[1] == now.state_[1] &&
         then.state_[2] == now.state_[2] && then.state_[3] == now.state_[3] &&
         snapshot.next_float == generator.next_float_normal_sample() &&
         snapshot.next_double == generator.next_double_normal_sample();
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
  if (snapshot == nullptr || !unchanged(*snapshot, generator)) {
    if (snapshot == nullptr || snapshot->users > 1) {  // else nobody needs the old one: reuse it
      release(std::exchange(snapshot, nullptr));
      snapshot = new CpuRandomSnapshot{.users = 1};
    }
    const std::lock_guard lock(generator.mutex_);
    snapshot->engine = engine_of(generator);
    snapshot->next_float = generator.next_float_normal_sample();
    snapshot->next_double = generator.next_double_normal_sample();
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
