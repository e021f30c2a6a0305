// What an engine has of a file: duplicated descriptors, and how the bytes lie in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork.h"
#include "io/page_checksums.h"
#include "io/stripe_map.h"

namespace hetero {

// A file to be added: the engine duplicates `fd` and uses `path` in messages only.
struct FileMember {
  int fd;
  std::string path;
};

// A duplicated file descriptor.
struct OpenFile {
  // Throws std::system_error when `fd` cannot be duplicated.
  OpenFile(int fd, const std::string& path);
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  // Whether `position` is at or past the end; false for what has no size (devices, pipes).
  bool ends_at(std::uint64_t position) const;
  std::int64_t free_bytes() const;  // of the filesystem; -1 if unknown

  const ParentFd fd;
  const std::shared_ptr<const std::string> path;  // shared with errors, which outlive the file
  bool regular = false;
  std::size_t alignment = 1;  // transfers resume at multiples of this
};

// One logical file of one or several members; the members are closed when nobody uses it any more.
struct IoFile {
  // Throws std::invalid_argument when there are not as many members as in `stripes`.
  IoFile(const std::vector<FileMember>& members, const StripeMap& stripes);

  // What the range that begins at or before `offset`, and reaches it, has; null if it has no name.
  std::shared_ptr<const std::string> name_at(std::uint64_t offset) const;

  const StripeMap stripes;
  std::vector<std::unique_ptr<OpenFile>> members;
  std::shared_ptr<const std::string> path;  // of all members, for messages

  // What follows is under the engine's mutex.
  struct NamedRange {
    std::uint64_t end;
    std::shared_ptr<const std::string> name;
  };
  std::map<std::uint64_t, NamedRange> names;  // by where they begin
  std::optional<PageChecksums> checksums;
  std::size_t pending = 0;  // operations not yet settled
};

}  // namespace hetero
