#include "pipeline/step_buffers.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace hetero {

bool Buffer::settle() {
  if (state == BufferState::reading) {
    for (const auto& read : reads) {
      if (!read->done()) return false;
    }
    try {
      for (const auto& read : reads) read->wait();
    } catch (...) {
      drop();
    }
    reads.clear();
    state = BufferState::idle;
  }
  if (state != BufferState::writing) return state == BufferState::idle;
  for (const auto& write : writes) {
    if (!write->done()) return false;
  }
  for (const auto& write : writes) write->wait();
  writes.clear();
  state = BufferState::idle;
  return true;
}

void Buffer::drop() {
  keeps_record = keeps_param = read_ahead = false;
  dirty_at = kClean;
}

// --- the queue ------------------------------------------------------------------------------

void WorkQueue::push(Work work) {
  const std::int64_t key = work.task.key;
  work.turn = {work.task.due, pushed_++};
  if (work.task.needs_buffer()) turns_[key].push_back(work.turn);
  forget_expected(key);
  // From the end, because most come in their turn.
  auto at = works_.end();
  const auto first = works_.begin() + (front_is_held_ ? 1 : 0);
  while (at != first && work.turn < std::prev(at)->turn && std::prev(at)->task.key != key) --at;
  works_.insert(at, std::move(work));
}

Work WorkQueue::pop() {
  Work work = std::move(works_.front());
  works_.pop_front();
  front_is_held_ = false;
  if (work.task.needs_buffer()) {
    const auto found = turns_.find(work.task.key);
    found->second.pop_front();
    if (found->second.empty()) turns_.erase(found);
  }
  return work;
}

void WorkQueue::clear() {
  works_.clear();
  front_is_held_ = false;
  turns_.clear();
  expect({});
}

void WorkQueue::expect(std::vector<Expectation> expected) {
  set_expected(std::move(expected));
  repeats_ = false;
  kept_.clear();
}

void WorkQueue::expect_again(std::vector<Expectation> expected, std::size_t keep) {
  if (!expected.empty()) {
    std::vector<std::size_t> places(expected.size());
    std::iota(places.begin(), places.end(), 0);
    keep = std::min(keep, places.size());
    std::partial_sort(places.begin(), places.begin() + keep, places.end(),
                      [&](std::size_t a, std::size_t b) {
                        return std::pair(expected[a].due, b) < std::pair(expected[b].due, a);
                      });
    kept_.clear();
    for (std::size_t i = 0; i < keep; ++i) kept_.insert(expected[places[i]].key);
  }
  set_expected(std::move(expected));
  repeats_ = true;
}

void WorkQueue::set_expected(std::vector<Expectation> expected) {
  expected_ = std::move(expected);
  expected_from_ = 0;
  expected_at_.clear();
  for (std::size_t i = 0; i < expected_.size(); ++i) expected_at_.emplace(expected_[i].key, i);
}

void WorkQueue::forget_expected(std::int64_t key) {
  if (key < 0) return set_expected({});
  expected_at_.erase(key);
  while (expected_from_ < expected_.size() && !is_expected(expected_from_)) ++expected_from_;
}

Turn WorkQueue::next_use(std::int64_t key) const {
  const auto found = turns_.find(key);
  if (found != turns_.end()) return found->second.front();
  const auto expected = expected_at_.find(key);
  return expected == expected_at_.end() ? kNever : Turn{kExpected, expected->second};
}

// --- the pool -------------------------------------------------------------------------------

BufferPool::BufferPool(char* memory, std::size_t count, std::size_t buffer_bytes)
    : buffers_(count) {
  for (std::size_t i = 0; i < count; ++i) buffers_[i].memory = memory + i * buffer_bytes;
}

Buffer* BufferPool::find(std::int64_t key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

void BufferPool::rename(Buffer& buffer, std::int64_t key) {
  forget(buffer);
  buffer.key = key;
  by_key_[key] = &buffer;
}

void BufferPool::forget(Buffer& buffer) {
  by_key_.erase(buffer.key);
  buffer.key = Buffer::kNoKey;
  buffer.drop();
  buffer.last_used = 0;
}

bool BufferPool::wanted(const Buffer& buffer, const WorkQueue& queue) const {
  return queue.next_use(buffer.key) != WorkQueue::kNever || queue.keeps(buffer.key);
}

Buffer* BufferPool::spare(const WorkQueue& queue) {
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (!buffer.free_at_once() || wanted(buffer, queue)) continue;
    if (found == nullptr || buffer.last_used < found->last_used) found = &buffer;
  }
  return found;
}

std::vector<Buffer*> BufferPool::launderable(const WorkQueue& queue) {
  std::vector<Buffer*> found;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned || !buffer.dirty() || wanted(buffer, queue)) continue;
    found.push_back(&buffer);
  }
  std::sort(found.begin(), found.end(),
            [](const Buffer* a, const Buffer* b) { return a->last_used < b->last_used; });
  return found;
}

bool BufferPool::one_will_be_spare(const WorkQueue& queue) const {
  return std::any_of(buffers_.begin(), buffers_.end(), [&](const Buffer& buffer) {
    return buffer.state == BufferState::assigned && !wanted(buffer, queue);
  });
}

Buffer* BufferPool::wanted_last(const WorkQueue& queue) {
  const auto rank = [&](const Buffer& buffer) {
    return std::pair(!queue.keeps(buffer.key), queue.next_use(buffer.key));
  };
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned) continue;
    if (found == nullptr || rank(buffer) > rank(*found)) found = &buffer;
  }
  return found;
}

Buffer* BufferPool::given_up(const WorkQueue& queue, Turn turn) {
  if (!queue.repeats()) return nullptr;
  const bool for_task = turn.due < WorkQueue::kExpected;
  Buffer* last = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned || queue.keeps(buffer.key)) continue;
    if (for_task && buffer.read_ahead) continue;
    const Turn next = queue.next_use(buffer.key);
    if (next <= turn || next == WorkQueue::kNever) continue;
    if (last == nullptr || next > queue.next_use(last->key)) last = &buffer;
  }
  return last;
}

std::size_t BufferPool::read_ahead() const {
  return static_cast<std::size_t>(std::count_if(
      buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return buffer.read_ahead; }));
}

const Expectation* BufferPool::first_missing(const WorkQueue& queue) const {
  const Expectation* missing = nullptr;
  queue.each_expected([&](const Expectation& expected) {
    if (find(expected.key) == nullptr) missing = &expected;
    return missing == nullptr;
  });
  return missing;
}

std::size_t BufferPool::shortage(const WorkQueue& queue, std::size_t limit) const {
  auto spare = static_cast<std::size_t>(std::count_if(
      buffers_.begin(), buffers_.end(),
      [&](const Buffer& buffer) { return buffer.free_at_once() && !wanted(buffer, queue); }));
  std::size_t missing = 0;
  const auto count = [&](std::int64_t key) {  // whether to go on
    if (find(key) == nullptr) {
      if (spare > 0) {
        --spare;
      } else {
        ++missing;
      }
    }
    return missing < limit;
  };
  if (limit == 0) return 0;
  for (const Work& work : queue) {
    const StepTask& task = work.task;
    if (!task.needs_buffer()) continue;
    if (queue.next_use(task.key) != work.turn) continue;  // an earlier one brings its content
    if (!count(task.key)) return missing;
  }
  queue.each_expected([&](const Expectation& expected) { return count(expected.key); });
  return missing;
}

}  // namespace hetero
