#include "io/io_engine.h"

#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "io/engines/block_engine.h"
#include "io/engines/thread_driver.h"
#ifdef HETERO_LIBURING
#include "io/engines/uring_driver.h"
#endif

namespace hetero {

namespace {

std::string describe(IoKind kind, const std::string& path, std::uint64_t offset,
                     std::size_t wanted_bytes, std::size_t got_bytes, int error,
                     std::int64_t free_bytes) {
  std::string text = kind == IoKind::read ? "read of " : "write of ";
  text += std::to_string(wanted_bytes) + " bytes at offset " + std::to_string(offset) + " of " +
          path + " failed after " + std::to_string(got_bytes) + " bytes: ";
  text += error == 0
              ? "unexpected end of file"
              : std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
  if (free_bytes >= 0) {
    char free[48];
    std::snprintf(free, sizeof free, "; %.1f GiB free",
                  static_cast<double>(free_bytes) / (std::uint64_t{1} << 30));
    text += free;
  }
  return text;
}

std::shared_ptr<IoEngine> make(const IoOptions& options, BlockEngine::MakeDriver* driver) {
  return {new BlockEngine(options, driver), [](BlockEngine* engine) {
            engine->close();
            if (engine->disposable()) delete engine;
          }};
}

}  // namespace

IoError::IoError(IoKind kind, std::string path, std::uint64_t offset, std::size_t wanted_bytes,
                 std::size_t got_bytes, int error, std::int64_t free_bytes)
    : std::runtime_error(describe(kind, path, offset, wanted_bytes, got_bytes, error, free_bytes)),
      kind(kind),
      path(std::move(path)),
      offset(offset),
      wanted_bytes(wanted_bytes),
      got_bytes(got_bytes),
      error(error),
      free_bytes(free_bytes) {}

std::shared_ptr<IoEngine> make_io_engine(const std::string& kind, const IoOptions& options) {
  if (kind == "threads") return make(options, &ThreadDriver::make);
  if (kind == "io_uring") {
#ifdef HETERO_LIBURING
    return make(options, &UringDriver::make);
#else
    throw std::system_error(ENOSYS, std::generic_category(),
                            "the io_uring engine was not built (install liburing-dev and reinstall "
                            "hetero, or use \"threads\")");
#endif
  }
  throw std::invalid_argument("unknown I/O engine \"" + kind +
                              "\": it is \"io_uring\" or \"threads\"");
}

}  // namespace hetero
