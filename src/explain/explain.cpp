#include <brim/explain/shortage.h>
#include <brim/memory/host_memory.h>

#include <string_view>

namespace brim {

std::string explain(const std::exception_ptr& error, c10::Device device, const BlockWatch* watch) {
  ShortageFacts facts{.error = classify(error), .stats = memory_stats(device)};
  if (!facts.error) {
    return "";
  }
  if (device.is_cpu()) {
    facts.resident = read_host_memory().resident;
  }
  if (watch != nullptr) {
    std::vector<HeldBlock> blocks;
    for (const LiveBlock& block : watch->blocks()) {
      blocks.push_back(
          {.bytes = block.bytes, .where = place_text(block.place), .has_reason = true});
    }
    facts.held = holders_of(blocks, watch->clock());
  }
  std::string text = to_string(diagnose(facts));
  if (!facts.held.empty()) {
    text += "\n\n" + to_string(facts.held);
  }
  return text;
}

}  // namespace brim
