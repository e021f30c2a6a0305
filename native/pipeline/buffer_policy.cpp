#include "pipeline/buffer_policy.h"

#include <algorithm>
#include <utility>

namespace hetero {

BufferPolicy::BufferPolicy(WorkQueue& queue, BufferPool& buffers)
    : queue_(queue),
      buffers_(buffers),
      most_staged_(std::max<std::size_t>(1, buffers.size() / 2)) {}

void BufferPolicy::expect(std::vector<Expectation> expected, std::size_t streaming) {
  const std::size_t buffers = buffers_.size();
  streaming = std::min(streaming, buffers);
  most_staged_ = std::max<std::size_t>(1, (streaming == 0 ? buffers : streaming) / 2);
  if (streaming == 0) return queue_.expect(std::move(expected));
  const std::size_t lacking = expected.size() - std::min(expected.size(), buffers);
  streaming_ = std::min(streaming, lacking);
  queue_.expect_again(std::move(expected), buffers - streaming_);
}

BufferPolicy::Choice BufferPolicy::choose(QueuePlace place) {
  Buffer* buffer = spare();
  if (buffer == nullptr) buffer = wanted_after(place);
  if (buffer != nullptr) return {buffer, {}};
  // Dirty content is left of tasks that this step has none of. All that will be needed is written
  // together: written one after the other, the disk would be idle in between.
  std::vector<Buffer*> dirty = dirty_and_unwanted();
  dirty.resize(shortage(dirty.size()));
  if (!dirty.empty()) return {nullptr, std::move(dirty)};
  return {one_will_be_spare() ? nullptr : wanted_last(), {}};
}

BufferPolicy::ReadAhead BufferPolicy::choose_read_ahead() {
  const Expectation* const next = first_missing();
  if (next == nullptr) return {};
  Buffer* buffer = spare();
  if (buffer == nullptr) buffer = wanted_after(queue_.first_place(next->key));
  if (buffer == nullptr && queue_.repeats()) {
    const std::vector<Buffer*> dirty = dirty_and_unwanted();
    if (!dirty.empty()) buffer = dirty.front();
  }
  return {next, buffer};
}

bool BufferPolicy::reads_ahead_first() const {
  if (!queue_.repeats() || queue_.expected() > buffers_.size() + streaming_) return false;
  const Expectation* const next = first_missing();
  if (next == nullptr || next->priority >= queue_.front().task.priority) return false;
  const auto read_ahead = std::count_if(buffers_.begin(), buffers_.end(),
                                        [](const Buffer& buffer) { return buffer.read_ahead; });
  return static_cast<std::size_t>(read_ahead) + 2 < streaming_;
}

bool BufferPolicy::writes_at_once(std::int64_t key) const {
  if (queue_.repeats()) return !queue_.keeps(key) && !queue_.is_queued(key);
  return queue_.first_place(key) == WorkQueue::kNowhere && shortage(1) > 0;
}

bool BufferPolicy::is_wanted(const Buffer& buffer) const {
  return queue_.first_place(buffer.key) != WorkQueue::kNowhere || queue_.keeps(buffer.key);
}

Buffer* BufferPolicy::spare() {
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (!buffer.free_at_once() || is_wanted(buffer)) continue;
    if (found == nullptr || buffer.last_used < found->last_used) found = &buffer;
  }
  return found;
}

std::vector<Buffer*> BufferPolicy::dirty_and_unwanted() {
  std::vector<Buffer*> found;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned || !buffer.dirty() || is_wanted(buffer)) continue;
    found.push_back(&buffer);
  }
  std::sort(found.begin(), found.end(),
            [](const Buffer* a, const Buffer* b) { return a->last_used < b->last_used; });
  return found;
}

bool BufferPolicy::one_will_be_spare() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [&](const Buffer& buffer) {
    return buffer.state == BufferState::assigned && !is_wanted(buffer);
  });
}

Buffer* BufferPolicy::wanted_last() {
  const auto rank = [&](const Buffer& buffer) {
    return std::pair(!queue_.keeps(buffer.key), queue_.first_place(buffer.key));
  };
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned) continue;
    if (found == nullptr || rank(buffer) > rank(*found)) found = &buffer;
  }
  return found;
}

Buffer* BufferPolicy::wanted_after(QueuePlace place) {
  if (!queue_.repeats()) return nullptr;
  const bool for_task = place.priority < WorkQueue::kExpected;
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned || queue_.keeps(buffer.key)) continue;
    if (for_task && buffer.read_ahead) continue;
    const QueuePlace wanted = queue_.first_place(buffer.key);
    if (wanted <= place || wanted == WorkQueue::kNowhere) continue;
    if (found == nullptr || wanted > queue_.first_place(found->key)) found = &buffer;
  }
  return found;
}

const Expectation* BufferPolicy::first_missing() const {
  const Expectation* missing = nullptr;
  queue_.each_expected([&](const Expectation& expected) {
    if (buffers_.find(expected.key) == nullptr) missing = &expected;
    return missing == nullptr;
  });
  return missing;
}

std::size_t BufferPolicy::shortage(std::size_t limit) const {
  if (limit == 0) return 0;
  auto spare = static_cast<std::size_t>(std::count_if(
      buffers_.begin(), buffers_.end(),
      [&](const Buffer& buffer) { return buffer.free_at_once() && !is_wanted(buffer); }));
  std::size_t missing = 0;
  const auto count = [&](std::int64_t key) {  // returns whether to go on
    if (buffers_.find(key) == nullptr) {
      if (spare > 0) {
        --spare;
      } else {
        ++missing;
      }
    }
    return missing < limit;
  };
  for (const Work& work : queue_) {
    const StepTask& task = work.task;
    if (!task.needs_buffer()) continue;
    if (queue_.first_place(task.key) != work.place) continue;  // an earlier one brings its content
    if (!count(task.key)) return missing;
  }
  queue_.each_expected([&](const Expectation& expected) { return count(expected.key); });
  return missing;
}

}  // namespace hetero
