#include "io/io_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace hetero {

namespace {

// No device asks for more; where less would do, a little is transferred again.
constexpr std::size_t kDirectAlignment = 4096;

}  // namespace

OpenFile::OpenFile(int source, const std::string& name)
    : fd(::fcntl(source, F_DUPFD_CLOEXEC, 0)), path(std::make_shared<const std::string>(name)) {
  if (fd.get() < 0)
    throw std::system_error(errno, std::generic_category(), "cannot add file " + name);
  struct stat status;
  regular = ::fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode);
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags >= 0 && (flags & O_DIRECT) != 0) alignment = kDirectAlignment;
}

bool OpenFile::ends_at(std::uint64_t position) const {
  struct stat status;
  return regular && ::fstat(fd.get(), &status) == 0 &&
         position >= static_cast<std::uint64_t>(status.st_size);
}

std::int64_t OpenFile::free_bytes() const {
  struct statvfs status;
  if (::fstatvfs(fd.get(), &status) != 0) return -1;
  return static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
}

IoFile::IoFile(const std::vector<FileMember>& sources, const StripeMap& map) : stripes(map) {
  if (sources.size() != stripes.members()) {
    throw std::invalid_argument("the stripe map is for " + std::to_string(stripes.members()) +
                                " members, not " + std::to_string(sources.size()));
  }
  std::string paths;
  for (const FileMember& source : sources) {
    members.push_back(std::make_unique<OpenFile>(source.fd, source.path));
    paths += (paths.empty() ? "" : " + ") + source.path;
  }
  path = std::make_shared<const std::string>(std::move(paths));
}

std::shared_ptr<const std::string> IoFile::name_at(std::uint64_t offset) const {
  auto after = names.upper_bound(offset);
  if (after == names.begin()) return nullptr;
  const NamedRange& range = (--after)->second;
  return offset < range.end ? range.name : nullptr;
}

}  // namespace hetero
