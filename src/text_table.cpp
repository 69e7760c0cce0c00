#include <brim/text_table.h>

#include <algorithm>

namespace brim {
namespace {

/// Characters of UTF-8: all bytes but those that continue one.
std::size_t length(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (byte & 0xC0) != 0x80; }));
}

}  // namespace

std::string text_table(const std::vector<std::string>& head,
                       const std::vector<std::vector<std::string>>& rows, std::size_t left,
                       const std::vector<std::string>& last) {
  std::vector<std::size_t> widths(head.size());
  const auto widen = [&](const std::vector<std::string>& row) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], length(row[i]));
    }
  };
  widen(head);
  widen(last);
  std::for_each(rows.begin(), rows.end(), widen);

  std::size_t width = 2 * (head.size() - 1);
  for (const std::size_t each : widths) {
    width += each;
  }
  std::string rule(width + 2, '-');
  rule.front() = rule.back() = '\n';
  const auto line = [&](const std::vector<std::string>& row) {
    std::string text;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - length(row[i]), ' ');
      text.append(i == 0 ? 0 : 2, ' ');
      text.append(i < left ? row[i] + gap : gap + row[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::string text = line(head) + rule;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    text.append(i == 0 ? 0 : 1, '\n');
    text.append(line(rows[i]));
  }
  return last.empty() ? text : text + rule + line(last);
}

}  // namespace brim
