// Small text files of /proc and /sys. Without streams: a program may bring a second copy of the
// C++ library, linked statically or of another compiler, and a stream whose facets are the one's
// and whose identifiers are the other's crashes (seen with the compiler of a machine with a GPU).
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hetero {

// The whole content; empty if the file cannot be read.
inline std::string read_text(const std::string& path) {
  std::string text;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char part[4096];
  for (ssize_t got; (got = ::read(fd, part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(got));
  }
  ::close(fd);
  return text;
}

// The parts between separators. A text that ends with the separator has no empty part there.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

inline std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\n";
  const std::size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// The whole number that `text` is; none if it is something else.
inline std::optional<long long> whole_number(std::string_view text) {
  text = trim(text);
  long long number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace hetero
