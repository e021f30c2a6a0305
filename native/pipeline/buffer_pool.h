// The step pipeline's buffers: whose they are, and what they keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

#include "io/io_operation.h"
#include "pipeline/step_task.h"

namespace hetero {

enum class BufferState {
  idle,      // no task's and no transfer's; may keep the content of `key`
  reading,   // the engine fills it ahead of a task, until its reads are done; then idle
  assigned,  // a task's that is not updated yet: its reads fill it, its update changes it
  writing,   // the engine reads it, until its writes are done; then idle
};

using Operations = std::vector<std::shared_ptr<IoOp>>;

bool all_done(const Operations& operations);
// Waits for all of them; returns the first failure, or null.
std::exception_ptr wait_for_all(const Operations& operations);

// A buffer keeps its content after its task. An optimizer state that is kept is *clean* (the file
// has the same) or *dirty* (the file is behind). A tile may have content at two places of the file
// (step_task.h), so the buffer knows from which one its own is.
//
// `reads` and `checksums` belong to the task that has the buffer, if one has; all else to the
// pipeline's lock.
struct Buffer {
  static constexpr std::int64_t kNoKey = -1;
  static constexpr std::int64_t kClean = -1;

  // Makes the buffer idle if its transfers are done; returns whether it is idle. Throws if a write
  // failed. What could not be read ahead is not kept, so that its task reads it again.
  bool settle();
  void drop();  // its content
  bool dirty() const { return dirty_at != kClean; }
  // Whether what it keeps of the task's tile, if anything, is what the task is to update.
  bool keeps_current(const StepTask& task) const {
    return (!keeps_optim_state || optim_state_at == task.optim_state.file_offset) &&
           (!keeps_param || !task.param.in_file() || param_at == task.param.file_offset);
  }
  // Whether it can be given away without taking it from a task and without a write.
  bool free_at_once() const { return state != BufferState::assigned && !dirty(); }

  char* memory = nullptr;
  BufferState state = BufferState::idle;
  std::int64_t key = kNoKey;  // whose content is here, or is on its way
  bool keeps_optim_state = false;
  bool keeps_param = false;
  std::int64_t optim_state_at = 0, param_at = 0;  // file offsets of what it keeps
  bool read_ahead = false;         // what it keeps was read for a task that did not come yet
  std::int64_t dirty_at = kClean;  // file offset where the dirty optimizer state belongs
  std::uint64_t last_used = 0;
  Operations reads, writes;
  // Of its pages as the last update has left them; none if the file has none.
  PageChecksums::Checksums checksums;
};

// It does not lock: it is used under the pipeline's lock.
class BufferPool {
 public:
  BufferPool(char* memory, std::size_t count, std::size_t buffer_bytes);

  std::size_t size() const { return buffers_.size(); }
  auto begin() { return buffers_.begin(); }
  auto end() { return buffers_.end(); }
  auto begin() const { return buffers_.begin(); }
  auto end() const { return buffers_.end(); }

  // The buffer with the key's content, whatever its state; nullptr if there is none.
  Buffer* find(std::int64_t key) const;
  // Gives the buffer, whose content is no longer wanted, to the key.
  void rename(Buffer& buffer, std::int64_t key);
  void forget(Buffer& buffer);
  void touch(Buffer& buffer) { buffer.last_used = ++clock_; }

  // Whether buffers with a key and the index by key are one to one, and only an optimizer state
  // that is kept is dirty; for HETERO_CHECK.
  bool is_consistent() const;

 private:
  std::vector<Buffer> buffers_;
  std::unordered_map<std::int64_t, Buffer*> by_key_;
  std::uint64_t clock_ = 0;  // orders the uses of buffers
};

}  // namespace hetero
