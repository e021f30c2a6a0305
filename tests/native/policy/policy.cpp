// Steps of a pipeline whose transfers and updates take no time, so that what is read and written
// follows from the policy alone.
//
// policy BUFFERS STREAMING ORDER... prints of each step how many tiles are read, how many are
// written after their updates, and how many only when their buffers are needed. An order is keys
// with commas, its tasks in this order; STREAMING 0 expects nothing.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "pipeline/buffer_policy.h"

namespace hetero {

void IoOp::wait() {}  // there are no transfers

namespace {

class Pipeline {
 public:
  explicit Pipeline(std::size_t buffers) : buffers_(nullptr, buffers, 0) {}

  void step(const std::vector<std::int64_t>& order, std::size_t streaming) {
    reads = writes = late_writes = 0;
    if (streaming > 0) {
      std::vector<Expectation> expected;
      for (const std::int64_t key : order) expected.push_back({key, 0, kInRam, kInFile});
      policy_.expect(std::move(expected), streaming);
    }
    for (const std::int64_t key : order)
      queue_.push({{key, 0, kInRam, kInRam, kInFile, {}}, {}, {}});
    while (!queue_.empty()) {
      Buffer& buffer = acquire(queue_.front().task.key);
      queue_.pop();
      // The update.
      buffer.keeps_optim_state = true;
      buffer.read_ahead = false;
      buffer.dirty_at = 0;
      if (policy_.writes_at_once(buffer.key)) write(buffer, writes);
      buffer.state = BufferState::idle;
      buffers_.touch(buffer);
      HETERO_CHECK(buffers_.is_consistent());
    }
  }

  int reads = 0, writes = 0, late_writes = 0;

 private:
  static inline char ram = 0;
  static constexpr Location kInRam = {&ram, -1};
  static constexpr Location kInFile = {nullptr, 0};

  Buffer& acquire(std::int64_t key) {
    if (Buffer* const kept = buffers_.find(key)) {
      kept->state = BufferState::assigned;
      return *kept;
    }
    for (;;) {
      const auto [buffer, dirty] = policy_.choose(queue_.front().place);
      HETERO_CHECK(buffer != nullptr || !dirty.empty());  // or this would wait for ever
      for (Buffer* each : dirty) write(*each, late_writes);
      if (buffer == nullptr) continue;
      if (buffer->dirty()) write(*buffer, late_writes);
      buffers_.rename(*buffer, key);
      buffer->state = BufferState::assigned;
      ++reads;
      return *buffer;
    }
  }

  static void write(Buffer& buffer, int& count) {
    buffer.dirty_at = Buffer::kClean;
    ++count;
  }

  BufferPool buffers_;
  WorkQueue queue_;
  BufferPolicy policy_{queue_, buffers_};
};

}  // namespace
}  // namespace hetero

int main(int count, char** arguments) {
  try {
    hetero::Pipeline pipeline(std::stoul(arguments[1]));
    for (int i = 3; i < count; ++i) {
      std::vector<std::int64_t> order;
      std::istringstream keys(arguments[i]);
      for (std::string key; std::getline(keys, key, ',');) order.push_back(std::stol(key));
      pipeline.step(order, std::stoul(arguments[2]));
      std::printf("%d %d %d\n", pipeline.reads, pipeline.writes, pipeline.late_writes);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "policy: %s\n", error.what());
    return 1;
  }
}
