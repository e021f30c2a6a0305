#include "pipeline/buffer_pool.h"

#include <algorithm>

#include "base/check.h"

namespace hetero {

bool all_done(const Operations& operations) {
  return std::ranges::all_of(operations, [](const auto& each) { return each->done(); });
}

std::exception_ptr wait_for_all(const Operations& operations) {
  std::exception_ptr error;
  for (const auto& each : operations) {
    try {
      each->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  return error;
}

bool Buffer::settle() {
  if (state == BufferState::reading && all_done(reads)) {
    if (wait_for_all(reads)) drop();
    reads.clear();
    state = BufferState::idle;
  }
  if (state == BufferState::writing && all_done(writes)) {
    if (const auto error = wait_for_all(writes)) std::rethrow_exception(error);
    writes.clear();
    state = BufferState::idle;
  }
  return state == BufferState::idle;
}

void Buffer::drop() {
  keeps_optim_state = keeps_param = read_ahead = false;
  dirty_at = kClean;
}

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
  HETERO_CHECK(is_consistent());
}

void BufferPool::forget(Buffer& buffer) {
  HETERO_CHECK(!buffer.dirty());
  by_key_.erase(buffer.key);
  buffer.key = Buffer::kNoKey;
  buffer.drop();
  buffer.last_used = 0;
}

bool BufferPool::is_consistent() const {
  std::size_t named = 0;
  for (const Buffer& buffer : buffers_) {
    if (buffer.key != Buffer::kNoKey) {
      ++named;
      if (find(buffer.key) != &buffer) return false;
    }
    if (buffer.dirty() && (!buffer.keeps_optim_state || buffer.read_ahead)) return false;
  }
  return named == by_key_.size();
}

}  // namespace hetero
